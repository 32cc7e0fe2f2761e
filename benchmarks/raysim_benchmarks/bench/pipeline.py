"""The cost of Ray: one GPT under torch.distributed.pipelining over gloo and under raysim's Ray engine, timed in turn.

Both run 1F1B with the same stages, batches and optimiser, one process and one thread per stage, on loopback; Ray is down
while torch runs. raysim runs uncompressed and with a codec. CPU seconds are those of torch's ranks, or of the stages, the driver
and Ray's own processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from raysim.cli.terminal import console
from raysim.config import RunConfig, make_config
from raysim.engine.ray import RayEngine
from raysim.limits import usable_cpus
from raysim.pipeline.prepare import Workload, prepare
from raysim_benchmarks.harness import Comparison, alternate, print_comparisons
from raysim_benchmarks.ranks import run_ranks
from raysim_benchmarks.workload import Timing, bench_config, time_engine

CODECS = ("Identity", "Quantize(8)")  # in both directions for raysim; torch is uncompressed


def bench_pipeline(num_stages: Sequence[int], *, pairs: int = 7, steps: int = 20) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every run among them."""
    comparisons, cpu_s = [], []
    for stages in num_stages:
        workloads = {codec: prepare(_compressed(bench_config(stages), codec)) for codec in CODECS}
        sides: dict[str, Callable[[], Timing]] = {"torch": partial(_time_torch, stages, steps)}
        sides |= {codec: partial(_time_ray, workload, steps) for codec, workload in workloads.items()}
        turned = alternate(sides, pairs, progress=f"{stages} stages")
        for codec in CODECS:
            labels = {"num_stages": stages, "codec": codec, "steps": steps}
            runs = [{"torch": run["torch"].seconds, "ray": run[codec].seconds} for run in turned]
            comparisons.append(Comparison(labels, "torch", "ray", runs))
            cpu_s.append(
                {
                    name: _median_cpu_s([run[side] for run in turned])
                    for name, side in (("torch", "torch"), ("ray", codec))
                }
            )
    print_comparisons(
        f"A step under torch 1F1B over gloo and under raysim on Ray, median of {pairs} turns", comparisons
    )
    results = [comparison.figures() | {"cpu_s": spent} for comparison, spent in zip(comparisons, cpu_s, strict=True)]
    console().print(_cpu_table(results))
    return {"torch": torch.__version__, "cores": usable_cpus(), "results": results}


def _compressed(config: RunConfig, codec: str) -> RunConfig:
    return make_config(config.model_dump(mode="json") | {"forward": codec, "backward": codec})


def _median_cpu_s(timings: list[Timing]) -> dict[str, float]:
    """Return the median CPU seconds of each kind of process."""
    kinds = sorted({kind for timing in timings for kind in timing.cpu_s})
    return {kind: statistics.median(timing.cpu_s.get(kind, 0.0) for timing in timings) for kind in kinds}


def _cpu_table(results: list[dict[str, Any]]) -> Table:
    kinds = sorted({kind for result in results for kind in result["cpu_s"]["ray"]})
    table = Table("num stages", "codec", title="CPU seconds a step, by kind of process")
    for name in ("torch's ranks", *(f"raysim: {kind}" for kind in kinds)):
        table.add_column(name, justify="right")
    for result in results:
        of_ray = result["cpu_s"]["ray"]
        cells = [result["cpu_s"]["torch"]["ranks"], *(of_ray.get(kind, 0.0) for kind in kinds)]
        table.add_row(str(result["num_stages"]), result["codec"], *(f"{seconds:.3f}" for seconds in cells))
    return table


def _time_ray(workload: Workload, steps: int) -> Timing:
    return time_engine(RayEngine(workload), steps)


def _time_torch(num_stages: int, steps: int) -> Timing:
    ranks = run_ranks("raysim_benchmarks.bench.torch_pipeline", num_stages, steps)
    return Timing(max(seconds for seconds, _ in ranks), {"ranks": sum(cpu_s for _, cpu_s in ranks)})
