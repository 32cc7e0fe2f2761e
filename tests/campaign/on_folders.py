"""Attacks on a folder: by two processes at once, and by operations on files that are broken off or fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from commands import Outcome
from folder_orders import BROKEN_OFF, HELD, Plan, answers, harms


def two_processes(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Hold a process at one of its operations on files, let another work in the folder, and let the first go on."""
    return _carried_out(chance.sample(HELD, count), folder)


def broken_off(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Kill a process at one of its operations on files, let it fail, or let the disk be full from then on; and resume it."""
    return _carried_out(chance.sample(BROKEN_OFF, count), folder)


def _carried_out(plans: Sequence[Plan], folder: Path) -> Outcome:
    return Outcome(len(plans), harms(plans, answers(plans, folder)))
