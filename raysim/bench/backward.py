"""The cost of a backward in two parts, as zero-bubble schedules want it: beside one backward, stage by stage, in turn.

In CPU seconds of one thread, which other work on the machine disturbs less than it does the clock.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from raysim.bench.intervals import median_interval
from raysim.bench.workload import bench_config
from raysim.config import RunConfig, read_config
from raysim.pipeline.plan import prepare
from raysim.pipeline.stage import Stage
from raysim.values import only

WARMUP = 5


def bench_backward(num_stages: int = 4, *, pairs: int = 51) -> dict[str, Any]:
    """Measure and print; return the figures, by run and stage.

    A ratio is the seconds of B + W over the seconds of one backward, pair by pair. The ratio of all stages weighs them by seconds.
    """
    table = Table("run", "stage", title=f"Backward in two parts, median of {pairs} pairs")
    for name in ("one backward", "B", "W", "ratio", "interval (covers)"):
        table.add_column(name, justify="right")
    results = []
    for config in (bench_config(num_stages), read_config("digits-cnn", [f"num_stages={num_stages}"])):
        timed = _seconds(config, pairs)
        rows: dict[str, list[tuple[float, ...]]] = {str(stage): [*times] for stage, times in enumerate(timed)}
        rows["all"] = [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(*timed, strict=True)]
        for stage, times in rows.items():
            joint_s, input_s, weights_s = (statistics.median(part) for part in zip(*times, strict=True))
            ratios = sorted((b + w) / joint for joint, b, w in times)
            interval = median_interval(ratios)
            ratio = statistics.median(ratios)
            results.append(
                {
                    "name": config.name,
                    "stage": stage,
                    "joint_s": joint_s,
                    "input_s": input_s,
                    "weights_s": weights_s,
                    "ratio": ratio,
                    "ratio_low": interval.low,
                    "ratio_high": interval.high,
                    "ratio_coverage": interval.coverage,
                }
            )
            cells = [f"{1e3 * seconds:.3f} ms" for seconds in (joint_s, input_s, weights_s)]
            table.add_row(config.name, stage, *cells, f"{ratio:.3f}", str(interval))
    Console().print(table)
    return {"torch": torch.__version__, "pairs": pairs, "results": results}


def _seconds(config: RunConfig, pairs: int) -> list[list[tuple[float, float, float]]]:
    """Return by stage the seconds of one backward, B and W of every pair."""
    workload = prepare(config)
    plan, data, last = workload.plan, workload.data.train, workload.plan.num_stages - 1
    epoch, ids = plan.microbatch(0, 0)
    x = data.inputs(ids, epoch, config.seed, True)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads_per_stage)
    found = []
    try:
        for index, module in enumerate(workload.modules):
            targets = data.targets(ids) if index == last else None
            sides = [
                Stage(
                    copy.deepcopy(module),
                    config,
                    torch.device("cpu"),
                    first=index == 0,
                    last=index == last,
                    loss=plan.task.loss,
                )
                for _ in range(2)
            ]
            times = []
            for pair in range(-WARMUP, pairs):
                seconds = {}
                for side in (0, 1) if pair % 2 else (1, 0):
                    y = only(sides[side].forward(0, x, 0, targets))
                    gradient = None if index == last else torch.randn_like(y)
                    start = time.thread_time()
                    if side == 0:
                        sides[side].backward(0, gradient)
                        seconds["joint"] = time.thread_time() - start
                    else:
                        sides[side].backward_input(0, gradient)
                        middle = time.thread_time()
                        sides[side].backward_weights(0)
                        seconds |= {"input": middle - start, "weights": time.thread_time() - middle}
                if pair >= 0:
                    times.append((seconds["joint"], seconds["input"], seconds["weights"]))
            found.append(times)
            x = y
    finally:
        torch.set_num_threads(threads)
    return found
