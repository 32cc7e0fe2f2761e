"""Partial-order reduction of the moments at which a process is held: one moment stands for all that differ by independent steps.

After Godefroid, Partial-Order Methods for the Verification of Concurrent Systems (1996): steps that touch different names commute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

READS = ("stat", "read")
LISTS = ("os.listdir", "os.scandir")
CONNECTS = "sqlite3.connect"

Result = TypeVar("Result")


class Step(NamedTuple):
    """The names that an operation on files reads, and those that it changes; `folder/` is the list of a folder's names."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, event: str, *names: str) -> Step:
        """Return the step of an operation as `file_calls.Calls` sees it. A path is read with the folders above it."""
        paths = [PurePosixPath(re.sub(r"\b[0-9a-f]{16}\b", "*", name)) for name in names]
        reads = {str(place) for path in paths for place in (path, *path.parents)}
        if event in READS:
            return cls(frozenset(reads))
        if event in LISTS:
            return cls(frozenset(reads | {f"{path}/" for path in paths}))
        return cls(frozenset(reads), frozenset(change for path in paths for change in (str(path), f"{path.parent}/")))

    def commutes(self, other: Step) -> bool:
        """Return whether two steps of different processes have the same effect in either order."""
        return not (self.writes & (other.reads | other.writes) or other.writes & self.reads)


def together(steps: Iterable[Step]) -> Step:
    """Return what several steps read and change."""
    kept = list(steps)
    return Step(frozenset().union(*(one.reads for one in kept)), frozenset().union(*(one.writes for one in kept)))


def steps_of(touched: Iterable[Sequence[Any]], count: int) -> list[Step]:
    """Return the steps of a process with so many operations, from what `file_calls.Calls` has noted.

    Each step after a connection to a database may write to it; the name of its journal comes and goes between steps.
    """
    steps = [Step() for _ in range(count)]
    for number, event, *names in touched:
        if number:
            steps[number - 1] = together([steps[number - 1], Step.of(event, *names)])
        for later in range(number, count if event == CONNECTS else 0):
            steps[later] = together([steps[later], Step(writes=frozenset(names))])
    return steps


def covered(first: Sequence[Step], hold: Callable[[int], tuple[Step, Result]]) -> dict[int, Result]:
    """Return the result of each moment at which the first process is held, from 0 to its number of steps.

    `hold`: holds it after so many steps, while the other process works from its start to its end; returns all that the other touches,
    and the result. It is called once for the moments between which the first process makes only steps that commute with these.
    """
    touched, result = hold(0)
    results = {0: result}
    for moment, step in enumerate(first, 1):
        if not step.commutes(touched):
            touched, result = hold(moment)
        results[moment] = result
    return results
