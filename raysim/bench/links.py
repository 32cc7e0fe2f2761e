"""The bench GPT over slow links: torch uncompressed, and raysim compressed, beside raysim uncompressed between free links.

Two hosts on this machine with shaped links (see `raysim.validate.hosts`), a stage on each. Every side is measured anew in
every turn, in turn with the others; figures are ratios within a turn, and medians over turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from raysim.bench.workload import WARMUP_STEPS, bench_config, median_interval
from raysim.show.terminal import console
from raysim.validate.hosts import Hosts, check_machine
from raysim.validate.runs import Driver, FailedError, bandwidth_bps, driving

PORT = 29_500
TIMEOUT_S = 900.0


class Side(NamedTuple):
    """What is trained, and over which links."""

    name: str
    rate: str | None
    codec: str | None = None
    """Both ways; None: torch, uncompressed."""
    schedule: str = "1F1B"


FREE = Side("raysim, free links", None, "Identity")
SIDES = (
    FREE,
    Side("torch", "100mbps"),
    Side("raysim", "100mbps", "Identity"),
    Side("raysim", "100mbps", "Quantize(8)"),
    Side("raysim", "100mbps", "Quantize(8)", "1F1B(ahead=2)"),
    Side("torch", "20mbps"),
    Side("raysim", "20mbps", "Quantize(4)"),
    Side("raysim", "20mbps", "Quantize(4)", "1F1B(ahead=2)"),
)


def bench_links(*, turns: int = 3, steps: int = 10) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every turn among them. Needs Linux and root."""
    check_machine()
    seconds: dict[Side, list[float]] = {side: [] for side in SIDES}
    with Hosts(2) as hosts, TemporaryDirectory() as folder:
        for turn in range(turns):
            with driving(hosts) as driver:
                ray = [side for side in SIDES if side.codec is not None]
                for place, side in enumerate(ray if turn % 2 == 0 else ray[::-1]):
                    seconds[side].append(_raysim_step_s(driver, side, Path(folder) / f"{turn}-{place}", steps))
            for side in SIDES:  # Ray is down while torch runs
                if side.codec is None:
                    seconds[side].append(_torch_step_s(hosts, side, steps))
            said = ", ".join(f"{values[-1]:.3f}" for values in seconds.values())
            Console(stderr=True).print(f"turn {turn + 1}: seconds a step {said}", highlight=False)
    results = []
    table = Table("trained with", title=f"Two hosts, medians of {turns} turns of {steps} steps")
    for name in ("both ways", "schedule", "links"):
        table.add_column(name)
    for name in ("seconds a step", "of free links", "interval", "of torch"):
        table.add_column(name, justify="right")
    for side, values in seconds.items():
        ratios = sorted(a / b for a, b in zip(values, seconds[FREE], strict=True))
        torch_s = next((v for s, v in seconds.items() if s.codec is None and s.rate == side.rate), None)
        of_torch = statistics.median(a / b for a, b in zip(values, torch_s, strict=True)) if torch_s else None
        low, high = median_interval(ratios)
        results.append(
            side._asdict() | {"seconds": values, "ratio": statistics.median(ratios), "ratio_of_torch": of_torch}
        )
        table.add_row(
            side.name,
            side.codec or "uncompressed",
            side.schedule,
            side.rate or "free",
            f"{statistics.median(values):.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{low:.2f} to {high:.2f}",
            "" if of_torch is None else f"{of_torch:.2f}",
        )
    console().print(table)
    return {"bench": "links", "turns": turns, "steps": steps, "sides": results}


def _raysim_step_s(driver: Driver, side: Side, folder: Path, steps: int) -> float:
    changes = {"forward": side.codec, "backward": side.codec, "schedule": side.schedule}
    rates = {WARMUP_STEPS + step: side.rate for step in range(steps)}
    run = driver.train(bench_config(2).model_dump(mode="json") | changes, folder, rates)
    return float(run.steps[run.steps["step"] >= WARMUP_STEPS]["seconds"].mean())


def _torch_step_s(hosts: Hosts, side: Side, steps: int) -> float:
    hosts.shape(bandwidth_bps(side.rate))
    words = [sys.executable, "-m", "raysim.bench.torch_pipeline"]
    ranks = [
        subprocess.Popen(
            hosts.inside(rank, *words, str(rank), "2", hosts.address(0), str(PORT), str(steps), f"to{1 - rank}"),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # addresses without names are no warning here
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=TIMEOUT_S)[0]
        if ranks[0].returncode or ranks[1].wait(timeout=60):
            raise FailedError("A rank of torch died.")
        return float(said)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
