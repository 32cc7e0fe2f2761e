"""Attacks on a folder: by two processes at once, by operations on files that fail, and by losses of power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from folder_orders import Plan, answers, every_plan, harms

FOLDER_PLANS: dict[str, Callable[[], list[Plan]]] = {
    "two processes in a folder, one paused at a file operation": lambda: every_plan().held,
    "two processes in a folder, both paused": lambda: every_plan().held_twice,
    "file operation failed, or the disk full from then on": lambda: every_plan().failed,
    "loss of power at a file operation": lambda: every_plan().power,
}
"""All plans of each attack."""


def kind(plan: Plan) -> str:
    """Return what a plan tries: plans of one kind fail the same line, or lose the same change, in another step."""
    return every_plan().kinds.get(plan, str(plan))


def carry_out(plans: Sequence[Plan], folder: Path) -> list[str]:
    """Carry out plans, and return the harm."""
    return harms(plans, answers(plans))
