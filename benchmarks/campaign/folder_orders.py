"""Two processes over one folder in every order, operations that fail, losses of power: the plans, carried out by `folder_worker.py`."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from partial_orders import Step, covered, steps_of, together

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
    touched: list[Any] | None = None
    """What `second` touched while `first` was held; None if it waited for it."""


class Plans(NamedTuple):
    """The plans of a single process, by kind."""

    failed: list[Plan]
    """Each operation that can fail fails."""
    power: list[Plan]
    """Each folder that a loss of power may leave."""
    kinds: dict[Plan, str]
    """Of `failed` and `power`: which lines of raysim meet which fault, and what was done last and is lost."""


@cache
def every_plan() -> Plans:
    """Return all plans, from the operations that processes make when nobody disturbs them."""
    from file_calls import CHANGES, FILLS

    counted = {tuple(entry["of"]): entry for entry in _ask("count")}
    failed = {
        Plan(start, first, None, at, mode): f"{start} {first} {mode} {counted[start, first]['kinds'][at - 1]}"
        for start, first in sorted(ALONE)
        for mode in FAULTS
        for at, event in enumerate(counted[start, first]["operations"], 1)
        if event in (FILLS if mode.startswith("ENOSPC") else CHANGES | {"read"})
    }
    power = {
        Plan(start, first, None, at, POWER): f"{start} {first} {kind}"
        for start, first in sorted(ALONE)
        for at, kind in enumerate(counted[start, first]["held"])
    }
    return Plans([*failed], [*power], failed | power)


def answers(plans: Sequence[Plan]) -> list[Verdict]:
    """Carry out plans in parallel, each from its own start; raises ValueError if the worker fails."""
    return [Verdict(**verdict) for verdict in _ask(plans)]


def moments(start: str, first: str, second: str) -> dict[Plan, Verdict]:
    """Return what comes of holding `first` at each operation, by one plan for all that differ by steps that commute."""
    own = _ask(("touches", start, first))
    steps = steps_of(own["touched"], len(own["operations"]))
    everything = together(steps)

    def hold(moment: int) -> tuple[Step, tuple[Plan, Verdict]]:
        plan = Plan(start, first, second, moment + 1)
        (verdict,) = answers([plan])
        if verdict.touched is None:
            return Step(everything.reads, everything.reads | everything.writes), (plan, verdict)
        return together(Step.of(event, *names) for _, event, *names in verdict.touched), (plan, verdict)

    return dict(covered(steps[:-1], hold).values())


@cache
def _worker() -> subprocess.Popen[str]:
    """Start the worker, in memory where there is a folder in it: there a sync costs nothing."""
    memory = Path("/dev/shm")
    folder = TemporaryDirectory(prefix="orders-", dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True)
    words = [sys.executable, str(Path(__file__).with_name("folder_worker.py")), folder.name]
    worker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        worker.communicate()
        folder.cleanup()

    atexit.register(end)
    return worker


def _ask(question: Any) -> Any:
    worker = _worker()
    print(json.dumps(question), file=worker.stdin, flush=True)
    return json.loads(worker.stdout.readline())  # type: ignore[union-attr]


def harms(plans: Sequence[Plan], verdicts: Sequence[Verdict]) -> list[str]:
    """Return a sentence for each plan that did harm."""
    return [f"{tuple(plan)}: {one.harm}" for plan, one in zip(plans, verdicts, strict=True) if one.harm]
