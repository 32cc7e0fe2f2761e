"""The start of a run's steps: 0, or a checkpoint of another run."""

from __future__ import annotations

from typing import NamedTuple


class Origin(NamedTuple):
    """The start of a run's steps: 0, or the checkpoint of another run from which it branches."""

    first_step: int = 0
    rate_steps: int | None = None
    """Steps over which the learning rate was planned; None for those of the run itself."""
    rate_epochs: int | None = None
    """Epochs over which it was planned, instead of steps."""
    model_seed: int | None = None
    """Seed from which the model was made; None for the run's own."""
    memories_from: int = 0
    """Step at which the memories of compressors and replica methods began empty."""


FROM_SCRATCH = Origin()
