"""Rounds of a race: the parts to train, their evidence and the decisions, kept in `race.parquet`.

A round is written before it begins, and again with its exits when all of its parts have ended. A killed race trains the unfinished
parts of its last round, and reaches the same decisions. These depend on the records alone, not on the order in which parts end, and
within a budget also on the duration of runs: see `sweeps.race_budget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from raysim.analysis.comparison.harm_forecast import Losses, chances_of, losses_of, observe
from raysim.analysis.comparison.race import RUNGS, Evidence, Kind, Race, RaceExit
from raysim.analysis.comparison.rule import MIN_SEEDS, at_chance
from raysim.config import ConfigError
from raysim.quality import Measure
from raysim.records import UNREADABLE, Run, read_as, write_table
from raysim.sweeps.trial import part_steps

if TYPE_CHECKING:
    from raysim.sweeps.race_budget import RaceBudget

AT_ONCE, WAITS = "at once", "waits"
OUT = ("failed", AT_ONCE)
"""Decisions by which a trial leaves without a verdict of the race."""

COLUMNS = pa.schema(
    [
        ("round", pa.int64()),
        ("trial", pa.int64()),  # Optuna's number
        # "train"; why the trial left: "harmful", "hopeless", "slower", "chance" (dense is near it), "failed", "at once" (hopeless
        # before its first step); "plan" of a budget; "further" than the plan; "waits" until the others have left time
        ("decision", pa.string()),
        ("seeds", pa.list_(pa.int64())),  # trained in this round, behind the exit, or planned from here on
        ("share", pa.float64()),  # of the steps at which the part ends
        ("cost", pa.float64()),  # of a step, in seconds or bytes: orders the trials; 0 (first) until it is known
        ("harm", pa.float64()),  # mean over the seeds, in the unit of the measure: only for an exit
        ("bound", pa.float64()),  # lower bound of the final harm, or the chance of a safe verdict: only for an exit
        ("ended", pa.bool_()),  # whether the round has ended
        ("elapsed_s", pa.float64()),  # of the race at the end of the round, over all sessions: only within a budget
    ]
)


@dataclass
class RoundEntry:
    """A row of `race.parquet`."""

    round: int
    trial: int
    decision: str
    seeds: list[int]
    share: float
    cost: float
    harm: float | None = None
    bound: float | None = None
    ended: bool = False
    elapsed_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """True if no value needed by its decision is missing."""
        needed = (self.round, self.trial, self.decision, self.seeds, self.share, self.cost)
        exit_needs = not self.is_exit or (self.harm is not None and self.share in RUNGS)
        return None not in needed and None not in self.seeds and exit_needs

    @property
    def is_exit(self) -> bool:
        """True if the trial left by a decision of the race."""
        return self.decision not in ("train", *OUT, "plan", "further", WAITS)

    @property
    def exit(self) -> RaceExit:
        assert self.harm is not None
        kind: Kind = self.decision  # type: ignore[assignment]
        bound = math.nan if self.bound is None else self.bound
        return RaceExit(kind, RUNGS.index(self.share), len(self.seeds), self.harm, bound)


class RunPart(NamedTuple):
    """A part of one run: a trial's seed, trained up to a share of its steps."""

    trial: int
    seed: int
    share: float


class RaceRounds:
    """The rounds of a study's race, on disk.

    `entrants` are the numbers of its trials, without `dense`. `run_of` returns a trial's run with a seed; `cost_of` the step
    costs, by number, of trials whose first parts have ended: 0 if still unknown. Raises ConfigError if the file of an earlier
    session is damaged.
    """

    def __init__(
        self,
        file: Path,
        *,
        race: Race,
        seeds: Sequence[int],
        dense: int,
        entrants: Sequence[int],
        measure: Measure,
        run_of: Callable[[int, int], Run],
        cost_of: Callable[[Sequence[int]], Mapping[int, float]],
    ) -> None:
        self.file = file
        self.race = race
        self.all_seeds, self.dense = list(seeds), dense
        self.measure = measure
        self.run_of, self._cost_of = run_of, cost_of
        self.budget: RaceBudget | None = None
        self.left: dict[int, RaceExit] = {}
        self.further: dict[int, int] = {}
        """Numbers of seeds of trials that went on after the planned ones."""
        self.waiting: set[int] = set()
        """Running trials that a budget leaves out for now: no part of them has begun."""
        self.evidence: dict[int, Evidence] = {}
        self._entrants = list(entrants)
        self._dense_losses: dict[int, Losses] = {}  # of ended runs, by seed
        self._dense_skills: dict[int, float] = {}  # the same
        self._entries = read_entries(file)
        for entry in self._entries:
            self._follow(entry)
        self.failed = {entry.trial for entry in self._entries if entry.decision in OUT}
        """Trials that have left without a verdict; those of them hopeless at once are `at_once`."""
        for number in sorted({entry.round for entry in self._entries if entry.ended}):
            self._take_in([entry for entry in self._entries if entry.round == number])
        self._look_at_dense()

    def next_round(self) -> list[RunPart]:
        """Return the parts of the next round, or of a killed race's unfinished one; none if the race is over."""
        begun = [entry for entry in self._entries if not entry.ended and entry.decision == "train"]
        if not begun:
            begun = self.with_dense(self.next_entries() if self.budget is None else self.budget.next_entries())
            self._entries += begun
            self._write()
        return [RunPart(entry.trial, seed, entry.share) for entry in begun for seed in entry.seeds]

    def begin_pilot(self) -> list[RunPart]:
        """Return only the first part of dense, to learn the cost of a run; none if it has ended."""
        if not self._entries:
            self._entries.append(RoundEntry(0, self.dense, "train", self.seeds[:1], RUNGS[0], 0.0))
            self._write()
        (first, *others) = self._entries
        return [] if first.ended or others else [RunPart(first.trial, first.seeds[0], first.share)]

    def next_entries(self, aside: Container[int] = ()) -> list[RoundEntry]:
        """Return the parts of the next round, without dense and the trials set `aside`."""
        evidence = {trial: self.evidence.get(trial, Evidence(0.0)) for trial in self._entrants}
        running = [trial for trial in self.running if trial not in aside]
        number = self._entries[-1].round + 1 if self._entries else 0
        return [
            RoundEntry(number, trial, "train", [self.seeds[i] for i in seeds], RUNGS[rung], evidence[trial].step_s)
            for trial, seeds, rung in self.race.next_parts(evidence, running)
        ]

    def with_dense(self, planned: list[RoundEntry]) -> list[RoundEntry]:
        """Return entries, preceded by the dense entries they need."""
        known = self.trained_seeds(self.dense, least=1.0)
        needed = {seed for entry in planned for seed in entry.seeds} - set(known)
        if not needed:
            return planned
        seeds = [seed for seed in self.all_seeds if seed in needed]
        return [RoundEntry(planned[0].round, self.dense, "train", seeds, 1.0, 0.0), *planned]

    def plan_seeds(self, count: int, waiting: Iterable[int] = ()) -> None:
        """Race on the first `count` seeds from now on; trials that already have as many leave by the decisions on these."""
        for trial in waiting:
            self._note(WAITS, trial, 0)
        self._note("plan", self.dense, count)
        self._leave(self._entries[-1].round)
        self._write()

    def go_further(self, trial: int, count: int) -> None:
        """Train a trial left undecided by the planned seeds on the first `count` seeds."""
        self._note("further", trial, count)

    def end_round(self, failed: Collection[int], at_once: Collection[int] = ()) -> dict[int, RaceExit]:
        """Evaluate an ended round; return the trials that leave, and keep them in `left`.

        `failed` are the trials with a part that failed or diverged, and `at_once` those hopeless before their first step.
        """
        number = self._entries[-1].round
        self.failed.update(failed, at_once)
        for trial in sorted({*failed, *at_once}):
            decision = AT_ONCE if trial in at_once else "failed"
            self._entries.append(RoundEntry(number, trial, decision, [], 0.0, 0.0, ended=True))
            self._follow(self._entries[-1])
        of_round = [entry for entry in self._entries if entry.round == number]
        self._take_in(of_round)
        for entry in of_round:
            entry.ended = True
            entry.elapsed_s = None if self.budget is None else self.budget.spending.elapsed_s
        exits = self._leave(number)
        self._write()
        return exits

    def undefined(self, seed: int) -> str:
        """Return why harm against a finished dense run is undefined; empty if it is not."""
        return self.measure.undefined(float(self.run_of(self.dense, seed).row[f"final_{self.measure.name}_on"]))

    @property
    def seeds(self) -> list[int]:
        """The seeds on which trials are trained at present."""
        return self.all_seeds[: self.race.seeds]

    @property
    def begun(self) -> bool:
        """True after the pilot."""
        return len(self._entries) > 1

    @property
    def elapsed_s(self) -> float:
        """Seconds of the race at the end of its last round."""
        return max((entry.elapsed_s or 0.0 for entry in self._entries), default=0.0)

    @property
    def safe(self) -> list[int]:
        """The trials that the rule calls safe."""
        return self.race.safe(self.evidence)

    @property
    def at_once(self) -> list[int]:
        """The trials found hopeless before their first step."""
        return [entry.trial for entry in self._entries if entry.decision == AT_ONCE]

    @property
    def running(self) -> list[int]:
        """The trials still in the race."""
        out = {*self.left, *self.failed}
        return [trial for trial in self._entrants if trial not in out and not self.is_complete(trial)]

    @property
    def undecided(self) -> list[int]:
        """The trials still undecided after all seeds."""
        decided = {*self.safe, *self.left, *self.failed}
        return [trial for trial in self._entrants if trial not in decided and self.is_complete(trial)]

    def may_return(self, trial: int) -> bool:
        """Return whether more seeds may decide about a trial given up because the planned ones hardly could."""
        reason = self.left.get(trial)
        return reason is not None and reason.kind == "hopeless" and bool(self.harms(trial))

    def harms(self, trial: int) -> tuple[float, ...]:
        """Return a trial's harms by its final evaluations, one per seed."""
        return self.evidence.get(trial, Evidence(0.0)).final

    @property
    def least_harmful(self) -> int | None:
        """The trial with the smallest mean harm among those trained to the end and still in the race; None if there are none."""
        kept = [trial for trial in self._entrants if trial not in {*self.left, *self.failed} and self.harms(trial)]
        return min(kept, key=lambda trial: fmean(self.harms(trial)), default=None)

    def is_complete(self, trial: int) -> bool:
        """Return whether a trial has been trained on all of its seeds."""
        evidence = self.evidence.get(trial)
        return evidence is not None and len(evidence.final) >= self.further.get(trial, self.race.plan)

    @property
    def parts(self) -> list[RoundEntry]:
        """The parts of all trials, in order."""
        return [entry for entry in self._entries if entry.decision == "train"]

    @property
    def ended_runs(self) -> int:
        """The number of runs trained to their end, dense ones included."""
        return sum(len(entry.seeds) for entry in self.parts if entry.ended and entry.share == 1.0)

    def trained(self, trial: int) -> list[RoundEntry]:
        return [entry for entry in self.parts if entry.trial == trial]

    def trained_seeds(self, trial: int, *, least: float = 0.0) -> list[int]:
        """Return the begun seeds of a trial that have a part up to at least the share `least` of the steps."""
        seeds = {seed for entry in self.trained(trial) if entry.share >= least for seed in entry.seeds}
        return [seed for seed in self.all_seeds if seed in seeds]

    def _note(self, decision: str, trial: int, count: int) -> None:
        entry = RoundEntry(self._entries[-1].round, trial, decision, self.all_seeds[:count], 0.0, 0.0, ended=True)
        self._entries.append(entry)
        self._follow(entry)

    def _follow(self, entry: RoundEntry) -> None:
        """Apply the decision of an entry."""
        count = len(entry.seeds)
        if entry.decision == "plan":
            self.race = replace(self.race, seeds=count, planned=None)
        elif entry.decision == WAITS:
            self.waiting.add(entry.trial)
        elif entry.decision == "train":
            self.waiting.discard(entry.trial)
        elif entry.decision == AT_ONCE:  # never judged
            self.race = replace(self.race, family=max(1, self.race.family - 1))
        elif entry.decision == "further":
            self.race = replace(self.race, seeds=count, planned=self.race.plan)
            self.further[entry.trial] = count
            self.left.pop(entry.trial, None)
        elif entry.is_exit:
            self.left[entry.trial] = entry.exit

    def _leave(self, number: int) -> dict[int, RaceExit]:
        """Remove trials by the evidence so far, and return their exits."""
        self._look_at_dense()
        exits = self.race.exits(self.evidence, [trial for trial in self.running if trial in self.evidence])
        self.left |= exits
        for trial, (kind, rung, seeds, harm, bound) in sorted(exits.items()):
            cost = self.evidence[trial].step_s
            behind = (kind, self.seeds[:seeds], RUNGS[rung], cost, harm, None if math.isnan(bound) else bound)
            self._entries.append(RoundEntry(number, trial, *behind, ended=True))
        return exits

    def _look_at_dense(self) -> None:
        """Check by the rule whether dense is near chance, once all planned seeds are known and are enough for a verdict."""
        skills = [self._dense_skills[seed] for seed in self.all_seeds[: self.race.plan] if seed in self._dense_skills]
        known = len(skills) == self.race.plan >= MIN_SEEDS
        self.race = replace(self.race, at_chance=known and at_chance(skills))

    def _take_in(self, entries: Sequence[RoundEntry]) -> None:
        """Add the evidence of the parts of a round."""
        whole = [entry for entry in entries if entry.trial == self.dense and entry.share == 1.0]
        for seed in {seed for entry in whole for seed in entry.seeds}:
            run, name = self.run_of(self.dense, seed), self.measure.name
            row, judged = run.row, "samples" if self.measure.whole else "predictions"
            self.race = replace(self.race, step=self.measure.step(run.evals[judged].min()))
            values = (row.get(f"{column}_{name}{mode}") for column, mode in (("final", "_on"), ("chance", "")))
            self._dense_skills[seed] = self.measure.skill(*(math.nan if value is None else value for value in values))
        out = {self.dense, *self.failed}
        parts = [entry for entry in entries if entry.decision == "train" and entry.trial not in out]
        known = {trial: each.step_s for trial, each in self.evidence.items() if trial not in out}
        asked = [entry.trial for entry in parts if not entry.ended and not known.get(entry.trial)]
        costs = self._cost_of(sorted({*known, *asked})) if asked else {}
        for entry in parts:
            if entry.trial in asked:
                entry.cost = costs[entry.trial]
            before = self.evidence.get(entry.trial, Evidence(0.0))
            self.evidence[entry.trial] = self._observed(entry, before._replace(step_s=entry.cost))

    def _observed(self, entry: RoundEntry, before: Evidence) -> Evidence:
        """Return a trial's evidence extended by one part."""
        if entry.share == 1.0:
            name = f"final_{self.measure.name}_on"
            pairs = [
                [self.run_of(trial, seed).row[name] for trial in (entry.trial, self.dense)] for seed in entry.seeds
            ]
            return before._replace(final=(*before.final, *(self.measure.harm(*pair) for pair in pairs)))
        for seed in set(entry.seeds) - self._dense_losses.keys():
            self._dense_losses[seed] = losses_of(self.run_of(self.dense, seed))
        dense = [self._dense_losses[seed] for seed in entry.seeds]
        runs = [losses_of(self.run_of(entry.trial, seed)) for seed in entry.seeds]
        chances = chances_of(self.run_of(self.dense, entry.seeds[0]).row)
        steps = part_steps(entry.share, len(dense[0]))
        return before._replace(observed=(*before.observed, observe(self.measure, runs, dense, steps, chances)))

    def _write(self) -> None:
        write_entries(self.file, self._entries)


def write_entries(file: Path, entries: Sequence[RoundEntry]) -> None:
    """Write entries atomically."""
    columns = {name: [getattr(entry, name) for entry in entries] for name in COLUMNS.names}
    write_table(pa.table(columns, schema=COLUMNS), file)


def read_entries(file: Path) -> list[RoundEntry]:
    """Return the entries of a file, none if it is missing; raises ConfigError if it is damaged."""
    if not file.is_file():
        return []
    try:
        entries = [RoundEntry(**row) for row in read_as(file, COLUMNS).to_pylist()]
        if wrong := next((entry for entry in entries if not entry.is_whole), None):
            raise ValueError(f"trial {wrong.trial} has an impossible row in round {wrong.round}")
        return entries
    except (*UNREADABLE, OverflowError) as error:
        raise ConfigError(
            f"The rounds of the race, {file}, cannot be read ({error}): restore the file from a copy."
        ) from None
