"""The cost of Ray: one GPT under torch.distributed.pipelining over gloo and under raysim's Ray engine, timed in turn.

Both run 1F1B on the same stages, batches and optimiser, one process and one thread a stage, on loopback; Ray is down
while torch runs. The figure is the ratio of their step times, pair by pair, with the interval of its median.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from raysim.bench.intervals import MedianInterval, median_interval
from raysim.bench.torch_pipeline import run_rank
from raysim.bench.workload import bench_config, engine_step_s
from raysim.engine.ray import RayEngine
from raysim.pipeline.plan import Workload, prepare

TIMEOUT_S = 900.0


def bench_pipeline(num_stages: list[int], *, pairs: int = 7, steps: int = 20) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every run among them."""
    results: list[dict[str, Any]] = []
    for stages in num_stages:
        workload = prepare(bench_config(stages))
        runs = []
        for pair in range(pairs):
            sides = [("torch", _torch_step_s), ("ray", _ray_step_s)]
            timed = {name: measure(workload, steps) for name, measure in (sides if pair % 2 == 0 else sides[::-1])}
            runs.append(timed)
            Console(stderr=True).print(
                f"{stages} stages, pair {pair + 1}: torch {timed['torch']:.4f} s, Ray {timed['ray']:.4f} s a step"
            )
        ratios = sorted(run["ray"] / run["torch"] for run in runs)
        interval = median_interval(ratios)
        results.append(
            {
                "num_stages": stages,
                "steps": steps,
                "runs": runs,
                "ratio": statistics.median(ratios),
                "ratio_low": interval.low,
                "ratio_high": interval.high,
                "ratio_coverage": interval.coverage,
            }
        )
    table = Table("stages", title=f"Seconds a step, median of {pairs} pairs of {steps} steps")
    for name in ("torch 1F1B over gloo", "raysim on Ray", "ratio", "interval (covers)"):
        table.add_column(name, justify="right")
    for result in results:
        torch_s, ray_s = (statistics.median(run[name] for run in result["runs"]) for name in ("torch", "ray"))
        spread = str(MedianInterval(*(result[f"ratio_{name}"] for name in ("low", "high", "coverage"))))
        table.add_row(str(result["num_stages"]), f"{torch_s:.4f}", f"{ray_s:.4f}", f"{result['ratio']:.3f}", spread)
    Console().print(table)
    return {"torch": torch.__version__, "cores": os.cpu_count(), "results": results}


def _ray_step_s(workload: Workload, steps: int) -> float:
    return engine_step_s(RayEngine(workload), steps)


def _torch_step_s(workload: Workload, steps: int) -> float:
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    receiver, sender = context.Pipe(duplex=False)
    ranks = []
    for rank in range(workload.plan.num_stages):
        ranks.append(context.Process(target=_torch_rank, args=(rank, port, workload, steps, sender), daemon=True))
        ranks[-1].start()
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not receiver.poll(1):
            if time.monotonic() > deadline or any(process.exitcode for process in ranks):
                raise RuntimeError("torch's ranks died, or gave no answer in time.")
        return float(receiver.recv())
    finally:
        for process in ranks:
            process.join(timeout=30)
            process.kill()


def _torch_rank(rank: int, port: int, workload: Workload, steps: int, answer: Connection) -> None:
    seconds = run_rank(rank, workload, steps, address="127.0.0.1", port=port, interface="lo")
    if rank == 0:
        answer.send(seconds)
