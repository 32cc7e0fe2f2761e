"""The rounds of a race: the parts to train, the evidence that they leave, and the decisions, kept in `race.parquet`.

A round is written before it begins and again when all of its parts have ended, with the exits that followed. A killed race trains
the parts of its last round that have not ended, and goes on to the same decisions. Decisions depend on the records alone, not on
the order in which parts end, and within a budget on what runs take too: see `sweeps.race_budget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from raysim.analysis.comparison.harm_forecast import Trace, observe
from raysim.analysis.comparison.race import RUNGS, Evidence, Exit, Race
from raysim.quality import Measure
from raysim.records import Run
from raysim.sweeps.race_file import Entry, read_entries, rung_of, write_entries
from raysim.sweeps.trial import part_steps

if TYPE_CHECKING:
    from raysim.sweeps.race_budget import RaceBudget


class Task(NamedTuple):
    """A part of one run: a trial's seed, trained up to a rung."""

    trial: int
    seed: int
    rung: int


class RaceRounds:
    """The rounds of a study's race, on disk.

    `entrants` are the trials in it, without `dense`, all by number. `run_of` returns a trial's run with a seed; `cost_of` the
    costs of a step of trials whose first parts have ended, by number.
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
        self.all_seeds = list(seeds)
        self.dense = dense
        self.budget: RaceBudget | None = None
        self.left: dict[int, Exit] = {}
        self.failed: set[int] = set()
        self.further: dict[int, int] = {}
        """Numbers of seeds of trials that went on after the planned ones."""
        self._entrants = list(entrants)
        self.measure = measure
        self.run_of, self._cost_of = run_of, cost_of
        self._entries: list[Entry] = []
        self.evidence: dict[str, Evidence] = {}
        self._traces: dict[tuple[int, int], Trace] = {}
        self._read()

    def next_round(self) -> list[Task]:
        """Return the parts of the next round, or of the one that a killed race has not ended; none if the race is over."""
        open_ = [entry for entry in self._entries if not entry.ended and entry.decision == "train"]
        if not open_:
            open_ = self._plan() if self.budget is None else self.budget.next_entries(self._plan)
            self._entries += open_
            self._write()
        return [Task(entry.trial, seed, rung_of(entry.share)) for entry in open_ for seed in entry.seeds]

    def begin_pilot(self) -> list[Task]:
        """Return the first part of dense alone, which shows what a run costs; none if it has ended."""
        if not self._entries:
            self._entries.append(Entry(0, self.dense, "train", self.seeds[:1], RUNGS[0], 0.0))
            self._write()
        (first, *others) = self._entries
        return [] if first.ended or others else [Task(first.trial, first.seeds[0], 0)]

    @property
    def seeds(self) -> list[int]:
        """The seeds on which trials are trained at present."""
        return self.all_seeds[: self.race.seeds]

    def plan_seeds(self, count: int) -> None:
        """Race on the first `count` seeds from now on; trials that have that many leave by the decisions on them."""
        self._note("plan", self.dense, count)
        self._leave(self._entries[-1].round)
        self._write()

    def go_further(self, trial: int, count: int) -> None:
        """Train a trial, which the planned seeds could not decide, on the first `count` seeds."""
        self._note("further", trial, count)

    def _note(self, decision: str, trial: int, count: int) -> None:
        entry = Entry(self._entries[-1].round, trial, decision, self.all_seeds[:count], 0.0, 0.0, ended=True)
        self._entries.append(entry)
        self._follow(entry)

    def _follow(self, entry: Entry) -> None:
        """Take over what an entry decides."""
        count = len(entry.seeds)
        if entry.decision == "plan":
            self.race = replace(self.race, seeds=count, planned=None)
        elif entry.decision == "further":
            self.race = replace(self.race, seeds=count, planned=self.race.plan)
            self.further[entry.trial] = count
            self.left.pop(entry.trial, None)
        elif entry.is_exit:
            self.left[entry.trial] = entry.exit

    def end_round(self, failed: Sequence[int]) -> dict[int, Exit]:
        """Take in the records of a round whose parts have ended; return the trials that leave, and keep them in `left`.

        `failed` are the trials with a part that failed or diverged.
        """
        number = self._entries[-1].round
        self.failed.update(failed)
        self._entries += [Entry(number, trial, "failed", [], 0.0, 0.0, ended=True) for trial in sorted(set(failed))]
        of_round = [entry for entry in self._entries if entry.round == number]
        self._take_in(of_round)
        for entry in of_round:
            entry.ended = True
            entry.elapsed_s = None if self.budget is None else self.budget.spending.elapsed_s
        exits = self._leave(number)
        self._write()
        return exits

    def _leave(self, number: int) -> dict[int, Exit]:
        """Let trials leave by the evidence so far, and return their exits."""
        begun = [name for name in map(key_of, self.running) if name in self.evidence]
        exits = {int(name): reason for name, reason in self.race.exits(self.evidence, begun).items()}
        self.left |= exits
        for trial, reason in sorted(exits.items()):
            behind = self.seeds[: reason.seeds]
            bound = None if math.isnan(reason.bound) else reason.bound
            cost = self.evidence[key_of(trial)].step_s
            of_exit = (reason.kind, behind, RUNGS[reason.rung], cost, reason.harm, bound)
            self._entries.append(Entry(number, trial, *of_exit, ended=True))
        return exits

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
        return [int(name) for name in self.race.safe(self.evidence)]

    @property
    def running(self) -> list[int]:
        """The trials that are still in the race."""
        return [
            trial
            for trial in self._entrants
            if trial not in self.left and trial not in self.failed and not self.is_complete(trial)
        ]

    @property
    def undecided(self) -> list[int]:
        """The trials that all seeds have left undecided."""
        safe = {*self.safe, *self.left, *self.failed}
        return [trial for trial in self._entrants if self.is_complete(trial) and trial not in safe]

    def may_return(self, trial: int) -> bool:
        """Return whether more seeds may decide on a trial that left: only the planned ones would hardly have done so."""
        reason = self.left.get(trial)
        return reason is not None and reason.kind == "hopeless" and bool(self.harms(trial))

    def harms(self, trial: int) -> tuple[float, ...]:
        """Return a trial's harms by its final evaluations, one a seed."""
        return self.evidence[key_of(trial)].final

    def trained_seeds(self, trial: int, *, least: float = 0.0) -> list[int]:
        """Return the seeds of a trial that have begun, with parts up to a share of the steps of at least `least`."""
        seeds = {seed for entry in self.trained(trial) if entry.share >= least for seed in entry.seeds}
        return [seed for seed in self.all_seeds if seed in seeds]

    @property
    def parts(self) -> list[Entry]:
        """The parts of all trials, in order."""
        return [entry for entry in self._entries if entry.decision == "train"]

    def trained(self, trial: int) -> list[Entry]:
        """Return the parts of a trial, in order."""
        return [entry for entry in self.parts if entry.trial == trial]

    def is_complete(self, trial: int) -> bool:
        """Return whether a trial has been trained on all seeds that it was given."""
        evidence = self.evidence.get(key_of(trial))
        return evidence is not None and len(evidence.final) >= self.further.get(trial, self.race.plan)

    def _plan(self) -> list[Entry]:
        """Return the entries of the next round: parts of trials, and of dense wherever they need it."""
        evidence = {key_of(trial): self.evidence.get(key_of(trial), Evidence(0.0)) for trial in self._entrants}
        number = self._entries[-1].round + 1 if self._entries else 0
        while running := [
            key_of(trial) for trial in self.running if self.budget is None or trial not in self.budget.aside
        ]:
            entries = [
                Entry(
                    number, int(setting), "train", [self.seeds[i] for i in seeds], RUNGS[rung], evidence[setting].step_s
                )
                for setting, seeds, rung in self.race.next_parts(evidence, running)
            ]
            if self.budget is None or not entries:
                return self.with_dense(entries)
            if planned := self.budget.within(entries):
                return self.with_dense(planned)
        return []

    def with_dense(self, planned: list[Entry]) -> list[Entry]:
        """Return entries after those of dense that they need."""
        known = self.trained_seeds(self.dense, least=1.0)
        needed = {seed for entry in planned for seed in entry.seeds} - set(known)
        if not needed:
            return planned
        seeds = [seed for seed in self.all_seeds if seed in needed]
        return [Entry(planned[0].round, self.dense, "train", seeds, 1.0, 0.0), *planned]

    def _take_in(self, entries: Sequence[Entry]) -> None:
        """Add the evidence of the parts of a round."""
        parts = [
            entry
            for entry in entries
            if entry.decision == "train" and entry.trial != self.dense and entry.trial not in self.failed
        ]
        first = [entry.trial for entry in parts if key_of(entry.trial) not in self.evidence]
        costs = {entry.trial: entry.cost for entry in parts if entry.ended}
        if first and not costs:
            costs = dict(self._cost_of(first))
        for entry in parts:
            if key_of(entry.trial) not in self.evidence:
                entry.cost = costs.get(entry.trial, 0.0)
                self.evidence[key_of(entry.trial)] = Evidence(entry.cost)
            self.evidence[key_of(entry.trial)] = self._observed(entry, self.evidence[key_of(entry.trial)])

    def _observed(self, entry: Entry, before: Evidence) -> Evidence:
        """Return a trial's evidence with that of one more part."""
        if entry.share == 1.0:
            name = f"final_{self.measure.name}_on"
            pairs = [
                [self.run_of(trial, seed).row[name] for trial in (entry.trial, self.dense)] for seed in entry.seeds
            ]
            return before._replace(final=(*before.final, *(self.measure.harm(*pair) for pair in pairs)))
        dense = [self._trace(self.dense, seed) for seed in entry.seeds]
        steps = part_steps(entry.share, len(dense[0].losses))
        runs = [self._trace(entry.trial, seed) for seed in entry.seeds]
        row = self.run_of(self.dense, entry.seeds[0]).row
        chances = {
            key.removeprefix("chance_"): value
            for key, value in row.items()
            if key.startswith("chance_") and value is not None
        }
        return before._replace(observed=(*before.observed, observe(self.measure, runs, dense, steps, chances)))

    def _trace(self, trial: int, seed: int) -> Trace:
        """Return the training losses and the evaluations of a run so far; dense's are kept, since they are at their end."""
        if (trial, seed) in self._traces:
            return self._traces[trial, seed]
        run = self.run_of(trial, seed)
        evals = run.evals
        shown = evals[(evals["mode"] == "on") & (evals["batchnorm"] == "running")]
        steps = run.steps.sort_values("step")
        done = (shown["step"] - steps["step"].min()).tolist()  # a branch goes on from its parent's step
        trace = Trace(steps["loss"].to_numpy(float), dict(zip(done, shown[self.measure.name].tolist(), strict=True)))
        if trial == self.dense:
            self._traces[trial, seed] = trace
        return trace

    def _write(self) -> None:
        write_entries(self.file, self._entries)

    def _read(self) -> None:
        """Take in the rounds of an earlier session; raises ConfigError."""
        self._entries = read_entries(self.file)
        for entry in self._entries:
            self._follow(entry)
        self.failed = {entry.trial for entry in self._entries if entry.decision == "failed"}
        for number in sorted({entry.round for entry in self._entries if entry.ended}):
            self._take_in([entry for entry in self._entries if entry.round == number])


def key_of(trial: int) -> str:
    """Return the name of a trial in a race: names are ordered as numbers are."""
    return f"{trial:07d}"
