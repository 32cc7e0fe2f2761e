"""The cost of splitting each stage's backward into B and W, as zero-bubble schedules do.

Seconds are CPU seconds of one thread, which are less disturbed by other work on the machine than wall-clock time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raysim.config import RunConfig, read_config
from raysim.pipeline.prepare import prepare
from raysim.pipeline.stage import Stage
from raysim.values import UNNAMED, Value
from raysim_benchmarks.harness import Comparison, alternate, print_comparisons, torch_threads
from raysim_benchmarks.workload import bench_config

WARMUP = 5


def bench_backward(num_stages: int = 4, *, pairs: int = 51) -> dict[str, Any]:
    """Measure and print; return the figures, by run and stage.

    A ratio is the seconds of B + W (`parts`) divided by those of one backward (`joint`), pair by pair. The ratio of all stages
    weights them by seconds.
    """
    comparisons = []
    for config in (bench_config(num_stages), read_config("digits-cnn", [f"num_stages={num_stages}"])):
        by_stage = list(_runs(config, pairs))
        whole = [{name: sum(run[name] for run in turn) for name in turn[0]} for turn in zip(*by_stage, strict=True)]
        for stage, runs in [*enumerate(by_stage), ("all", whole)]:
            comparisons.append(Comparison({"name": config.name, "stage": str(stage)}, "joint", "parts", runs))
    print_comparisons(f"Backward in two parts, median of {pairs} pairs", comparisons)
    return {"torch": torch.__version__, "pairs": pairs, "results": [comparison.figures() for comparison in comparisons]}


def _runs(config: RunConfig, pairs: int) -> Iterator[list[dict[str, float]]]:
    """Yield by stage the seconds of every pair: one backward, B, W, and B + W."""
    workload = prepare(config)
    plan, data, last = workload.plan, workload.data.train, workload.plan.num_stages - 1
    epoch, ids = plan.microbatch(0, 0)
    x = {UNNAMED: data.inputs(ids, epoch, config.seed, True)}
    with torch_threads(config.threads_per_stage):
        for i, module in enumerate(workload.modules):
            joint, parted = (
                Stage(
                    copy.deepcopy(module),
                    config,
                    torch.device("cpu"),
                    first=i == 0,
                    last=i == last,
                    loss=plan.task.loss,
                )
                for _ in range(2)
            )
            targets = data.targets(ids) if i == last else None
            sides = {"joint": lambda: _joint(joint, x, targets), "parts": lambda: _parts(parted, x, targets)}  # noqa: B023
            yield [
                {"joint": sum(turn["joint"]), "input": turn["parts"][0], "weights": turn["parts"][1]}
                | {"parts": sum(turn["parts"])}
                for turn in alternate(sides, pairs, warm_up=WARMUP)
            ]
            x = joint.forward(0, x, 0, targets)


def _joint(stage: Stage, x: Value, targets: Tensor | None) -> tuple[float, ...]:
    gradient = _gradient(stage, x, targets)
    start = time.thread_time()
    stage.backward(0, gradient)
    return (time.thread_time() - start,)


def _parts(stage: Stage, x: Value, targets: Tensor | None) -> tuple[float, ...]:
    gradient = _gradient(stage, x, targets)
    start = time.thread_time()
    stage.backward_input(0, gradient)
    middle = time.thread_time()
    stage.backward_weights(0)
    return middle - start, time.thread_time() - middle


def _gradient(stage: Stage, x: Value, targets: Tensor | None) -> Value | None:
    """Run the forward and return a gradient of its output, or the loss for the last stage (with targets)."""
    y = stage.forward(0, x, 0, targets)[UNNAMED]
    return {UNNAMED: torch.randn_like(y)} if targets is None else None
