"""Two processes over one folder in every order, operations that fail, losses of power: the plans, carried out by `folder_worker.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ORDERS = {  # of two processes: what the folder holds and the first; the second
    ("nothing", "train"): ("train", "resume", "load", "pack", "report"),
    ("broken", "resume"): ("resume", "train", "load", "pack", "report"),
    ("unmerged", "resume"): ("resume", "load", "pack", "report"),
    ("broken", "load"): ("resume",),
    ("unmerged", "load"): ("resume",),
    ("broken", "pack"): ("resume",),
    ("unmerged", "pack"): ("resume",),
    ("broken", "report"): ("resume",),
    ("whole", "pack"): ("pack", "report"),
    ("whole", "report"): ("report",),
    ("nothing", "sweep"): ("sweep", "load", "pack", "report"),
    ("half-study", "resume-sweep"): ("resume-sweep", "sweep", "load", "pack", "report"),
    ("half-study", "load"): ("resume-sweep",),
    ("half-study", "pack"): ("resume-sweep",),
    ("half-study", "report"): ("resume-sweep",),
}
TWICE = {("broken", "resume", "load"), ("broken", "resume", "resume")}  # both are held
ALONE = {  # at whose operations something happens, after which they are resumed
    ("nothing", "train"),
    ("broken", "resume"),
    ("unmerged", "resume"),
    ("whole", "pack"),
    ("whole", "report"),
    ("nothing", "sweep"),
    ("half-study", "resume-sweep"),
    ("whole-study", "confirm"),
}
FAULTS = ("EIO", "ENOSPC", "ENOSPC...")
POWER = "power"


class Plan(NamedTuple):
    """`first` is held, killed or failed before its operation `at`; `second` works then; `first` goes on if it was held.

    `mode`: "hold", "kill", the name of an errno for one failure, "ENOSPC..." for a disk that is full from then on, or "power"
    for the folder of number `at` among those that a loss of power may leave. `then`: the operation at which `second` is held,
    while `first` works to its end.
    """

    start: str
    first: str
    second: str | None
    at: int
    mode: str = "hold"
    then: int | None = None


class Verdict(NamedTuple):
    """What came of a plan: the operations of `first`, whether it met its `at`, the harm in a sentence, and what each process said."""

    calls: int
    met: bool
    harm: str | None
    outcomes: list[Any]


class Plans(NamedTuple):
    """All plans, by what is done."""

    held: list[Plan]
    """A process is held at each of its operations, while another works from its start to its end."""
    held_twice: list[Plan]
    """The other is held too, at each of its changes."""
    failed: list[Plan]
    """Each operation that can fail fails."""
    power: list[Plan]
    """Each folder that a loss of power may leave."""


@cache
def every_plan() -> Plans:
    """Return all plans, from the operations that processes make when nobody disturbs them."""
    from file_calls import CHANGES, FILLS

    with TemporaryDirectory(prefix="orders-") as folder:
        (line,) = _worker(Path(folder), ["--count"], "").splitlines()
    counted = {tuple(entry["of"]): entry for entry in json.loads(line)}
    made = {pair: entry["operations"] for pair, entry in counted.items()}
    steps = {pair: [at for at, event in enumerate(events, 1) if event in CHANGES] for pair, events in made.items()}
    return Plans(
        [
            Plan(start, first, second, at)
            for (start, first), others in ORDERS.items()
            for second in others
            for at in range(1, len(made[start, first]) + 1)
        ],
        [
            Plan(start, first, second, at, then=then)
            for start, first, second in sorted(TWICE)
            for at in steps[start, first]
            for then in range(1, len(made[start, second]) + 1)
        ],
        [
            Plan(start, first, None, at, mode)
            for start, first in sorted(ALONE)
            for mode in FAULTS
            for at, event in enumerate(made[start, first], 1)
            if event in (FILLS if mode.startswith("ENOSPC") else CHANGES | {"read"})
        ],
        [
            Plan(start, first, None, at, POWER)
            for start, first in sorted(ALONE)
            for at in range(counted[start, first]["held"])
        ],
    )


def answers(plans: Sequence[Plan], folder: Path) -> list[Verdict]:
    """Carry out plans in a folder, each from its own start; raises CalledProcessError if the worker fails."""
    return [Verdict(**json.loads(line)) for line in _worker(folder, [], json.dumps(plans)).splitlines()]


def _worker(folder: Path, options: Sequence[str], given: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(Path(__file__).with_name("folder_worker.py")), str(folder), *options]
    return subprocess.run(words, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout


def harms(plans: Sequence[Plan], verdicts: Sequence[Verdict]) -> list[str]:
    """Return a sentence for each plan that did harm."""
    return [f"{tuple(plan)}: {one.harm}" for plan, one in zip(plans, verdicts, strict=True) if one.harm]
