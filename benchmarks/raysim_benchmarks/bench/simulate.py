"""Speed and memory of the simulator, on one very large schedule and on one run over thousands of networks.

Every case runs in its own process, to measure its own peak memory. Kernels are compiled before the clock starts; the seconds of
the first call are reported separately.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from raysim.cli.terminal import console
from raysim.limits import usable_cpus
from raysim.network.profile import Profile
from raysim.network.simulate import simulate, step_seconds
from raysim.network.topology import Network
from raysim.schedules.families import OneFOneB
from raysim.units import format_bytes, format_seconds

TARGET_S = 2.0


class Size(NamedTuple):
    """Sizes of the cases."""

    stages: int = 1024
    microbatches: int = 4096
    networks: int = 10_000
    recorded_steps: int = 20


SMALL = Size(8, 16, 100, 2)
"""For tests: the same cases, much smaller."""


def bench_simulate(size: Size | None = None, *, repeats: int = 3) -> dict[str, Any]:
    """Measure every case and print a table; return the figures, with median seconds over `repeats` and peak memory."""
    size = size or Size()
    results = []
    for name in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results.append({"case": name} | pool.apply(measure, (name, size, repeats)))
    print_table(results)
    return {"bench": "simulate", "cpus": usable_cpus(), "size": size._asdict(), "cases": results}


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the measurements, and targets if there are any."""
    table = Table("case", title="Simulator, medians")
    for name in ("actions", "seconds", "target", "actions/s", "peak memory", "above idle", "first call"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in results:
        table.add_row(
            row["case"],
            f"{row['actions']:,}",
            format_seconds(row["seconds"]),
            f"{row['target_s']:g} s" if row["target_s"] else "",
            f"{row['actions'] / row['seconds']:.3g}",
            format_bytes(row["peak_bytes"]),
            format_bytes(row["peak_bytes"] - row["idle_bytes"]),
            format_seconds(row["first_call_s"]),
        )
    console().print(table)


def _large_step(size: Size) -> int:
    """Simulate the step time of a large 1F1B schedule on one network."""
    profile = Profile.uniform(size.stages, 0.01, 0.02, wire_bytes=1e6)
    step_seconds(OneFOneB(), profile, [Network(100e6, 0.02)], num_microbatches=size.microbatches)
    return 2 * size.stages * size.microbatches


def _large_timeline(size: Size) -> int:
    """Simulate the same, keeping the times of every action and packet."""
    profile = Profile.uniform(size.stages, 0.01, 0.02, wire_bytes=1e6)
    simulate(OneFOneB(), profile, Network(100e6, 0.02), num_microbatches=size.microbatches)
    return 2 * size.stages * size.microbatches


def _replay(size: Size) -> int:
    """Price a recorded run of four stages and eight microbatches, with all costs different, on many networks."""
    profiles = _recorded(size.recorded_steps)
    networks = [Network(float(bandwidth), 0.01) for bandwidth in np.geomspace(1e6, 1e11, size.networks)]
    step_seconds(OneFOneB(), profiles, networks)
    return 2 * 4 * 8 * len(profiles) * len(networks)


def _replay_shared(size: Size) -> int:
    """Price one of its steps on networks with one port per host and direction, which need the general kernel."""
    networks = [Network(float(bandwidth), 0.01, sharing="port") for bandwidth in np.geomspace(1e6, 1e11, size.networks)]
    step_seconds(OneFOneB(), _recorded(1), networks)
    return 2 * 4 * 8 * len(networks)


def _recorded(steps: int) -> list[Profile]:
    random = np.random.default_rng(0)
    shape = (1, 4, 2, 8)
    return [
        Profile(
            compute_s=random.uniform(0.01, 0.02, shape),
            encode_s=random.uniform(0.001, 0.002, shape),
            decode_s=random.uniform(0.001, 0.002, shape),
            wire_bytes=random.integers(10_000, 100_000, shape).astype(float),
        )
        for _ in range(steps)
    ]


CASES: dict[str, Callable[[Size], int]] = {
    "1F1B step": _large_step,
    "1F1B timeline": _large_timeline,
    "replay on networks": _replay,
    "replay, shared ports": _replay_shared,
}
TARGETS = {"1F1B step": TARGET_S, "replay on networks": TARGET_S}


def measure(name: str, size: Size, repeats: int) -> dict[str, Any]:
    """Run one case in this process."""
    started = time.perf_counter()
    CASES[name](Size(2, 2, 2, 1))  # compiles the kernels, or loads them from the cache
    first_call_s = time.perf_counter() - started
    idle_bytes = _peak_bytes()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        actions = CASES[name](size)
        seconds.append(time.perf_counter() - started)
    return {
        "actions": actions,
        "seconds": statistics.median(seconds),
        "seconds_all": seconds,
        "target_s": TARGETS.get(name),
        "first_call_s": first_call_s,
        "idle_bytes": idle_bytes,
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    """Return the peak memory of this process: Linux counts kilobytes, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
