"""Microseconds from worker to worker: a packet's time without compute and codec, on one machine.

A small GPT, whose stages compute for a few milliseconds, is trained with one microbatch, so that every worker waits for every
packet. A hop is the time from the end of encoding at the sender to the start of the action at the receiver. It includes the
hand-over, Ray's call, and the receiver's wake-up. With several microbatches, hops overlap with compute and lengthen the step less.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.table import Table

from raysim.cli.terminal import console
from raysim.config import RunConfig, make_config
from raysim.engine.ray import RayEngine
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepReport
from raysim.schedules.actions import Action, dependency
from raysim.units import format_seconds
from raysim_benchmarks.workload import WARMUP_STEPS, bench_config

SMALL = {"name": "gpt", "num_blocks": 4, "width": 32, "num_heads": 4, "tied": False}
MICROBATCHES = (1, 8)
SAMPLES = 4  # of a microbatch


def bench_hops(num_stages: list[int], *, steps: int = 100) -> dict[str, Any]:
    """Measure and print; return the figures."""
    results = [_measure(stages, steps) for stages in num_stages]
    table = Table("stages", title=f"A GPT of 4 blocks of width 32, medians over {steps} steps")
    for name in ("a hop", "its quartiles", *(f"step of {count} microbatches" for count in MICROBATCHES)):
        table.add_column(name, justify="right")
    for result in results:
        low, middle, high = result["hop_us"]
        seconds = (format_seconds(result["step_s"][count]) for count in MICROBATCHES)
        table.add_row(str(result["num_stages"]), f"{middle:.0f} us", f"{low:.0f} to {high:.0f} us", *seconds)
    console().print(table)
    return {"bench": "hops", "steps": steps, "results": results}


def _measure(num_stages: int, steps: int) -> dict[str, Any]:
    seconds, hops = {}, list[float]()
    for count in MICROBATCHES:
        engine = RayEngine(prepare(_config(num_stages, count)))
        took = []
        try:
            engine.start()
            for step in range(WARMUP_STEPS + steps):
                before = time.perf_counter()
                reports = engine.step(step)
                if step >= WARMUP_STEPS:
                    took.append(time.perf_counter() - before)
                    hops += hops_of(reports, num_stages) if count == 1 else []
        finally:
            engine.close()
        seconds[count] = statistics.median(took)
    return {"num_stages": num_stages, "hop_us": [1e6 * q for q in statistics.quantiles(hops, n=4)], "step_s": seconds}


def hops_of(reports: list[StepReport], num_stages: int) -> list[float]:
    """Return the seconds of every hop of a step."""
    made, started = {}, {}
    for record in (record for report in reports for record in report.actions):
        action = Action(record.stage, record.op, record.microbatch)
        started[action] = record.start_s
        made[action] = record.start_s + record.decode_s + record.compute_wall_s + record.encode_s
    sources = {action: dependency(action, num_stages) for action in started}
    return [started[action] - made[source] for action, source in sources.items() if source is not None]


def _config(num_stages: int, microbatches: int) -> RunConfig:
    changes = {"model": SMALL, "num_microbatches": microbatches, "batch_size": SAMPLES * microbatches}
    return make_config(bench_config(num_stages).model_dump(mode="json") | changes | {"profile_every_steps": 1})
