"""The bench GPT over slow links: torch uncompressed, and raysim compressed, beside raysim uncompressed on loopback.

Hosts on this machine have shaped links (see `raysim.validate.hosts`) and a stage each; on loopback all stages are on one
host. All sides are measured one after another in every turn; figures are ratios within a turn, and medians over turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from raysim.bench.intervals import MedianInterval, median_interval
from raysim.bench.workload import WARMUP_STEPS, bench_config, time_engine
from raysim.engine.ray import RayEngine
from raysim.pipeline.plan import prepare
from raysim.show.terminal import console
from raysim.validate.hosts import Hosts, check_machine
from raysim.validate.runs import Driver, FailedError, driving, link

PORT = 29_500
TIMEOUT_S = 900.0


LOOPBACK, FREE = "loopback", "free"


class Side(NamedTuple):
    """The training job of a comparison, and its links."""

    trainer: str
    links: str
    """A rate; "free" between hosts whose links are not shaped, "loopback" on one host."""
    codec: str = "Identity"
    """Both ways."""
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

    Raises ConfigError where the machine cannot make hosts (it needs Linux and root), FailedError where a side breaks off.
    """
    check_machine()
    seconds: dict[Side, list[float]] = {side: [] for side in SIDES}
    on_cluster = [side for side in SIDES if side.trainer == "raysim" and side.links != LOOPBACK]
    with Hosts.made(num_hosts) as hosts, TemporaryDirectory() as folder:
        for turn in range(turns):
            with driving(hosts) as driver:
                for place, side in enumerate(on_cluster if turn % 2 == 0 else on_cluster[::-1]):
                    found = _raysim_step_s(driver, num_hosts, side, Path(folder) / f"{turn}-{place}", steps)
                    seconds[side].append(found)
            for side in SIDES:  # the cluster is down while others run
                if side == BASE:
                    seconds[side].append(time_engine(RayEngine(prepare(bench_config(num_hosts))), steps).seconds)
                elif side.trainer == "torch":
                    seconds[side].append(_torch_step_s(hosts, side.links, steps))
            said = ", ".join(f"{values[-1]:.3f}" for values in seconds.values())
            Console(stderr=True).print(f"turn {turn + 1}: seconds a step {said}", highlight=False)
    results = [_result(side, seconds) for side in SIDES]
    console().print(_table(results, f"A stage on each of {num_hosts} hosts, medians of {turns} turns of {steps} steps"))
    return {"bench": "links", "hosts": num_hosts, "turns": turns, "steps": steps, "sides": results}


def _result(side: Side, seconds: dict[Side, list[float]]) -> dict[str, Any]:
    """Return a side's seconds, and their ratios to the seconds on loopback and to torch's over the same links."""
    ratios = sorted(a / b for a, b in zip(seconds[side], seconds[BASE], strict=True))
    interval = median_interval(ratios)
    torch_s = seconds.get(Side("torch", side.links))
    of_torch = [a / b for a, b in zip(seconds[side], torch_s, strict=True)] if torch_s else None
    return side._asdict() | {
        "seconds": seconds[side],
        "ratio": statistics.median(ratios),
        "ratio_low": interval.low,
        "ratio_high": interval.high,
        "ratio_coverage": interval.coverage,
        "ratio_of_torch": statistics.median(of_torch) if of_torch else None,
    }


def _table(results: list[dict[str, Any]], title: str) -> Table:
    table = Table("links", "trained with", "both ways", "schedule", title=title)
    for name in ("seconds a step", "of loopback", "interval (covers)", "of torch"):
        table.add_column(name, justify="right")
    for one in results:
        table.add_row(
            *(one[name] for name in ("links", "trainer", "codec", "schedule")),
            f"{statistics.median(one['seconds']):.3f}",
            f"{one['ratio']:.3f}",
            str(MedianInterval(*(one[f"ratio_{name}"] for name in ("low", "high", "coverage")))),
            "" if one["ratio_of_torch"] is None else f"{one['ratio_of_torch']:.3f}",
        )
    return table


def _raysim_step_s(driver: Driver, num_hosts: int, side: Side, folder: Path, steps: int) -> float:
    changes = {"forward": side.codec, "backward": side.codec, "schedule": side.schedule}
    rates = {WARMUP_STEPS + step: None if side.links == FREE else side.links for step in range(steps)}
    run = driver.train(bench_config(num_hosts).model_dump(mode="json") | changes, folder, rates)
    return float(run.steps[run.steps["step"] >= WARMUP_STEPS]["seconds"].mean())


def _torch_step_s(hosts: Hosts, rate: str, steps: int) -> float:
    hosts.shape(*link(rate))
    with _without_loopback(hosts):
        return _torch_on(hosts, steps)


def _torch_on(hosts: Hosts, steps: int) -> float:
    words = [sys.executable, "-m", "raysim.bench.torch_pipeline"]
    ranks = [
        subprocess.Popen(
            hosts.inside(rank, *words, str(rank), str(hosts.count), hosts.address(0), str(PORT), str(steps), "lo"),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # addresses without names are no warning here
        )
        for rank in range(hosts.count)
    ]
    try:
        said = ranks[0].communicate(timeout=TIMEOUT_S)[0]
        if any(rank.wait(timeout=60) for rank in ranks):
            raise FailedError("A rank of torch died.")
        return float(said)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@contextmanager
def _without_loopback(hosts: Hosts) -> Iterator[None]:
    """Leave each host its own address alone: gloo takes the first of a device, which a host has on its loopback device."""
    loopback = ("127.0.0.1/8", "dev", "lo")
    for host in range(hosts.count):
        subprocess.run(hosts.inside(host, "ip", "address", "delete", *loopback), check=True)
    try:
        yield
    finally:
        for host in range(hosts.count):
            subprocess.run(hosts.inside(host, "ip", "address", "add", *loopback), check=True)
