"""Memories of gradients under a GradScaler, whose scale may change between steps."""

from __future__ import annotations

import torch

from raysim.compressors import State


class LossScale:
    """Keeps a memory of scaled gradients in the current scale of a `GradScaler`; without an enabled one, as it is.

    The memory before the current step is kept too, for steps that the scaler skips.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._seen: tuple[float, int | None]  # scale and growth tracker: every update changes one of them
        self._before: State | None
        self.forget()

    def follow(self, state: State) -> State:
        """Return a memory in the current scale; if the scaler has skipped the last step, as it was before that step."""
        if self.scaler is None:
            return state
        held = self.scaler.state_dict()
        seen = (self.scaler.get_scale(), held.get("_growth_tracker"))
        if seen == self._seen:
            return state
        if seen[0] < self._seen[0] and self._before is not None:
            state = self._before
        self._before = _times(seen[0] / self._seen[0], state)
        self._seen = seen
        return dict(self._before)

    def unscaled(self, state: State) -> State:
        """Return a followed memory in the scale 1, for a checkpoint."""
        return _times(1 / self._seen[0], state)

    def forget(self) -> None:
        """Begin again, with a memory in the scale 1."""
        self._seen, self._before = (1.0, None), None


def _times(factor: float, state: State) -> State:
    """Return a memory of scaled messages; the method's own state, under negative keys, does not depend on the scale."""
    return {key: x * factor if key >= 0 and factor != 1.0 else x for key, x in state.items()}
