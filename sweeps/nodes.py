"""Nodes of the cluster that join or are lost while a sweep goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import ray

LOOK_S = 5.0  # between two looks


class NodeWatch:
    """Says which nodes have joined and which are lost since the last look."""

    def __init__(self, say: Callable[[str], None], look: Callable[[], Mapping[str, str]] | None = None) -> None:
        self._say = say
        self._look = look or living_nodes
        self._known = dict(self._look())
        self._looked = time.monotonic()

    def tell(self) -> None:
        """Look, if it is time to."""
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self.compare()

    def compare(self) -> None:
        """Compare the nodes with the last look, and name the nodes that joined or were lost."""
        now = dict(self._look())
        for node in self._known.keys() - now.keys():
            self._say(
                f"node {self._known[node]} is lost: the trials with stages on it start again from their checkpoints"
            )
        for node in now.keys() - self._known.keys():
            self._say(f"node {now[node]} has joined")
        self._known = now


def living_nodes() -> dict[str, str]:
    """Return the addresses of the cluster's living nodes."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
