"""A race in words: why a setting left, what a budget buys, and what it has decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from raysim.analysis.comparison.power import seeds_to_decide
from raysim.analysis.comparison.race import RUNGS, Exit
from raysim.analysis.comparison.race_plan import Plan
from raysim.analysis.comparison.rule import MOST_SEEDS, looks_after
from raysim.analysis.report.words import plural
from raysim.quality import Measure
from raysim.sweeps.budget import Spending, duration
from raysim.sweeps.trial import part_steps

if TYPE_CHECKING:
    from raysim.sweeps.race_budget import RaceBudget

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


def planned_again_line(spent_s: float, before: Plan, after: Plan) -> str:
    """Return why the number of seeds changes before any final evaluation."""
    return (
        f"Planned again after {duration(spent_s)}, by harm and cost so far: {after.seeds} seeds in place of {before.seeds}, with a "
        f"chance of {after.chance:.0%} in place of {before.chance:.0%} to call a harmless setting safe."
    )


def shortened_line(budget: RaceBudget, trial: int, seeds: int, needed_s: float) -> str:
    """Return why a plan gets fewer seeds, of which a trial would need `needed_s` seconds of runs."""
    needed, left = (duration(budget.spending.elapsing_s(each)) for each in (needed_s, budget.left_s))
    before = len(budget.rounds.seeds)
    return (
        f"Planned again after {duration(budget.spent_s)}: {seeds} seeds in place of {before}, since {before} of trial {trial}, "
        f"{budget.notations[trial]}, would take {needed} more, and {left} are left."
    )


def further_line(budget: RaceBudget, trial: int, seeds: int, chance: float) -> str:
    """Return which trial goes on after the planned seeds, and what it may show."""
    cost = duration(budget.spending.elapsing_s(budget.finish_s(trial, seeds)))
    return (
        f"Planned again after {duration(budget.spent_s)}: trial {trial}, {budget.notations[trial]}, undecided on "
        f"{len(budget.rounds.harms(trial))} seeds, goes on to {seeds} for {cost}, with a chance of {chance:.0%} to be called safe."
    )


def spent_lines(budget: RaceBudget) -> list[str]:
    """Return what is decided when a race ends, what is open, and what would decide it, a line each."""
    spending, rounds = budget.spending, budget.rounds
    counts = Counter(WORDS[reason.kind] for reason in rounds.left.values())
    counts["safe"], counts["failed"] = len(rounds.safe), len(rounds.failed)
    open_, undecided = rounds.running, rounds.undecided
    decided = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()) if count) or "nothing"
    lines = [
        f"{duration(budget.spent_s)} of {spending.budget.text} spent. Decided: {decided}. "
        + (f"Undecided on all seeds: {plural(len(undecided), 'setting')}. " if undecided else "")
        + f"Open: {plural(len(open_), 'setting')}"
        + ("; `--resume` with a greater `--budget` goes on." if open_ else ".")
    ]
    for trial in open_:
        more = duration(spending.elapsing_s(budget.finish_s(trial)))
        lines.append(
            f"Open: trial {trial}, {budget.notations[trial]}: its {len(rounds.seeds)} seeds would take {more} more."
        )
    return lines + [_undecided_line(budget, trial) for trial in undecided]


def _undecided_line(budget: RaceBudget, trial: int) -> str:
    """Return the harm of a trial that its seeds left undecided, and the seeds that would decide with their cost."""
    rounds, race = budget.rounds, budget.rounds.race
    harms = rounds.harms(trial)
    needed = seeds_to_decide(harms, race.margin, step=race.step, looks=looks_after(race.plan))
    lead = f"Undecided: trial {trial}, {budget.notations[trial]}: harm {fmean(harms):+.2g} {rounds.measure.unit} on {len(harms)} seeds"
    if needed is None:
        return f"{lead}; not even {MOST_SEEDS} would be likely to decide."
    cost_s = (needed - len(harms)) * (budget.run_s(trial) + budget.run_s(rounds.dense))
    return (
        f"{lead}; {needed} would decide in four of five cases, for {duration(budget.spending.elapsing_s(cost_s))} more."
    )


def exit_reason(reason: Exit, measure: Measure, *, num_steps: int, margin: float) -> str:
    """Return why a trial left a race, in words."""
    steps = part_steps(RUNGS[reason.rung], num_steps)
    where = f"after {steps:,} of {num_steps:,} steps on {reason.seeds} seeds"
    harm = f"harm {reason.harm:+.3g} {measure.unit}"
    if reason.kind == "slower":
        return f"left {where}: slower than a safe setting"
    if reason.kind == "harmful":
        return f"dropped {where}: {harm}, in the end at least {reason.bound:.2g}, and the margin is {margin:g}"
    return f"given up {where}: {harm}, so a chance of {reason.bound:.0%} to be called safe"
