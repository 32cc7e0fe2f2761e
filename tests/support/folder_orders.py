"""Two processes over one folder, in many orders: the plans, and their answers by `folder_worker.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ORDERS = {  # of two processes: what the folder holds, the first, its operations on files, and the second
    ("nothing", "train", 188): ("train", "resume", "load"),
    ("broken", "resume", 145): ("resume", "train", "load", "pack", "report"),
    ("unmerged", "resume", 150): ("load",),
    ("broken", "load", 70): ("resume",),
    ("unmerged", "load", 29): ("resume",),
    ("broken", "pack", 40): ("resume",),
    ("broken", "report", 120): ("resume",),
    ("whole", "pack", 67): ("pack", "report"),
    ("whole", "report", 200): ("report",),
    ("nothing", "sweep", 387): ("sweep", "load"),
    ("half-study", "resume-sweep", 220): ("resume-sweep", "sweep", "load"),
}
ALONE = {  # killed or failed at an operation, and resumed
    ("nothing", "train", 188): ("kill", "EIO", "ENOSPC..."),
    ("broken", "resume", 145): ("kill", "EIO", "ENOSPC..."),
    ("whole", "pack", 67): ("kill", "EIO", "ENOSPC..."),
    ("nothing", "sweep", 387): ("kill",),
}


class Plan(NamedTuple):
    """`first` is held, killed or failed before its operation `at`; `second` works then; `first` goes on if it was held.

    `mode`: "hold", "kill", the name of an errno for one failure, or "ENOSPC..." for a disk that is full from then on.
    """

    start: str
    first: str
    second: str | None
    at: int
    mode: str = "hold"


class Verdict(NamedTuple):
    """What came of a plan: the operations of `first`, whether it met its `at`, the harm in a sentence, and what each process said."""

    calls: int
    met: bool
    harm: str | None
    outcomes: list[Any]


HELD = [
    Plan(start, first, second, at)
    for (start, first, calls), others in ORDERS.items()
    for second in others
    for at in range(1, calls + 1)
]
BROKEN_OFF = [
    Plan(start, first, None, at, mode)
    for (start, first, calls), modes in ALONE.items()
    for mode in modes
    for at in range(1, calls + 1)
]


def answers(plans: Sequence[Plan], folder: Path) -> list[Verdict]:
    """Carry out plans in a folder, each from its own start; raises CalledProcessError if the worker fails."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(Path(__file__).with_name("folder_worker.py")), str(folder)]
    done = subprocess.run(words, input=json.dumps(plans), stdout=subprocess.PIPE, text=True, check=True)
    return [Verdict(**json.loads(line)) for line in done.stdout.splitlines()]


def harms(plans: Sequence[Plan], verdicts: Sequence[Verdict]) -> list[str]:
    """Return a sentence for each plan that did harm."""
    return [f"{tuple(plan)}: {one.harm}" for plan, one in zip(plans, verdicts, strict=True) if one.harm]
