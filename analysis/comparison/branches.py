"""Harm by compressed part of training, from branches of one dense run, and bounds for the rest of training.

A branch from step n with m steps measures the harm of compressing these steps alone. `branch_harms` judges each, and bounds the harm of
compressing from n to the end by the sum of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from raysim.analysis.comparison.choice import VERDICTS, outcome_columns
from raysim.analysis.comparison.contexts import ComparedRuns, contexts
from raysim.analysis.comparison.rule import CONFIDENCE, PairedSample, judge
from raysim.analysis.data.settings import compared_keys
from raysim.analysis.runs.results import Results
from raysim.config.identity import Setting, plain

ASSUMPTION = (
    "Harm to the end is a sum of parts: each part stands for the steps until the next point, harm per step is constant in it, and "
    "the harm of parts adds up. Harm that passes, and compression at inference, count in every part, so the sum is an upper bound."
)
_LENGTH = ("start", "steps", "epochs")
_HARM = ("seeds", "harm", "harm_low", "harm_high", "verdict", "lacking")
_REST = tuple(f"rest_{name}" for name in _HARM)


class BranchPart(NamedTuple):
    """The runs that compress one part of training, or train it densely: steps `first` to `end`."""

    first: int
    end: int
    context: ComparedRuns

    def value(self, setting: Setting, seed: int) -> float:
        """Return the quality of a run after the part, with compression on."""
        column: pd.Series[Any] = self.context.settings[setting][f"{self.context.quality.name}_on"]
        return float(column[seed])

    def difference(self, setting: Setting, seed: int) -> float:
        """Return a setting's harm after the part, in units of the measure."""
        worse = self.value(setting, seed) - self.value(Setting(), seed)
        return -worse if self.context.quality.higher else worse

    def harms(self, setting: Setting) -> dict[int, float]:
        """Return the harm of a setting at each seed that it shares with dense, with compression on."""
        return self.context.harms(setting) if setting in self.context.settings else {}


@dataclass(frozen=True, eq=False)
class BranchFamily:
    """Branches of one dense run, equal in all but compression, seed and the part of training."""

    label: str
    parts: Sequence[BranchPart]
    """In the order of their first steps; of several lengths from one step, the shortest."""
    planned: int
    """Steps of the whole training."""

    @cached_property
    def settings(self) -> list[Setting]:
        """The compressed settings of any part."""
        named = {setting for part in self.parts for setting in part.context.settings if setting != Setting()}
        return sorted(named, key=str)

    def sums(self, setting: Setting, first: int, end: int) -> dict[int, float]:
        """Return by seed the harm of compressing steps `first` to `end`, as the sum of the parts; see `ASSUMPTION`.

        Empty if no part begins at `first`, or a later one lacks the setting.
        """
        within = [part for part in self.parts if first <= part.first < end]
        if not within or within[0].first != first:
            return {}
        weights = [
            (until - part.first) / (part.end - part.first)
            for part, until in zip(within, [*(part.first for part in within[1:]), end], strict=True)
        ]
        *_, last = within
        quality, harms = last.context.quality, {}
        for seed in sorted(set.intersection(*(set(part.harms(setting)) for part in within))):
            total = sum(w * part.difference(setting, seed) for w, part in zip(weights, within, strict=True))
            dense = last.value(Setting(), seed)
            harms[seed] = quality.harm(dense - total if quality.higher else dense + total, dense)
        return harms


def families(results: Results, *, quality: str = "auto", margin: float | None = None) -> list[BranchFamily]:
    """Return the branches of each dense run of `results`."""
    alike = compared_keys(results.keys, besides=_LENGTH)
    groups: dict[tuple[str, ...], list[tuple[int, BranchPart]]] = {}
    for context in contexts(results, quality=quality, margin=margin):
        runs = [results.rows[str(run)] for run in context.rows["run"]]
        row, done = runs[0], max(int(each["steps_done"]) for each in runs)  # a diverged run has done fewer
        if (parent := plain(row.get("parent"))) is None:
            continue
        first = int(plain(row.get("first_step")) or 0)
        planned = int(plain(row.get("rate_steps")) or done)
        key = (parent, *(repr(plain(row.get(name))) for name in alike))
        groups.setdefault(key, []).append((planned, BranchPart(first, first + done, context)))
    branched = []
    for entries in groups.values():
        ours = sorted((part for _, part in entries), key=lambda part: part[:2])
        parts = list({part.first: part for part in reversed(ours)}.values())[::-1]
        label = parts[0].context.label.partition(", start=")[0]
        branched.append(BranchFamily(label, parts, max(steps for steps, _ in entries)))
    return branched


def branch_harms(
    results: Results, *, quality: str = "auto", margin: float | None = None, confidence: float = CONFIDENCE
) -> pd.DataFrame:
    """Return the harm of each compressed setting by branch point: in its part of training, and in all steps from there.

    `harm` is that of compressing steps `first_step` to `end_step` alone, by the rule of `settings`: all settings and points of a dense
    run are one family. `rest_harm` bounds that of compressing from `first_step` to the end of training, see `ASSUMPTION`; its
    verdicts are a family too. As harm may fade, the sum of several parts can show that the rest is safe, not that it is harmful.
    `safe_from` is the first point from which on the rest is safe, missing if there is none.
    """
    rows = []
    for family in families(results, quality=quality, margin=margin):
        pairs = [(setting, part) for setting in family.settings for part in family.parts if part.harms(setting)]
        alpha, end = 1 - confidence, family.parts[-1].context
        harms = [part.context.harm_sample(setting, part.harms(setting), alpha) for setting, part in pairs]
        sums = [
            part.context.harm_sample(setting, family.sums(setting, part.first, family.planned), alpha, end)
            for setting, part in pairs
        ]
        alone, rest = (_judged(samples, pairs, alpha) for samples in (harms, sums))
        rest = [_bounded(columns, family.parts[-1] is part) for columns, (_, part) in zip(rest, pairs, strict=True)]
        safe: dict[Setting, int] = {}
        for (setting, part), after in reversed(list(zip(pairs, rest, strict=True))):
            later = [p.first for s, p in pairs if s == setting and p.first > part.first]
            if after["verdict"] == "safe" and (not later or safe.get(setting) == later[0]):
                safe[setting] = part.first
        for (setting, part), own, after in zip(pairs, alone, rest, strict=True):
            rows.append(
                {
                    "job": family.label,
                    "setting": str(setting),
                    "first_step": part.first,
                    "end_step": part.end,
                    "planned_steps": family.planned,
                    "unit": part.context.unit,
                    "within": part.context.margin,
                    **own,
                    **{f"rest_{name}": value for name, value in after.items()},
                    "safe_from": safe.get(setting),
                }
            )
    names = ("job", "setting", "first_step", "end_step", "planned_steps", "unit", "within", *_HARM, *_REST, "safe_from")
    return pd.DataFrame(rows, columns=list(names)).astype({"safe_from": "Int64"})


def _bounded(columns: dict[str, Any], alone: bool) -> dict[str, Any]:
    """Return the verdict of a sum; for several parts, harm is bounded from above only."""
    if alone or columns["verdict"] != "harmful":
        return columns
    return columns | {"verdict": VERDICTS["undecided"], "lacking": "harm of early parts may pass"}


def _judged(
    samples: Sequence[PairedSample], pairs: Sequence[tuple[Setting, BranchPart]], alpha: float
) -> list[dict[str, Any]]:
    """Return the bounds and the verdict of each sample, all one family."""
    family = [i for i, sample in enumerate(samples) if sample.values]
    margins = [pairs[i][1].context.margin for i in family]
    outcomes = dict(zip(family, judge([samples[i] for i in family], margins, alpha), strict=True))
    return [outcome_columns(sample, outcomes.get(i)) for i, sample in enumerate(samples)]
