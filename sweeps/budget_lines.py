"""The budget of a race in words: what it buys, before it is spent, and what it has decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from raysim.analysis.comparison.looks import MOST_SEEDS, looks_after
from raysim.analysis.comparison.race_plan import Plan
from raysim.analysis.comparison.statistics import seeds_to_decide
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
    open_, undecided = rounds.running, rounds.undecided
    decided = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()) if count) or "nothing"
    spent_s = rounds.trained_s * spending.gpus if spending.budget.of_gpus else spending.elapsed_s
    lines = [
        f"{duration(spent_s)} of {spending.budget.text} spent. Decided: {decided}. "
        + (f"Undecided on all seeds: {plural(len(undecided), 'setting')}. " if undecided else "")
        + f"Open: {plural(len(open_), 'setting')}."
    ]
    for trial in open_:
        more = duration(spending.elapsing_s(rounds.finish_s(trial)))
        lines.append(f"Open: trial {trial}, {notations[trial]}: its {len(rounds.seeds)} seeds would take {more} more.")
    lines += [_undecided_line(spending, rounds, trial, notations[trial]) for trial in undecided]
    return lines


def _undecided_line(spending: Spending, rounds: RaceRounds, trial: int, notation: str) -> str:
    """Return the harm of a trial that its seeds left undecided, and the seeds that would decide with their cost."""
    harms, race, seeds = rounds.harms(trial), rounds.race, len(rounds.seeds)
    needed = seeds_to_decide(harms, race.margin, step=race.step, looks=looks_after(seeds))
    lead = f"Undecided: trial {trial}, {notation}: harm {fmean(harms):+.2g} {rounds.measure.unit} on {seeds} seeds"
    if needed is None:
        return f"{lead}; not even {MOST_SEEDS} would be likely to decide."
    cost_s = (needed - seeds) * (rounds.run_s(trial) + rounds.run_s(rounds.dense))
    return f"{lead}; {needed} would decide in four of five cases, for {duration(spending.elapsing_s(cost_s))} more."
