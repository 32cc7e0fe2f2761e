"""The speed of the nodes that stages are on: a pipeline is as fast as its slowest stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import torch

from raysim.limits import cpu_quota

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
