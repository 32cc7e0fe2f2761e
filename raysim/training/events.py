"""Events of a run, for displays of its progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A new row of `steps` or `evals`, the progress of an evaluation, a restart and its reason, or a warning."""

    kind: str
    """"step", "evaluating", "eval", "restart" or "warning"."""
    row: Mapping[str, Any]
    measures: tuple[str, ...] = ()
    """The measures in the row of an evaluation."""
