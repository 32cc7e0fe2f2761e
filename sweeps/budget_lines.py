"""The budget of a race in words: what it buys, before it is spent, and what it has decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raysim.analysis.comparison.race_plan import Plan
from raysim.analysis.report.words import plural
from raysim.sweeps.budget import Spending, duration

if TYPE_CHECKING:
    from raysim.sweeps.race_rounds import RaceRounds

WORDS = {"harmful": "harmful", "hopeless": "given up", "slower": "slower than a safe one"}


def plan_lines(spending: Spending, plans: Sequence[Plan], settings: int, run_s: float, spread: str) -> list[str]:
    """Return the plan within a budget, and within half and twice of it, a line each; `spread` is that of harm over seeds."""
    half, plan, twice = plans
    taken = duration(spending.elapsing_s(plan.seconds))
    others = (
        f"with half the budget {half.chance:.0%} ({half.seeds} seeds), with twice {twice.chance:.0%} ({twice.seeds})"
    )
    return [
        f"Budget {spending.budget.text}: a run takes {duration(run_s)}. {plural(settings, 'setting')} and dense race on {plan.seeds} "
        f"seeds: about {plan.runs:.0f} whole runs in {taken}.",
        f"If a third of the settings are harmless, and harm spreads by {spread} over seeds, one of them is called safe with a chance "
        f"of {plan.chance:.0%}; {others}.",
    ]


def spent_lines(spending: Spending, rounds: RaceRounds, notations: Mapping[int, str]) -> list[str]:
    """Return what is decided when a race ends, what is open, and what would decide it, a line each."""
    counts = Counter(WORDS[reason.kind] for reason in rounds.left.values())
    counts["safe"], counts["failed"] = len(rounds.safe), len(rounds.failed)
    open_ = rounds.running
    decided = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()) if count) or "nothing"
    spent_s = rounds.trained_s * spending.gpus if spending.budget.of_gpus else spending.elapsed_s
    lines = [
        f"{duration(spent_s)} of {spending.budget.text} spent. Decided: {decided}. Open: {plural(len(open_), 'setting')}."
    ]
    for trial in open_:
        more = duration(spending.elapsing_s(rounds.finish_s(trial)))
        lines.append(f"Open: trial {trial}, {notations[trial]}: its {len(rounds.seeds)} seeds would take {more} more.")
    return lines
