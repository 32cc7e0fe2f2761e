"""The warning about links with messages that arrive further from the original than zeros would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raysim.pipeline.plan import Plan
from raysim.values import UNNAMED


def fidelity_warning(plan: Plan, step: int, links: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the link of least fidelity in a step, and its remedy; None where no fidelity is below zero.

    `links` are the step's rows of `links`. Below zero, the squared error exceeds the squared norm of the message.
    """
    measured = [row for row in links if row.get("fidelity") is not None]
    worst = min(measured, key=lambda row: row["fidelity"], default=None)
    if worst is None or worst["fidelity"] >= 0:
        return None
    replica, boundary, forward = worst["replica"], worst["boundary"], worst["direction"] == "forward"
    method = plan.compressors[replica][boundary][worst.get("tensor") or UNNAMED][0 if forward else 1]
    tensor = f", `{worst['tensor']}`," if worst.get("tensor") else ""
    below = sum(row["fidelity"] < 0 for row in measured)
    arrow = "->" if forward else "<-"
    others = f" (and {below - 1} more)" if below > 1 else ""
    return (
        f"Step {step}: link {boundary} {arrow} {boundary + 1}{tensor}{others} with {worst['codec']} has a fidelity of "
        f"{worst['fidelity']:.2f}: the decoded tensor is further from the message than zeros would be. "
        f"{method.remedy(worst['direction'])}"
    )
