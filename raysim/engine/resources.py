"""The resources of a Ray cluster's nodes, and the nodes on which workers are placed."""

from __future__ import annotations

GRAINS = 10_000  # of a resource in Ray


def assign(room: dict[str, int], count: int, placement: str, first: str | None = None) -> list[str]:
    """Return a node for each of `count` workers: neighbours side by side, as many nodes as there are or as few as hold them.

    Nodes are taken in the order of `room`, after `first`. With "pack" the nodes with most room come next.

    >>> assign({"a": 4, "b": 4}, 4, "spread"), assign({"a": 4, "b": 4}, 3, "pack")
    (['a', 'a', 'b', 'b'], ['a', 'a', 'a'])
    """
    nodes = sorted(room, key=lambda node: (node != first, -room[node] if placement == "pack" else 0))
    shares = dict.fromkeys(nodes, 0)
    for _ in range(count):
        open_nodes = [node for node in nodes if shares[node] < room[node]]
        chosen = open_nodes[0] if placement == "pack" else min(open_nodes, key=lambda node: shares[node])
        shares[chosen] += 1
    return [node for node in nodes for _ in range(shares[node])]


def total_resources() -> dict[str, dict[str, float]]:
    """Return the resources of each living node of the cluster, by their addresses in order."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    alive.sort(key=lambda node: ([part.zfill(3) for part in node["NodeManagerAddress"].split(".")], node["NodeID"]))
    return {node["NodeID"]: dict(node["Resources"]) for node in alive}


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each living node of the cluster, in the order of their addresses."""
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node: available.get(node, {}) for node in total_resources()}


def equal_share(count: int) -> float:
    """Return the share of a GPU that `count` stages have each, in the ten-thousandths in which Ray counts.

    Ray rounds to the nearest: of six times a sixth it would make more than one.

    >>> equal_share(4), equal_share(6)
    (0.25, 0.1666)
    """
    return (GRAINS // count) / GRAINS


def room_for(free: dict[str, float], cpus: float, gpus: float) -> int:
    """Return how many stages a node has room for; a fraction of a GPU is of one, so rests of several do not add up."""
    gpus = round(gpus * GRAINS) / GRAINS
    fits = free.get("CPU", 0.0) / cpus
    if gpus:
        whole, rest = divmod(free.get("GPU", 0.0), 1)
        fits = min(fits, whole * int(1 / gpus + 1e-9) + rest / gpus if gpus <= 1 else whole / gpus)
    return int(fits + 1e-9)
