"""A race within its budget: the cost of its parts, the parts that fit, the plan and its revisions, and a summary.

The first plan has the numbers of settings and seeds with the best chance of an answer, by simulated races; the other settings wait
until nothing is left to do for the first. The number of seeds may change as long as no verdict depends on the change. Before any
setting has a final evaluation, the rest of the race is simulated from its standing to find the number with the best chance of an
answer. Until a setting has been trained on all planned seeds, a plan that the leading setting cannot finish is shortened, by cost
alone. After the planned seeds, the rest of the budget goes to a later interim analysis, which has its own share of the error
(`analysis.comparison.rule`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from raysim.analysis.comparison.race import RUNGS
from raysim.analysis.comparison.race_plan import (
    SEEDS,
    RacePlan,
    Simulated,
    Standing,
    best,
    best_plan,
    fresh_races,
    simulate_races,
)
from raysim.analysis.comparison.rule import CONFIDENCE, MIN_SEEDS, MOST_SEEDS, looks_after, seeds_to_decide
from raysim.sweeps.budget import Spending, duration
from raysim.sweeps.race_rounds import RaceRounds, RoundEntry
from raysim.units import apart, plural, two_digits

GAIN = 0.1  # least gain in the chance of an answer that changes a plan: above the error of a simulation
WORDS = {  # for exits
    "harmful": "harmful",
    "hopeless": "given up",
    "slower": "slower than a safe one",
    "chance": "left because dense is near chance",
}


class RaceBudget:
    """Plan the rest of a race by the seconds its runs have taken.

    `spread`: standard deviation over seeds of a harmless setting's harm, in units of the measure. `notations`: settings by
    trial. `say` prints a line; `on_plan` is called with the number of planned seeds.
    """

    def __init__(
        self,
        rounds: RaceRounds,
        spending: Spending,
        *,
        spread: float,
        notations: Mapping[int, str],
        say: Callable[[str], None],
        on_plan: Callable[[int], None],
    ) -> None:
        self.rounds, self.spending, self.spread = rounds, spending, spread
        self.aside: set[int] = set()
        """Trials with a next part beyond the budget."""
        self._notations, self._say, self._on_plan = notations, say, on_plan
        self._seconds: dict[tuple[int, int], tuple[float, float]] = {}  # by trial and number of its ended parts

    @property
    def left_s(self) -> float:
        return self.spending.remaining_s(self.trained_s)

    @property
    def spent(self) -> str:
        """Description of the time spent by the sweep, or by its GPUs."""
        of_gpus = self.spending.budget.of_gpus
        return duration(self.trained_s * self.spending.gpus if of_gpus else self.spending.elapsed_s)

    def plan(self) -> str | None:
        """Choose the number of seeds from the cost of a run, or return why the budget is too small."""
        rounds, budget = self.rounds, self.spending.budget.text
        run_s, count = self.run_s(rounds.dense), len(rounds.running)
        if 2 * run_s > self.left_s:
            pair_s = self.spending.elapsing_s(2 * run_s)
            return (
                f"`budget` = {budget!r} is below one pair of runs: dense and one setting on one seed take about "
                f"{duration(pair_s)}. Give at least {duration(3 * len(RUNGS) * pair_s / 2)}, or train fewer steps."
            )
        races = self._fresh(count)
        half, plan, twice = (best_plan(races, share * self.spending.total_s, run_s) for share in (0.5, 1.0, 2.0))
        raced = plural(count, "setting") if plan.settings == count else f"{plan.settings} of {count} settings"
        self._say(
            f"Budget {budget}: a run takes {duration(run_s)}. {raced} and dense race on {plan.seeds} "
            f"seeds: about {plan.runs:.0f} whole runs in {self._takes(plan.seconds)}."
        )
        self._say(
            f"If a third of the settings are harmless, and harm spreads by {self.spread:g} {rounds.measure.unit} over seeds, one of "
            f"them is called safe with a chance of {plan.chance:.0%}; with half the budget {half.chance:.0%} ({_terms(half)}), "
            f"with twice {twice.chance:.0%} ({_terms(twice)})."
        )
        self._take(plan.seeds, rounds.running[plan.settings :])
        return None

    def next_entries(self) -> list[RoundEntry]:
        """Return the parts of the next round within the budget, after revising the plan if that is still allowed."""
        if self.rounds.race.at_chance:
            return []
        self._plan_again()
        while True:
            entries = self.rounds.next_entries(self.aside | self.rounds.waiting)
            if entries and (kept := self._within(entries)):
                return kept
            if not entries and not self._go_further() and not self._let_in():
                return []

    def _options(self) -> list[int]:
        most = len(self.rounds.all_seeds)
        return [seeds for seeds in SEEDS if self.rounds.race.first <= seeds <= most] or [most]

    def _fresh(self, count: int) -> list[Simulated]:
        """Simulate races of up to `count` settings that have not begun."""
        rounds = self.rounds
        trained = len(rounds.trained_seeds(rounds.dense, least=1.0))
        seeds = [rounds.race.plan] if trained else self._options()
        seen = [rounds.race.spread(each, rounds.evidence) for each in rounds.evidence.values() if each.final]
        spread = median(seen) if seen else self.spread
        return fresh_races(rounds.race, count, spread=spread, seeds=seeds, dense=trained, start=self._start_share)

    @property
    def _start_share(self) -> float:
        """The seconds to start a part of dense's run, divided by the seconds of the whole run."""
        start_s, steps_s = self._start_and_steps_s(self.rounds.dense)
        return start_s / (start_s + steps_s)

    def _take(self, seeds: int, waiting: Iterable[int] = ()) -> None:
        self.rounds.plan_seeds(seeds, waiting)
        self._on_plan(seeds)

    def _plan_again(self) -> None:
        """Change the number of seeds for a clearly better chance of an answer, before any final evaluation is known."""
        rounds, evidence = self.rounds, self.rounds.evidence
        running = [trial for trial in rounds.running if trial not in self.aside | rounds.waiting]
        if not running or any(each.final for each in evidence.values()) or not evidence.keys() >= set(running):
            return
        dense_s = self.run_s(rounds.dense)
        costs = {trial: self.run_s(trial) / dense_s for trial in running}
        dense = len(rounds.trained_seeds(rounds.dense, least=1.0))
        standing = Standing(evidence, running, costs, dense, self._start_share)
        options = {*self._options(), rounds.race.seeds}
        races = simulate_races(rounds.race, standing, spread=self.spread, seeds=sorted(options))
        plans = races.within(self.left_s, dense_s)
        before, after = plans[rounds.race.seeds], best(plans.values())
        if after.chance >= before.chance + GAIN:
            self._say(
                f"Planned again after {self.spent}, by harm and cost so far: {after.seeds} seeds in place of {before.seeds}, with a "
                f"chance of {after.chance:.0%} in place of {before.chance:.0%} to call a harmless setting safe."
            )
            self._take(after.seeds)

    def _within(self, entries: Sequence[RoundEntry]) -> list[RoundEntry]:
        """Return the entries within the budget, and set the trials of the others aside.

        The first entry has priority: the others must leave enough to train it on all seeds. If these do not fit, the plan is
        shortened as long as no verdict has been given on it, and no entry is returned.
        """
        rounds, left_s, leader = self.rounds, self.left_s, entries[0].trial
        reserve_s = self.finish_s(leader) if rounds.evidence else 0.0
        if reserve_s > left_s and (count := self._shorter(leader, left_s)):
            before, (needed, left) = len(rounds.seeds), apart(self._takes, reserve_s, left_s)
            self._say(
                f"Planned again after {self.spent}: {count} seeds in place of {before}, since {before} of {self._named(leader)}, would "
                f"take {needed} more, and {left} are left."
            )
            self._take(count)
            return []
        kept: list[RoundEntry] = []
        for entry in entries:
            needed_s = sum(map(self._part_s, rounds.with_dense([*kept, entry])))
            if needed_s + (reserve_s if kept else 0.0) <= left_s:
                kept.append(entry)
            else:
                self.aside.add(entry.trial)
        return kept

    def _shorter(self, leader: int, left_s: float) -> int:
        """Return the largest smaller number of seeds that a trial can finish; 0 if there is none, or a verdict has been given."""
        rounds = self.rounds
        if any(len(each.final) >= rounds.race.plan for each in rounds.evidence.values()):
            return 0
        known = rounds.evidence.get(leader)
        least = max(MIN_SEEDS, rounds.race.first, len(known.final) if known is not None else 0)
        counts = range(rounds.race.seeds - 1, least - 1, -1)
        return next((count for count in counts if self.finish_s(leader, count) <= left_s), 0)

    def _go_further(self) -> bool:
        """Give more seeds to the fastest trial left undecided by the planned ones, if these may call it safe."""
        rounds, race = self.rounds, self.rounds.race
        candidates = [*rounds.undecided, *filter(rounds.may_return, rounds.left)]
        costs = {trial: rounds.evidence[trial].step_s for trial in (*candidates, *rounds.safe)}
        fastest = min((costs[trial] for trial in rounds.safe), default=math.inf)
        hopeful = [trial for trial in candidates if costs[trial] < fastest and trial not in rounds.further]
        for trial in sorted(hopeful, key=lambda trial: (costs[trial], trial)):
            least, most = len(rounds.harms(trial)), len(rounds.all_seeds)
            chances = {
                count: replace(race, seeds=count, planned=race.plan).chance_safe(
                    rounds.evidence[trial], rounds.evidence
                )
                for count in looks_after(race.plan)
                if least <= count <= most and self.finish_s(trial, count) <= self.left_s
            }
            if not chances or max(chances.values()) < race.hopeless:
                continue
            count = next(
                (each for each, chance in chances.items() if chance >= 0.5), max(chances, key=chances.__getitem__)
            )
            self._say(
                f"Planned again after {self.spent}: {self._named(trial)}, undecided on {least} seeds, goes on to {count} for "
                f"{self._takes(self.finish_s(trial, count))}, with a chance of {chances[count]:.0%} to be called safe."
            )
            rounds.go_further(trial, count)
            self.aside.discard(trial)
            return True
        return False

    def _let_in(self) -> bool:
        """Let waiting trials into the race, as many as have the best chance of an answer within the remaining budget."""
        rounds, run_s = self.rounds, self.run_s(self.rounds.dense)
        waiting = [trial for trial in rounds.running if trial in rounds.waiting]
        if not waiting or 2 * run_s > self.left_s:
            return False
        plan = best_plan(self._fresh(len(waiting)), self.left_s, run_s)
        self._say(
            f"Planned again after {self.spent}: the next {plan.settings} of {plural(len(waiting), 'waiting setting')} on {plan.seeds} "
            f"seeds, in the {self._takes(self.left_s)} left, with a chance of {plan.chance:.0%} to call a harmless one safe."
        )
        rounds.waiting.difference_update(waiting[: plan.settings])
        return True

    @property
    def trained_s(self) -> float:
        """Training seconds of all ended parts."""
        return sum(self._part_s(entry) for entry in self.rounds.parts if entry.ended)

    def run_s(self, trial: int) -> float:
        """Return the seconds of a trial's whole run, by its first seed; dense's before the trial has begun."""
        return sum(self._start_and_steps_s(trial))

    def finish_s(self, trial: int, count: int | None = None) -> float:
        """Return the run-seconds, dense runs included, to train a trial to its end on `count` seeds, by default all."""
        rounds = self.rounds
        start_s, steps_s = self._start_and_steps_s(trial)
        seeds = rounds.seeds if count is None else rounds.all_seeds[:count]
        shares = [self._share(trial, seed) for seed in seeds]
        starts = sum(sum(rung > share for rung in RUNGS) if share else 1 for share in shares)
        dense = set(seeds) - set(rounds.trained_seeds(rounds.dense, least=1.0))
        return starts * start_s + sum(1.0 - share for share in shares) * steps_s + len(dense) * self.run_s(rounds.dense)

    def _part_s(self, entry: RoundEntry) -> float:
        """Return the seconds of an entry's runs, without those of earlier parts."""
        start_s, steps_s = self._start_and_steps_s(entry.trial)
        shares = (entry.share - self._share(entry.trial, seed, before=entry) for seed in entry.seeds)
        return len(entry.seeds) * start_s + sum(shares) * steps_s

    def _start_and_steps_s(self, trial: int) -> tuple[float, float]:
        """Return the seconds to start a part, and the seconds of all steps of a run, by a trial's first seed."""
        rounds = self.rounds
        begun = rounds.trained(trial) if trial == rounds.dense or trial in rounds.evidence else []
        if not begun:
            return self._start_and_steps_s(rounds.dense)
        first = rounds.all_seeds[0]
        shares = [entry.share for entry in begun if entry.ended and first in entry.seeds]
        key = trial, len(shares)
        if key not in self._seconds:
            row = rounds.run_of(trial, first).row
            start_s = float(row.get("start_s") or 0.0)  # of all parts
            self._seconds[key] = start_s / len(shares), (float(row["seconds"]) - start_s) / max(shares)
        return self._seconds[key]

    def _share(self, trial: int, seed: int, before: RoundEntry | None = None) -> float:
        """Return the share of its steps that a run has been trained for, so far or `before` an entry."""
        shares = [0.0]
        for entry in self.rounds.trained(trial):
            if entry is before:
                break
            if seed in entry.seeds:
                shares.append(entry.share)
        return max(shares)

    def summary(self, before_s: float = 0.0) -> list[str]:
        """Return lines on an ended race: settings without a verdict, the decision, and the cost of deciding about them."""
        rounds = self.rounds
        counts = Counter(WORDS[reason.kind] for reason in rounds.left.values())
        counts |= {"safe": len(rounds.safe), "failed": len(rounds.failed), "hopeless at once": len(rounds.at_once)}
        counts["failed"] -= counts["hopeless at once"]
        running, undecided = rounds.running, rounds.undecided
        if rounds.race.at_chance:  # more seeds would decide nothing
            counts[WORDS["chance"]] += len(running)
            running = []
        decided = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()) if count) or "nothing"
        cause = "The budget ended the race: " if running else ""
        end = f"{cause}{self.spent} of {self.spending.budget.text} spent. Decided: {decided}. "
        if undecided:
            end += f"Undecided on all seeds: {plural(len(undecided), 'setting')}. "
        return [
            *(
                f"Open: {self._named(trial)}{', not begun' if trial in rounds.waiting else ''}: its {len(rounds.seeds)} seeds would "
                f"take {self._takes(self.finish_s(trial))} more."
                for trial in running
            ),
            *map(self._undecided_line, undecided),
            f"{end}Open: {plural(len(running), 'setting')}{self._resume_words(running, before_s)}.",
        ]

    def _resume_words(self, running: Sequence[int], before_s: float) -> str:
        """Return the seeds and the budget that would decide about the open trials; nothing without one."""
        if not running:
            return ""
        rounds, spending = self.rounds, self.spending
        dense = set(rounds.seeds) - set(rounds.trained_seeds(rounds.dense, least=1.0))  # trained once, for all
        lacking_s = sum(map(self.finish_s, running)) - (len(running) - 1) * len(dense) * self.run_s(rounds.dense)
        if spending.budget.of_gpus:
            hours = math.ceil((self.trained_s + lacking_s) * spending.gpus / 36) / 100
            whole = f"'{hours:.2f} GPU hours'"
        else:
            whole = f"{math.ceil((before_s + spending.elapsed_s + spending.elapsing_s(lacking_s)) / 60)}min"
        return f", decided by {len(rounds.seeds)} seeds each in {self._takes(lacking_s)} more: add `--resume --budget {whole}`"

    def _undecided_line(self, trial: int) -> str:
        """Return the harm of an undecided trial, and the seeds that would decide, with their cost."""
        rounds, race = self.rounds, self.rounds.race
        harms = rounds.harms(trial)
        lead = f"Undecided: {self._named(trial)}: harm {two_digits(fmean(harms), '+')} {rounds.measure.unit} on {len(harms)} seeds"
        level = (1 - CONFIDENCE) / race.family  # that of Holm's method for the first setting
        needed = seeds_to_decide(harms, race.margin, level, step=race.step, looks=looks_after(race.plan))
        if needed is None:
            return f"{lead}; not even {MOST_SEEDS} would be likely to decide."
        cost_s = (needed - len(harms)) * (self.run_s(trial) + self.run_s(rounds.dense))
        return f"{lead}; {needed} would decide in four of five cases, for {self._takes(cost_s)} more."

    def _named(self, trial: int) -> str:
        return f"trial {trial}, {self._notations[trial]}"

    def _takes(self, runs_s: float, more: int = 0) -> str:
        """Return the duration of run-seconds in words, with `more` digits."""
        return duration(self.spending.elapsing_s(runs_s), more)


def _terms(plan: RacePlan) -> str:
    return f"{plural(plan.settings, 'setting')}, {plan.seeds} seeds"
