"""Facts of the step before, for adaptive methods: the same for all workers, and part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raysim.values import UNNAMED


class Signals(NamedTuple):
    """Facts of one step that the next one uses."""

    step_s: float | None = None  # seconds of the step, by the clock
    floors: Mapping[str, float] = {}  # the fidelity that each link on a budget must keep, by `link_name`
    sensitivities: Mapping[str, float] = {}  # of the gradients behind a link to errors of its messages, by `link_name`

    def floor(self, replica: int, boundary: int, direction: str, tensor: str = UNNAMED) -> float | None:
        """Return the fidelity that a link must keep, None where it has no budget or nothing was seen of it."""
        return self.floors.get(link_name(replica, boundary, direction, tensor))

    def sensitivity(self, replica: int, boundary: int, direction: str) -> float | None:
        """Return the sensitivity that the receiving stage measured, None where there is none."""
        return self.sensitivities.get(link_name(replica, boundary, direction))

    def as_json(self) -> dict[str, Any]:
        """Return the signals as JSON, the input of `from_json`."""
        return self._asdict()

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Signals:
        """Return the signals that a checkpoint holds."""
        return cls(**entries)


def link_name(replica: int, boundary: int, direction: str, tensor: str = UNNAMED) -> str:
    """Return the name of a link among the signals."""
    return f"{replica}/{boundary}/{direction}" + (f"/{tensor}" if tensor else "")
