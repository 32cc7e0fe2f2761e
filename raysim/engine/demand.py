"""Resources that a driver asks the cluster for: a position in Ray's queue, by which an autoscaler starts nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from raysim.engine.ray_internals import Scaling, scaling

LOOK_S = 1.0  # between two looks at the autoscaler
LAUNCH_S = 30.0  # without a new node, or one on its way, after which an autoscaler is taken to have no more
SHOWN = 200  # characters of a cloud's reason


class Demand:
    """Resources that a driver lacks, in Ray's queue, where autoscalers and other drivers see them.

    A placement group: several drivers can ask at once, and it ends with its driver. Of
    `ray.autoscaler.sdk.request_resources` a cluster keeps the last call alone, and held resources count as well.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._bundles: list[dict[str, float]] = []
        self._asked_s = 0.0  # Unix time
        self._progress = 0.0  # when a node was last on its way, or came
        self._num_nodes = 0
        self._looked = -LOOK_S
        self._scaling: Scaling | None = None

    def __enter__(self) -> Demand:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    @property
    def elastic(self) -> bool:
        """True if an autoscaler may add nodes to the cluster."""
        self._look()
        return self._scaling is not None

    def reached(self, bundles: Sequence[dict[str, float]], wait_s: float) -> bool:
        """Queue up for these resources, and return whether they were there within `wait_s` seconds; from then on they are held."""
        import ray

        if self._group is None or self._bundles != list(bundles):
            self.leave()
            self._bundles = list(bundles)
            self._group = ray.util.placement_group(self._bundles)
            self._asked_s, self._progress = time.time(), time.monotonic()
        return bool(self._group.wait(wait_s))

    def leave(self) -> None:
        """Leave the queue, and release what is held."""
        import ray

        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None

    @property
    def growing(self) -> bool:
        """True if an autoscaler starts nodes, or has not been asked for `LAUNCH_S` seconds in vain."""
        return self.elastic and (self._group is None or time.monotonic() - self._progress <= LAUNCH_S)

    @property
    def words(self) -> str:
        """The autoscaler's answer to the demand, as the end of a sentence; "" without one."""
        if not self.elastic or self._scaling is None:
            return ""
        if self._scaling.starting:
            count = sum(self._scaling.starting.values())
            kinds = ", ".join(sorted(self._scaling.starting))
            return f"; the autoscaler starts {count} node{'s' if count > 1 else ''} ({kinds})"
        if self._scaling.failures:
            return f"; the autoscaler cannot start a node: {self._scaling.failures[-1][:SHOWN].rstrip('.')}"
        if self.growing:
            return "; the autoscaler is asked for nodes"
        return (
            "; the autoscaler starts no node for them: no type of node fits, or all are at their maximum (`ray status`)"
        )

    def _look(self) -> None:
        """Read the autoscaler's report, if the last look is `LOOK_S` ago."""
        import ray

        if time.monotonic() - self._looked < LOOK_S:
            return
        self._scaling = scaling(self._asked_s) or self._scaling  # a head may be slow to answer
        num_nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
        report = self._scaling
        if num_nodes > self._num_nodes or (report is not None and (report.starting or report.failures)):
            self._progress = time.monotonic()
        self._num_nodes = num_nodes
        self._looked = time.monotonic()
