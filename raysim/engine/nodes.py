"""The nodes of a run: their speed, TCP slow start after idle, and the placement of workers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from raysim.codecs import DTYPES
from raysim.config import ConfigError
from raysim.limits import cpu_quota
from raysim.network.presets import parse_network
from raysim.network.topology import Network
from raysim.on_demand import torch
from raysim.pipeline.plan import averaged_shapes
from raysim.pipeline.prepare import Workload
from raysim.pipeline.reports import StepReport

SIZE = 256  # of the multiplied matrices
TRIES = 9  # the fastest counts: others may use the node too
SLOW = 0.5  # a node below this share of the median speed is slow
FEW = 3  # recorded steps needed before a node is reported as slow
TCP_SETTING = "net.ipv4.tcp_slow_start_after_idle"  # if on, a packet between distant hosts takes many round trips
DISTANT_S = 0.01  # smallest round trip of distant peers
LABEL = "site"  # of a Ray node
ORDERS = 120  # most orders of sites to start a search from


def measured_gflops() -> float:
    """Measure the speed of one thread of this process at matrix multiplication, in GFLOP/s.

    The measurement is too short to exhaust a CPU quota, so the speed is multiplied by a quota below one core.
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
    """Return a sentence on the slowest node, or None if it has at least half of the median speed.

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
    """Wall and CPU seconds of each stage's compute, to detect slow nodes.

    A CPU quota, or other load, may come after the start, when `measured_gflops` cannot see it.
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
        """Return a sentence on the slowest node, or None if none takes `1 / SLOW` times as long as the others.

        A stage is compared with the same stage of replicas on other nodes. If there are none, its wall seconds per CPU second are
        compared with those of stages on other nodes. All are medians over at least `FEW` steps.
        """
        wall_s = {key: median(values) for key, values in self._wall_s.items() if len(values) >= FEW}
        cpu_s = {key: median(self._cpu_s[key]) for key in wall_s}
        known = [key for key, seconds in cpu_s.items() if not math.isnan(seconds)]  # not on a GPU
        stretch = {key: wall_s[key] / max(1e-9, cpu_s[key]) for key in known}
        worst: tuple[float, str] = (1 / SLOW, "")
        for key in wall_s:
            node, stage = key
            same_stage = [wall_s[other] for other in wall_s if other[0] != node and other[1] == stage]
            others = [stretch[other] for other in stretch if other[0] != node]
            if same_stage:
                words = f"stage {stage} computes {wall_s[key]:.3g} s a step there, and {median(same_stage):.3g} s on other nodes"
                worst = max(worst, (wall_s[key] / median(same_stage), f"Node {node} holds the others up: {words}"))
            elif others and key in stretch:
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
    """Return whether TCP on this host starts slowly after idle; False if unknown."""
    setting = Path("/proc/sys") / TCP_SETTING.replace(".", "/")
    return setting.is_file() and setting.read_text(encoding="ascii").strip() == "1"


def slow_start_warning(reaches: Mapping[str, Reach]) -> str | None:
    """Return a sentence on the nodes with slow start and a distant peer, or None if there are none.

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


def label_option(site: str) -> str:
    """Return the option of `ray start` that sets a node's site."""
    return f"--labels={LABEL}={site}"


def labels() -> dict[str, str]:
    """Return the site of each living node of the cluster, "" if it has no label."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: str(node.get("Labels", {}).get(LABEL, "")) for node in nodes if node["Alive"]}


def check_on_one_node(placement: str) -> None:
    """Raise ConfigError if a run on a private Ray, which has one node, names sites."""
    if placement not in ("spread", "pack"):
        raise ConfigError(
            f"`placement` = {placement!r} needs a cluster with nodes on its sites, but `RAY_ADDRESS` is not set. "
            "Set it to the head's host:port, or set `placement` to 'spread'."
        )


def nodes_of_workers(workload: Workload, capacity: Mapping[str, int]) -> list[str]:
    """Return the node of each worker, by the run's `placement`. `capacity`: workers that each node can hold.

    Raises ConfigError if `placement` is a file of sites that the nodes do not match.
    """
    import ray

    placement, num_workers = workload.plan.config.placement, len(workload.plan.rows) * workload.plan.num_replicas
    if placement in ("spread", "pack"):
        return assign(capacity, num_workers, placement, first=ray.get_runtime_context().get_node_id())
    return nodes_on_sites(workload, parse_network(placement), capacity, labels())


def assign(capacity: Mapping[str, int], count: int, placement: str, first: str | None = None) -> list[str]:
    """Assign `count` workers to nodes, neighbours together: "spread" over all nodes, or "pack" on as few as possible.

    Nodes are used in the order of `capacity`, after `first`; with "pack", the largest first.

    >>> assign({"a": 4, "b": 4}, 4, "spread"), assign({"a": 4, "b": 4}, 3, "pack")
    (['a', 'a', 'b', 'b'], ['a', 'a', 'a'])
    """
    nodes = sorted(capacity, key=lambda node: (node != first, -capacity[node] if placement == "pack" else 0))
    shares = dict.fromkeys(nodes, 0)
    for _ in range(count):
        open_nodes = [node for node in nodes if shares[node] < capacity[node]]
        chosen = open_nodes[0] if placement == "pack" else min(open_nodes, key=lambda node: shares[node])
        shares[chosen] += 1
    return [node for node in nodes for _ in range(shares[node])]


@dataclass(frozen=True)
class Traffic:
    """Traffic between workers in a step: bytes and messages of each pair in both directions, the lower worker first."""

    num_bytes: Mapping[tuple[int, int], float]
    num_messages: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, workload: Workload) -> Traffic:
        """Return a run's planned traffic. Packets count as dense if their size depends on the values.

        Exchanges between replicas, and of tied parameters, count as dense, divided by the steps between two exchanges.
        """
        plan, modules = workload.plan, workload.modules
        config, count = plan.config, plan.config.num_microbatches
        num_bytes, num_messages = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

        def add(a: int, b: int, size: float, messages: float) -> None:
            if a != b:
                num_bytes[min(a, b), max(a, b)] += size  # type: ignore[assignment]
                num_messages[min(a, b), max(a, b)] += messages  # type: ignore[assignment]

        for replica, links in enumerate(plan.compressors):
            for stage, (pairs, boundary) in enumerate(zip(links, plan.boundaries, strict=True)):
                size = sum(boundary.exact_bytes.values()) + sum(
                    method.array_bytes(shape, config.dtype) or DTYPES[config.dtype].itemsize * math.prod(shape)
                    for name, shape in boundary.shapes.items()
                    for method in pairs[name]
                )
                add(plan.worker(replica, stage), plan.worker(replica, stage + 1), count * size, 2 * count)
        for group in (group for phase in plan.groups for group in phase):
            members = [plan.worker(*member) for member in group.members]
            if group.tied is None:
                shapes = averaged_shapes(group.stage, modules[group.stage], config, plan.tied)
                values, period = sum(map(math.prod, shapes.values())), plan.replica_methods[group.stage].period
            else:
                stage, name = plan.tied[group.tied][0]
                values, period = modules[stage].get_parameter(name).numel(), 1
            for a, b in combinations(members, 2):  # each sends the other its chunk, and gets the sum back
                add(a, b, 16 * values / len(members) / period, 2 * group.num_rounds / period)
        return cls(dict(num_bytes), dict(num_messages))

    def seconds(self, network: Network, sites: Sequence[str], pairs: Iterable[tuple[int, int]] | None = None) -> float:
        """Return the network seconds of the messages of all pairs, or of `pairs`, one after another.

        `sites`: the site of each worker.
        """
        return math.fsum(
            8 * self.num_bytes[a, b] / bandwidth + self.num_messages[a, b] * latency
            for a, b in (self.num_bytes if pairs is None else pairs)
            for bandwidth, latency in [network.between_sites(sites[a], sites[b])]
        )


def choose_sites(
    traffic: Traffic, network: Network, capacity: Mapping[str, int], num_workers: int, per_replica: int
) -> list[str]:
    """Choose the site of each worker to minimise network seconds, by local search from several starts.

    For each order of the sites, workers fill them once replica by replica and once stage by stage. Then pairs of workers swap
    sites, or a worker moves to a free site, as long as that saves time. `capacity`: workers that each site can hold.
    """
    pairs_of: dict[int, list[tuple[int, int]]] = {worker: [] for worker in range(num_workers)}
    for pair in traffic.num_bytes:
        for worker in pair:
            pairs_of[worker].append(pair)
    by_stage = sorted(range(num_workers), key=lambda worker: worker % per_replica)
    optima: list[tuple[float, list[str]]] = []
    for order in islice(permutations(network.sites), ORDERS):
        slots = [site for site in order for _ in range(capacity.get(site, 0))]
        for workers in (range(num_workers), by_stage):
            filled = dict(zip(workers, slots, strict=False))
            sites = [filled[worker] for worker in range(num_workers)]
            while _improve(sites, traffic, network, capacity, pairs_of):
                pass
            optima.append((traffic.seconds(network, sites), sites))
    return min(optima, key=lambda optimum: optimum[0])[1]


def _improve(
    sites: list[str],
    traffic: Traffic,
    network: Network,
    capacity: Mapping[str, int],
    pairs_of: Mapping[int, Sequence[tuple[int, int]]],
) -> bool:
    """Swap or move workers between sites if that saves time; return whether any change did."""
    improved, used = False, Counter(sites)
    for worker in range(len(sites)):
        free_sites = [site for site in network.sites if used[site] < capacity.get(site, 0)]
        for target in [*range(worker), *free_sites]:
            changed = list(sites)
            if isinstance(target, int):
                changed[worker], changed[target] = sites[target], sites[worker]
                pairs = {*pairs_of[worker], *pairs_of[target]}
            else:
                changed[worker] = target
                pairs = set(pairs_of[worker])
            if changed == sites:
                continue
            if traffic.seconds(network, changed, pairs) < traffic.seconds(network, sites, pairs) * (1 - 1e-9):
                sites[:] = changed
                improved, used = True, Counter(sites)
    return improved


def nodes_on_sites(
    workload: Workload, network: Network, capacity: Mapping[str, int], node_sites: Mapping[str, str]
) -> list[str]:
    """Return the node of each worker: its site by `choose_sites`, spread over the site's nodes in the order of `capacity`.

    `capacity`: workers that each node can hold; `node_sites`: each node's label. Raises ConfigError if a site of the network has
    no node, or if the nodes of all sites cannot hold the workers.
    """
    missing = [site for site in network.sites if site not in node_sites.values()]
    if missing:
        raise ConfigError(
            f"`placement` names the site {missing[0]!r}, but no node of the cluster has its label. "
            f"Start Ray there with {label_option(missing[0])}."
        )
    num_workers, per_replica = len(workload.plan.rows) * workload.plan.num_replicas, len(workload.plan.rows)
    on = {
        site: {node: count for node, count in capacity.items() if node_sites.get(node) == site}
        for site in network.sites
    }
    sizes = {site: sum(nodes.values()) for site, nodes in on.items()}
    if sum(sizes.values()) < num_workers:
        free = ", ".join(f"{site} {size}" for site, size in sizes.items())
        raise ConfigError(
            f"`placement`: the sites must hold {num_workers} workers, but can hold {free}. Nodes without a label are not used."
        )
    sites = choose_sites(Traffic.of(workload), network, sizes, num_workers, per_replica)
    nodes = {site: iter(assign(on[site], count, "spread")) for site, count in Counter(sites).items()}
    return [next(nodes[site]) for site in sites]
