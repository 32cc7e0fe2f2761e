"""A GPT over slow links: torch uncompressed, raysim compressed, and raysim uncompressed on loopback.

Hosts on this machine have shaped links (see `raysim_benchmarks.hosts.namespaces`) and a stage each; on loopback all stages are on
one host. Every turn measures all sides one after another; figures are ratios within a turn, and medians over turns.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.table import Table

from raysim.cli.terminal import console
from raysim.console import PlainConsole
from raysim.engine.ray import RayEngine
from raysim.pipeline.prepare import prepare
from raysim.units import format_seconds
from raysim_benchmarks.harness import MedianInterval, in_turn, median_interval
from raysim_benchmarks.hosts.driver import Driver, driving
from raysim_benchmarks.hosts.namespaces import Hosts, check_machine, parse_link
from raysim_benchmarks.ranks import run_ranks
from raysim_benchmarks.workload import WARMUP_STEPS, bench_config, time_engine

LOOPBACK, FREE = "loopback", "free"


class Side(NamedTuple):
    """One side of a comparison: its library, links and codec."""

    trainer: str
    links: str
    """A rate, "free" for unshaped links between hosts, or "loopback" for one host."""
    codec: str = "Identity"
    """For both directions."""
    schedule: str = "1F1B"


BASE = Side("raysim", LOOPBACK)
SIDES = (
    BASE,
    Side("raysim", FREE),
    Side("torch", "100mbps"),
    Side("raysim", "100mbps"),
    Side("raysim", "100mbps", "Quantize(8)"),
    Side("raysim", "100mbps", "Quantize(8)", "1F1B(ahead=2)"),
    Side("torch", "20mbps"),
    Side("raysim", "20mbps", "Quantize(4)"),
    Side("raysim", "20mbps", "Quantize(4)", "1F1B(ahead=2)"),
)


def bench_links(*, num_hosts: int = 2, turns: int = 3, steps: int = 10) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every turn among them.

    Raises ConfigError if this machine cannot make hosts (Linux and root are needed), FailedError if a side fails.
    """
    check_machine()
    seconds: dict[Side, list[float]] = {side: [] for side in SIDES}
    on_cluster = [side for side in SIDES if side.trainer == "raysim" and side.links != LOOPBACK]
    with Hosts.made(num_hosts) as hosts, TemporaryDirectory() as folder:
        for turn in range(turns):
            with driving(hosts) as driver:
                for i, side in enumerate(in_turn(on_cluster, turn)):
                    step_s = _raysim_step_s(driver, num_hosts, side, Path(folder) / f"{turn}-{i}", steps)
                    seconds[side].append(step_s)
            for side in SIDES:  # the cluster is down while other sides run
                if side == BASE:
                    seconds[side].append(time_engine(RayEngine(prepare(bench_config(num_hosts))), steps).seconds)
                elif side.trainer == "torch":
                    seconds[side].append(_torch_step_s(hosts, side.links, steps))
            words = ", ".join(format_seconds(values[-1]) for values in seconds.values())
            PlainConsole(stderr=True).print(f"turn {turn + 1}: a step {words}")
    results = [_result(side, seconds) for side in SIDES]
    console().print(_table(results, f"A stage on each of {num_hosts} hosts, medians of {turns} turns of {steps} steps"))
    return {"bench": "links", "hosts": num_hosts, "turns": turns, "steps": steps, "sides": results}


def _result(side: Side, seconds: dict[Side, list[float]]) -> dict[str, Any]:
    """Return a side's seconds, and their ratios to those on loopback and to torch's over the same links."""
    torch_s = seconds.get(Side("torch", side.links))
    of_torch = statistics.median(_ratios(seconds[side], torch_s)) if torch_s else None
    of_loopback = median_interval(_ratios(seconds[side], seconds[BASE]))
    return side._asdict() | {"seconds": seconds[side]} | of_loopback.figures() | {"ratio_of_torch": of_torch}


def _ratios(seconds: list[float], base: list[float]) -> list[float]:
    return [a / b for a, b in zip(seconds, base, strict=True)]


def _table(results: list[dict[str, Any]], title: str) -> Table:
    table = Table("links", "trained with", "both ways", "schedule", title=title)
    for name in ("a step", "of loopback", "interval (covers)", "of torch"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            *(result[name] for name in ("links", "trainer", "codec", "schedule")),
            format_seconds(statistics.median(result["seconds"])),
            f"{result['ratio']:.3f}",
            str(MedianInterval(*(result[name] for name in ("ratio", "ratio_low", "ratio_high", "ratio_coverage")))),
            "" if result["ratio_of_torch"] is None else f"{result['ratio_of_torch']:.3f}",
        )
    return table


def _raysim_step_s(driver: Driver, num_hosts: int, side: Side, folder: Path, steps: int) -> float:
    changes = {"forward": side.codec, "backward": side.codec, "schedule": side.schedule}
    rates = {WARMUP_STEPS + step: None if side.links == FREE else side.links for step in range(steps)}
    run = driver.train(bench_config(num_hosts).model_dump(mode="json") | changes, folder, rates)
    return float(run.steps[run.steps["step"] >= WARMUP_STEPS]["seconds"].mean())


def _torch_step_s(hosts: Hosts, rate: str, steps: int) -> float:
    hosts.shape(*parse_link(rate))
    (seconds, _), *_ = run_ranks("raysim_benchmarks.bench.torch_pipeline", hosts.count, steps, hosts=hosts)
    return float(seconds)
