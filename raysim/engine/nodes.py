"""The nodes of a run: their speed, since a pipeline is as fast as its slowest stage, and TCP's slow start after idle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from raysim.limits import cpu_quota
from raysim.on_demand import torch
from raysim.pipeline.reports import StepReport

SIZE = 256  # of the matrices that are multiplied
TRIES = 9  # of which the fastest counts: others may use the node as well
SLOW = 0.5  # of the median speed, below which a node is slow
FEW = 3  # recorded steps, before a node is said to hold the others up
TCP_SETTING = "net.ipv4.tcp_slow_start_after_idle"  # many trips for a packet between distant hosts, unless switched off
DISTANT_S = 0.01  # round trip of distant peers


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
    """Return a sentence on the slowest node, None if it has at least half of the median speed.

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


class StageSeconds:
    """Seconds that each stage computes by the wall clock and on the CPU, from which a node is seen to be held up.

    A quota of its CPU, or other work there, may come after the start: `measured_gflops` cannot see it.
    """

    def __init__(self) -> None:
        self._wall_s: dict[tuple[str, int], list[float]] = {}  # of each step, by node and stage
        self._cpu_s: dict[tuple[str, int], list[float]] = {}

    def add(self, nodes: Sequence[str], reports: Sequence[StepReport]) -> None:
        """Add a step's actions, if they were recorded. `nodes`: the node of each worker, in the order of the reports."""
        for node, report in zip(nodes, reports, strict=True):
            for stage in dict.fromkeys(action.stage for action in report.actions):
                actions = [action for action in report.actions if action.stage == stage]
                self._wall_s.setdefault((node, stage), []).append(sum(action.compute_wall_s for action in actions))
                self._cpu_s.setdefault((node, stage), []).append(sum(action.compute_cpu_s for action in actions))

    def warning(self) -> str | None:
        """Return a sentence on the node whose stages take longest, None if none takes `1 / SLOW` times as long as elsewhere.

        A stage is compared with the same stage of replicas on other nodes; without such, its wall seconds for each second of CPU
        with those of the stages on other nodes. Medians over the steps, of which there must be a few.
        """
        wall_s = {key: median(values) for key, values in self._wall_s.items() if len(values) >= FEW}
        stretch = {key: seconds / max(1e-9, median(self._cpu_s[key])) for key, seconds in wall_s.items()}
        worst: tuple[float, str] = (1 / SLOW, "")
        for key in wall_s:
            node, stage = key
            same_stage = [wall_s[other] for other in wall_s if other[0] != node and other[1] == stage]
            others = [stretch[other] for other in stretch if other[0] != node]
            if same_stage:
                words = f"stage {stage} computes {wall_s[key]:.3g} s a step there, and {median(same_stage):.3g} s on other nodes"
                worst = max(worst, (wall_s[key] / median(same_stage), f"Node {node} holds the others up: {words}"))
            elif others:
                words = f"stage {stage} takes {stretch[key]:.3g} s for a second on the CPU, stages elsewhere {median(others):.3g}"
                worst = max(worst, (stretch[key] / median(others), f"Node {node} holds the others up: {words}"))
        return f"{worst[1]}. Stop other work there, lift a CPU quota, or leave the node out." if worst[1] else None


def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    return time.perf_counter() - start


class Reach(NamedTuple):
    """A worker's connections to its peers."""

    slow_start: bool
    """True if this host's TCP starts slowly after idle, as Linux's does by default."""
    farthest_s: float
    """Round trip of a call to the farthest peer, in seconds; 0 without peers."""


def starts_slowly() -> bool:
    """Return whether TCP of this host starts slowly after idle; False if the host does not say."""
    setting = Path("/proc/sys") / TCP_SETTING.replace(".", "/")
    return setting.is_file() and setting.read_text(encoding="ascii").strip() == "1"


def slow_start_warning(reaches: Mapping[str, Reach]) -> str | None:
    """Return a sentence on the nodes that start slowly and have a distant peer; None if there are none.

    >>> slow_start_warning({"10.0.0.1": Reach(True, 0.001), "10.0.0.2": Reach(False, 0.08)}) is None
    True
    """
    slow = [node for node, reach in reaches.items() if reach.slow_start and reach.farthest_s >= DISTANT_S]
    if not slow:
        return None
    farthest_s = max(reaches[node].farthest_s for node in slow)
    return (
        f"TCP starts slowly after idle on {', '.join(slow)}, {1000 * farthest_s:.0f} ms from a neighbour: large packets take two to "
        f"four times as long. Run `sysctl -w {TCP_SETTING}=0` there (docs/networks.md)."
    )
