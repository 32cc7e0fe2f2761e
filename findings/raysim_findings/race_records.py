"""Races replayed on recorded runs: the parts trained, the decisions, and the share of training saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from raysim.analysis.comparison.choice import settings
from raysim.analysis.comparison.contexts import ComparedRuns, contexts
from raysim.analysis.comparison.harm_forecast import Losses, chances_of, losses_of, observe
from raysim.analysis.comparison.race import RUNGS, Evidence, Race, RaceExit, RacePart
from raysim.analysis.runs.results import Results
from raysim.config.identity import DENSE
from raysim.network.presets import parse_network
from raysim.records import Run

_COLUMNS = ("context", "setting", "full", "harm", "race", "reason", "seeds", "steps", "runs", "full_runs")


def race_on_records(results: Results, *, first: int = Race.first, within: float | None = None) -> pd.DataFrame:
    """Return one row for each setting and for dense: a race's verdict next to the verdict by all recorded seeds, and their costs.

    `full` is the verdict by all seeds, and `harm` the mean behind it; `race` is "safe", "harmful", "undecided" or "slower" (than a
    safe setting), for `reason`. `runs` and `full_runs` are costs in whole runs, and `seeds` and `steps` those of the setting when it
    left the race. Settings are ordered by the price of their step on the network of their study. `first`: the number of seeds of the
    first parts. Jobs without dense runs, or with fewer than three seeds, are left out.
    """
    judged = settings(results, within)
    rows: list[dict[str, Any]] = []
    for context in contexts(results, margin=within):
        if DENSE not in context.settings or len(context.settings) < 2:
            continue
        replay = _Replay(results, context, first)
        of_job = judged[judged["context"] == context.label]
        full = {str(row["setting"]): row for row in of_job.to_dict("records")}
        rows += [{"context": context.label, **row} for row in replay.rows(full)]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


@dataclass(frozen=True)
class _Replay:
    """A race over the recorded settings of one job."""

    results: Results
    context: ComparedRuns
    first: int

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds that dense and every setting have in common, in order."""
        common = set.intersection(*(set(runs.index) for runs in self.context.settings.values()))
        return sorted(common)

    @cached_property
    def settings(self) -> dict[str, pd.DataFrame]:
        """The runs of the compressed settings, by name."""
        return {str(key): runs for key, runs in self.context.settings.items() if key != DENSE}

    @cached_property
    def losses(self) -> dict[str, Losses]:
        """The training losses of each run, by step."""
        runs = [str(run) for runs in self.context.settings.values() for run in runs["run"]]
        return {run: losses_of(Run(self.results.path(run))) for run in runs}

    @cached_property
    def chances(self) -> dict[str, float]:
        """The measures at chance."""
        return chances_of(Run(self.results.path(self.context.rows["run"].iloc[0])).row)

    def rows(self, full: Mapping[str, Mapping[Any, Any]]) -> list[dict[str, Any]]:
        """Return the rows of the settings and of dense, with the verdicts by all seeds."""
        step = 0.0 if math.isnan(self.context.step) else self.context.step
        race = Race(len(self.seeds), self.context.margin, len(self.settings), self.first, step=step)
        evidence = {name: Evidence(self._step_s(runs)) for name, runs in self.settings.items()}
        costs = {name: np.zeros(race.seeds) for name in ("", *evidence)}  # in runs, by seed; "" is dense
        costs[""][: race.first] = 1.0
        left: dict[str, RaceExit] = {}
        for parts in race.rounds(evidence, left):
            for part in parts:
                evidence[part.setting] = self._train(part, evidence[part.setting])
                for name in ("", part.setting):
                    seeds = list(part.seeds)
                    costs[name][seeds] = np.maximum(costs[name][seeds], RUNGS[part.rung])
        safe = race.safe(evidence)
        rows = [self._row(name, costs[name], full[name], left.get(name), name in safe) for name in evidence]
        dense = {
            "setting": "dense",
            "runs": float(costs[""].sum()),
            "full_runs": float(len(self.context.settings[DENSE])),
        }
        return [dense, *rows]

    def _row(
        self, name: str, cost: np.ndarray[Any, Any], full: Mapping[Any, Any], left: RaceExit | None, safe: bool
    ) -> dict[str, Any]:
        verdicts = {"harmful": "harmful", "hopeless": "undecided", "slower": "slower"}
        share = RUNGS[left.rung] if left is not None else 1.0
        num_steps = min(len(self.losses[run]) for run in self._runs(name, range(len(self.seeds))))
        return {
            "setting": name,
            "full": full["verdict"],
            "harm": full["harm"],
            "race": "safe" if safe else verdicts[left.kind] if left is not None else "undecided",
            "reason": left.kind if left is not None else "all seeds",
            "seeds": left.seeds if left is not None else len(self.seeds),
            "steps": round(share * num_steps),
            "runs": float(cost.sum()),
            "full_runs": float(len(self.settings[name])),
        }

    def _runs(self, name: str, seeds: Sequence[int] | range) -> list[str]:
        """Return the runs of a setting, or of dense if it has no name, at these positions of seeds."""
        runs = self.settings[name] if name else self.context.settings[DENSE]
        return [str(runs.loc[self.seeds[i], "run"]) for i in seeds]

    def _train(self, part: RacePart[str], before: Evidence) -> Evidence:
        if part.rung == len(RUNGS) - 1:
            runs, dense = self.settings[part.setting], self.context.settings[DENSE]
            at: list[Any] = [self.seeds[i] for i in part.seeds]
            harms = (self.context.harm(runs.loc[seed], "on", dense.loc[seed], "on") for seed in at)
            return before._replace(final=(*before.final, *harms))
        own, others = ([self.losses[run] for run in self._runs(name, part.seeds)] for name in (part.setting, ""))
        steps = round(RUNGS[part.rung] * len(others[0]))
        seen = observe(self.context.quality, own, others, steps, self.chances)
        return before._replace(observed=(*before.observed, seen))

    def _step_s(self, runs: pd.DataFrame) -> float:
        run = str(runs["run"].iloc[0])
        replay = self.results.replay(run, **self.results.pricing_of(runs))
        return replay.step_s([parse_network(self.results.network_of(runs["study"].dropna()))])[0].value
