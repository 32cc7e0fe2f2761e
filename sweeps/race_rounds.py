"""The rounds of a race: the parts to train, the evidence that they leave, and the decisions, kept in `race.parquet`.

A round is written before it begins and again when all of its parts have ended, with the exits that followed. A killed race trains
the parts of its last round that have not ended, and goes on to the same decisions. Decisions depend on the records alone, not on
the order in which parts end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.analysis.comparison.harm_forecast import Trace, observe
from raysim.analysis.comparison.race import RUNGS, Evidence, Exit, Kind, Race
from raysim.config import ConfigError
from raysim.quality import Measure
from raysim.records import UNREADABLE, Run, write_table
from raysim.sweeps.trial import part_steps

COLUMNS = pa.schema(
    [
        ("round", pa.int64()),
        ("trial", pa.int64()),  # Optuna's number
        ("decision", pa.string()),  # "train", or why the trial left: "harmful", "hopeless", "slower", "failed"
        ("seeds", pa.list_(pa.int64())),  # trained in this round, or behind the exit
        ("share", pa.float64()),  # of the steps, after which the part ends
        ("cost", pa.float64()),  # of a step, by which trials are ordered: seconds or bytes
        ("harm", pa.float64()),  # mean over the seeds, in the unit of the measure: only of an exit
        ("bound", pa.float64()),  # lower bound of the final harm, or the chance of a verdict of safe: only of an exit
        ("ended", pa.bool_()),  # whether the round has ended
    ]
)


class Task(NamedTuple):
    """A part of one run: a trial's seed, trained up to a rung."""

    trial: int
    seed: int
    rung: int


@dataclass
class _Entry:
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

    @property
    def exit(self) -> Exit:
        """The exit that the row records."""
        assert self.harm is not None
        kind: Kind = self.decision  # type: ignore[assignment]
        bound = math.nan if self.bound is None else self.bound
        return Exit(kind, _rung(self.share), len(self.seeds), self.harm, bound)


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
        self.seeds = list(seeds)
        self.dense = dense
        self.left: dict[int, Exit] = {}
        self.failed: set[int] = set()
        self._entrants = list(entrants)
        self.measure = measure
        self._run_of, self._cost_of = run_of, cost_of
        self._entries: list[_Entry] = []
        self._evidence: dict[str, Evidence] = {}
        self._traces: dict[tuple[int, int], Trace] = {}
        self._read()

    def next_round(self) -> list[Task]:
        """Return the parts of the next round, or of the one that a killed race has not ended; none if the race is over."""
        open_ = [entry for entry in self._entries if not entry.ended and entry.decision == "train"]
        if not open_:
            open_ = self._plan()
            self._entries += open_
            self._write()
        return [Task(entry.trial, seed, _rung(entry.share)) for entry in open_ for seed in entry.seeds]

    def end_round(self, failed: Sequence[int]) -> dict[int, Exit]:
        """Take in the records of a round whose parts have ended; return the trials that leave, and keep them in `left`.

        `failed` are the trials with a part that failed or diverged.
        """
        number = self._entries[-1].round
        self.failed.update(failed)
        self._entries += [_Entry(number, trial, "failed", [], 0.0, 0.0, ended=True) for trial in sorted(set(failed))]
        of_round = [entry for entry in self._entries if entry.round == number]
        self._take_in(of_round)
        exits = {
            int(name): reason
            for name, reason in self.race.exits(self._evidence).items()
            if int(name) not in self.left and not self._complete(int(name))
        }
        self.left |= exits
        for entry in of_round:
            entry.ended = True
        for trial, reason in sorted(exits.items()):
            behind = self.seeds[: reason.seeds]
            bound = None if math.isnan(reason.bound) else reason.bound
            cost = self._evidence[_key(trial)].step_s
            of_exit = (reason.kind, behind, RUNGS[reason.rung], cost, reason.harm, bound)
            self._entries.append(_Entry(number, trial, *of_exit, ended=True))
        self._write()
        return exits

    @property
    def running(self) -> list[int]:
        """The trials that are still in the race."""
        return [
            trial
            for trial in self._entrants
            if trial not in self.left and trial not in self.failed and not self._complete(trial)
        ]

    def trained_seeds(self, trial: int) -> list[int]:
        """Return the seeds of a trial that have begun."""
        seeds = {
            seed
            for entry in self._entries
            if entry.trial == trial and entry.decision == "train"
            for seed in entry.seeds
        }
        return [seed for seed in self.seeds if seed in seeds]

    def _complete(self, trial: int) -> bool:
        evidence = self._evidence.get(_key(trial))
        return evidence is not None and len(evidence.final) == len(self.seeds)

    def _plan(self) -> list[_Entry]:
        """Return the entries of the next round: parts of trials, and of dense wherever they need it."""
        number = self._entries[-1].round + 1 if self._entries else 0
        evidence = {_key(trial): self._evidence.get(_key(trial), Evidence(0.0)) for trial in self._entrants}
        parts = self.race.next_parts(evidence, [_key(trial) for trial in self.running])
        planned = [
            _Entry(
                number,
                int(part.setting),
                "train",
                [self.seeds[i] for i in part.seeds],
                RUNGS[part.rung],
                evidence[part.setting].step_s,
            )
            for part in parts
        ]
        known = self.trained_seeds(self.dense)
        needed = {seed for entry in planned for seed in entry.seeds} - set(known)
        if needed:
            planned.insert(
                0, _Entry(number, self.dense, "train", [seed for seed in self.seeds if seed in needed], 1.0, 0.0)
            )
        return planned

    def _take_in(self, entries: Sequence[_Entry]) -> None:
        """Add the evidence of the parts of a round."""
        parts = [
            entry
            for entry in entries
            if entry.decision == "train" and entry.trial != self.dense and entry.trial not in self.failed
        ]
        first = [entry.trial for entry in parts if _key(entry.trial) not in self._evidence]
        costs = {entry.trial: entry.cost for entry in parts if entry.ended}
        if first and not costs:
            costs = dict(self._cost_of(first))
        for entry in parts:
            if _key(entry.trial) not in self._evidence:
                entry.cost = costs.get(entry.trial, 0.0)
                self._evidence[_key(entry.trial)] = Evidence(entry.cost)
            self._evidence[_key(entry.trial)] = self._observed(entry, self._evidence[_key(entry.trial)])

    def _observed(self, entry: _Entry, before: Evidence) -> Evidence:
        """Return a trial's evidence with that of one more part."""
        if entry.share == 1.0:
            name = f"final_{self.measure.name}_on"
            pairs = [
                [self._run_of(trial, seed).row[name] for trial in (entry.trial, self.dense)] for seed in entry.seeds
            ]
            return before._replace(final=(*before.final, *(self.measure.harm(*pair) for pair in pairs)))
        dense = [self._trace(self.dense, seed) for seed in entry.seeds]
        steps = part_steps(entry.share, len(dense[0].losses))
        runs = [self._trace(entry.trial, seed) for seed in entry.seeds]
        row = self._run_of(self.dense, entry.seeds[0]).row
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
        run = self._run_of(trial, seed)
        evals = run.evals
        shown = evals[(evals["mode"] == "on") & (evals["batchnorm"] == "running")]
        steps = run.steps.sort_values("step")
        done = (shown["step"] - steps["step"].min()).tolist()  # a branch goes on from its parent's step
        trace = Trace(steps["loss"].to_numpy(float), dict(zip(done, shown[self.measure.name].tolist(), strict=True)))
        if trial == self.dense:
            self._traces[trial, seed] = trace
        return trace

    def _write(self) -> None:
        columns = {name: [getattr(entry, name) for entry in self._entries] for name in COLUMNS.names}
        write_table(pa.table(columns, schema=COLUMNS), self.file)

    def _read(self) -> None:
        """Read the rounds of an earlier session, and the evidence of those that have ended; raises ConfigError."""
        if not self.file.is_file():
            return
        try:
            rows = pq.read_table(self.file, schema=COLUMNS).to_pylist()
        except UNREADABLE as error:
            raise ConfigError(
                f"The rounds of the race, {self.file}, cannot be read ({error}): restore the file from a copy."
            ) from None
        self._entries = [_Entry(**row) for row in rows]
        self.failed = {entry.trial for entry in self._entries if entry.decision == "failed"}
        for number in sorted({entry.round for entry in self._entries if entry.ended}):
            self._take_in([entry for entry in self._entries if entry.round == number])
        self.left = {entry.trial: entry.exit for entry in self._entries if entry.decision not in ("train", "failed")}


def _key(trial: int) -> str:
    """Return the name of a trial in a race: names are ordered as numbers are."""
    return f"{trial:07d}"


def _rung(share: float) -> int:
    return RUNGS.index(share)


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
