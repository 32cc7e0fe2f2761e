"""Attacks on a folder, each tried once: by two processes at once, by operations on files that fail, and by losses of power."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from commands import Outcome
from folder_orders import Plan, answers, every_plan, harms

PLANS: dict[str, Callable[[], list[Plan]]] = {
    "two processes in a folder, one paused at a file operation": lambda: every_plan().held,
    "two processes in a folder, both paused": lambda: every_plan().held_twice,
    "file operation failed, or the disk full from then on": lambda: every_plan().failed,
    "loss of power at a file operation": lambda: every_plan().power,
}
"""All plans of each attack."""
AT_ONCE = 200


def next_plans(name: str, tried: int, most: int, folder: Path, seed: int) -> Outcome:
    """Carry out the plans after the first `tried`, `most` of them, in the order of the seed: a share is a sample."""
    plans = list(PLANS[name]())
    random.Random(seed).shuffle(plans)
    some = plans[tried : tried + min(most, AT_ONCE)]
    return Outcome(len(some), harms(some, answers(some, folder)))
