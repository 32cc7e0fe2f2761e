"""Attacks on a folder: by two processes at once, by operations on files that fail, and by losses of power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from folder_orders import ORDERS, Plan, answers, every_plan, harms, moments

FOLDER_PLANS: dict[str, Callable[[], list[Plan]]] = {
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


def pairs(*, study: bool) -> list[tuple[str, str, str]]:
    """Return what a folder of a run or a study holds, and two processes in it."""
    every = [(start, first, second) for (start, first), others in ORDERS.items() for second in others]
    return [pair for pair in every if any("study" in word or "sweep" in word for word in pair) is study]


def reduced(some: Sequence[tuple[str, str, str]], folder: Path) -> list[str]:
    """Pause the first process of each pair at one of all operations that differ by steps that commute; return the harm."""
    return [harm for pair in some for plan, verdict in moments(*pair).items() for harm in harms([plan], [verdict])]
