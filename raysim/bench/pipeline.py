"""The cost of Ray: one GPT under torch.distributed.pipelining over gloo and under raysim's Ray engine, timed in turn.

Both run 1F1B on the same stages, batches and optimiser, one process and one thread a stage, on loopback; Ray is down
while torch runs. raysim runs uncompressed and with a codec. The figure is the ratio of their step times, turn by turn, with the
interval of its median. Beside it stand the CPU seconds of both: of torch's ranks, and of the stages, the driver and Ray's own
processes.
"""

from __future__ import annotations

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
from raysim.bench.workload import Timing, bench_config, time_engine
from raysim.config import RunConfig, make_config
from raysim.engine.ray import RayEngine
from raysim.limits import usable_cpus
from raysim.pipeline.plan import Workload, prepare

TIMEOUT_S = 900.0


CODECS = ("Identity", "Quantize(8)")  # both ways on raysim's side; torch's is uncompressed


def bench_pipeline(num_stages: list[int], *, pairs: int = 7, steps: int = 20) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every run among them."""
    results: list[dict[str, Any]] = []
    for stages in num_stages:
        workloads = {codec: prepare(_compressed(bench_config(stages), codec)) for codec in CODECS}
        runs = []
        for pair in range(pairs):
            sides = [("torch", _time_torch, "Identity"), *((codec, _time_ray, codec) for codec in CODECS)]
            order = sides if pair % 2 == 0 else sides[::-1]
            runs.append({name: measure(workloads[codec], steps) for name, measure, codec in order})
            said = "; ".join(
                f"{name} {timing.seconds:.4f} s a step, {_cpu(timing)} CPU seconds" for name, timing in runs[-1].items()
            )
            Console(stderr=True).print(f"{stages} stages, turn {pair + 1}: {said}", highlight=False)
        results += [_result(stages, codec, steps, runs) for codec in CODECS]
    table = Table("stages", "raysim's codec", title=f"Seconds a step, median of {pairs} turns of {steps} steps")
    for name in ("torch 1F1B over gloo", "raysim on Ray", "ratio", "interval (covers)"):
        table.add_column(name, justify="right")
    for result in results:
        torch_s, ray_s = (statistics.median(run[name] for run in result["runs"]) for name in ("torch", "ray"))
        spread = str(MedianInterval(*(result[f"ratio_{name}"] for name in ("low", "high", "coverage"))))
        row = (f"{torch_s:.4f}", f"{ray_s:.4f}", f"{result['ratio']:.3f}", spread)
        table.add_row(str(result["num_stages"]), result["codec"], *row)
    Console().print(table)
    Console().print(_cpu_table(results))
    return {"torch": torch.__version__, "cores": usable_cpus(), "results": results}


def _compressed(config: RunConfig, codec: str) -> RunConfig:
    return make_config(config.model_dump(mode="json") | {"forward": codec, "backward": codec})


def _result(stages: int, codec: str, steps: int, runs: list[dict[str, Timing]]) -> dict[str, Any]:
    """Return the figures of raysim with a codec beside torch, over all turns."""
    ratios = sorted(run[codec].seconds / run["torch"].seconds for run in runs)
    interval = median_interval(ratios)
    return {
        "num_stages": stages,
        "codec": codec,
        "steps": steps,
        "runs": [{"torch": run["torch"].seconds, "ray": run[codec].seconds} for run in runs],
        "cpu_s": {
            side: _median_cpu_s([run[name] for run in runs]) for side, name in (("torch", "torch"), ("ray", codec))
        },
        "ratio": statistics.median(ratios),
        "ratio_low": interval.low,
        "ratio_high": interval.high,
        "ratio_coverage": interval.coverage,
    }


def _cpu(timing: Timing) -> str:
    return f"{sum(timing.cpu_s.values()):.3f}"


def _median_cpu_s(timings: list[Timing]) -> dict[str, float]:
    """Return the median CPU seconds of each kind of process."""
    kinds = sorted({kind for timing in timings for kind in timing.cpu_s})
    return {kind: statistics.median(timing.cpu_s.get(kind, 0.0) for timing in timings) for kind in kinds}


def _cpu_table(results: list[dict[str, Any]]) -> Table:
    kinds = sorted({kind for result in results for kind in result["cpu_s"]["ray"]})
    table = Table("stages", "raysim's codec", title="CPU seconds a step, by kind of process")
    for name in ("torch's ranks", *(f"raysim: {kind}" for kind in kinds)):
        table.add_column(name, justify="right")
    for result in results:
        ours = result["cpu_s"]["ray"]
        cells = [result["cpu_s"]["torch"]["ranks"], *(ours.get(kind, 0.0) for kind in kinds)]
        table.add_row(str(result["num_stages"]), result["codec"], *(f"{seconds:.3f}" for seconds in cells))
    return table


def _time_ray(workload: Workload, steps: int) -> Timing:
    return time_engine(RayEngine(workload), steps)


def _time_torch(workload: Workload, steps: int) -> Timing:
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
        answers: list[tuple[float, float]] = []
        while len(answers) < len(ranks):
            if receiver.poll(1):
                answers.append(receiver.recv())
            elif time.monotonic() > deadline or any(process.exitcode for process in ranks):
                raise RuntimeError("torch's ranks died, or gave no answer in time.")
        return Timing(max(seconds for seconds, _ in answers), {"ranks": sum(cpu_s for _, cpu_s in answers)})
    finally:
        for process in ranks:
            process.join(timeout=30)
            process.kill()


def _torch_rank(rank: int, port: int, workload: Workload, steps: int, answers: Connection) -> None:
    answers.send(run_rank(rank, workload, steps, address="127.0.0.1", port=port, interface="lo"))
