"""The speed of the nodes that stages are on: a pipeline is as fast as its slowest stage."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

SIZE = 256  # of the matrices that are multiplied
TRIES = 9  # of which the fastest counts: others may use the node as well
SLOW = 0.5  # of the median speed, below which a node is slow


def measured_gflops() -> float:
    """Return the speed of one thread of this process at multiplying matrices, in 10^9 operations a second.

    The measurement is too short to exhaust a CPU quota, so a quota below one core is multiplied in.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.ones(SIZE, SIZE)
        best = min(_seconds(matrix) for _ in range(TRIES))
    finally:
        torch.set_num_threads(threads)
    return 2e-9 * SIZE**3 / best * min(1.0, cpu_quota())


def cpu_quota() -> float:
    """Return the cores that Linux's control groups leave this process, infinite if they do not limit it."""
    return min(_quotas(), default=math.inf)


def _quotas() -> Iterator[float]:
    """Yield the quota of this process's control group and of each above it, in cores."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup", "cpu" if controllers else "")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            with suppress(OSError, ValueError):  # no such file, or no limit
                if controllers:
                    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                else:
                    quota, period = map(int, (folder / "cpu.max").read_text().split())  # "max" without a limit
                if quota > 0:
                    yield quota / period


def slow_node_warning(speeds: Mapping[str, float]) -> str | None:
    """Return a sentence on the slowest node, None where it has at least half of the median speed.

    >>> slow_node_warning({"10.0.0.1": 40.0, "10.0.0.2": 41.0, "10.0.0.3": 39.0}) is None
    True
    """
    slowest = min(speeds, key=lambda node: speeds[node])
    usual = median(speeds.values())
    if speeds[slowest] >= SLOW * usual:
        return None
    return (
        f"Node {slowest} computes {usual / speeds[slowest]:.1f} times slower than the median of the nodes ({speeds[slowest]:.3g} "
        f"against {usual:.3g} GFLOP/s): the stages on it hold the others up. Stop other work there, lift a CPU quota, or leave the "
        "node out."
    )


def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    return time.perf_counter() - start
