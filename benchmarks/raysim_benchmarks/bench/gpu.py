"""Cost of stages on a GPU: a GPT in one process against Ray actors that share the GPU, in turn.

The pipeline does the same work on the same GPU, so the difference of the two steps is the cost of stages: kernels launched from
several processes, and activations and gradients passed through the host. The difference per message is the cost of a hop.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from raysim.config import RunConfig, make_config
from raysim.engine.inline import InlineEngine
from raysim.engine.ray import RayEngine
from raysim.engine.resources import equal_share
from raysim.pipeline.prepare import prepare
from raysim_benchmarks.harness import Comparison, alternate, print_comparisons
from raysim_benchmarks.workload import time_engine

GPT2_SMALL = {"name": "gpt", "num_blocks": 12, "width": 768, "num_heads": 12, "tied": False}


def gpu_config(num_stages: int, device: str = "cuda", **changes: Any) -> RunConfig:
    """Return the benchmark's run: the shape of GPT-2 small, 8 microbatches of 4 samples of 256 bytes, in bfloat16 on the GPU."""
    return make_config(
        {
            "name": "bench-gpu",
            "model": GPT2_SMALL,
            "data": {"name": "topics", "length": 256},
            "num_stages": num_stages,
            "batch_size": 32,
            "num_microbatches": 8,
            "steps": 1_000_000,
            "optimizer": {"name": "adamw", "learning_rate": 3e-4},
            "dtype": "bfloat16",
            "device": device,
            "gpus_per_stage": equal_share(num_stages) if device == "cuda" else 0,
        }
        | changes
    )


def bench_gpu(
    num_stages: int = 4, *, pairs: int = 5, steps: int = 20, device: str = "cuda", **changes: Any
) -> dict[str, Any]:
    """Measure and print; return seconds a step of every run, their ratio, and microseconds a hop. `changes`: keys of the run."""
    whole, staged = (prepare(gpu_config(stages, device, **changes)) for stages in (1, num_stages))
    sides = {
        "one": lambda: time_engine(InlineEngine(whole), steps).seconds,
        "stages": lambda: time_engine(RayEngine(staged), steps).seconds,
    }
    runs = alternate(sides, pairs)
    hops = 2 * (num_stages - 1) * staged.plan.config.num_microbatches
    hop_us = statistics.median(1e6 * (run["stages"] - run["one"]) / hops for run in runs)
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    comparison = Comparison({"num_stages": num_stages, "hop_us": round(hop_us)}, "one", "stages", runs)
    print_comparisons(
        f"A step on {name}, in one process and as stages on Ray, median of {pairs} pairs of {steps} steps", [comparison]
    )
    return comparison.figures() | {"torch": torch.__version__, "device": name, "hop_us": hop_us}
