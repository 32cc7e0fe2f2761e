"""Extrapolate the harm of settings to another model size, by laws fitted to the sizes of a study."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from raysim.analysis.comparison.choice import VERDICTS
from raysim.analysis.comparison.rule import Where
from raysim.analysis.comparison.sizes import ALIKE, CUTS, PROPORTION, Size, SizeFamily, size_families
from raysim.analysis.data import AnalysisError
from raysim.analysis.runs.results import Results
from raysim.config.boundaries import entries, read_setting
from raysim.scaling import Carried, HeldOut, Laws, Series, held_out, reach
from raysim.units import apart, decimals, format_parameters, three_digits

SURELY = 0.05
"""Error of calling harm at one size greater than at another, over all pairs of sizes of a setting."""
_STRENGTH = re.compile(r"\((?:\w+=)?\d[\d.e+-]*")  # the first number of a method
_COLUMNS = (
    *("family", "setting", "parameters", "smallest", "largest", "sizes", "seeds", "factor", "reach"),
    *("harm", "harm_low", "harm_high", "power", "power_low", "power_high", "constant", "constant_low", "constant_high"),
    *("exponent", "weight", "disagree", "unit", "within", "verdict", "refusal"),
)


class Asked(NamedTuple):
    """The model to which harm is extrapolated."""

    parameters: float
    tokens: float | None = None
    """By default those of the family's sizes, continued."""
    stages: int | None = None
    """By default as many as at the nearest size."""
    trained: bool = False
    """True if it starts from trained weights."""

    def check(self) -> None:
        """Raise AnalysisError if a number is not positive."""
        for name, value, what in (("at", self.parameters, "parameters"), ("tokens", self.tokens, "tokens")):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 1 <= value < math.inf):
                raise AnalysisError(f"`{name}` must be a number of {what}, such as 1.3e9, but got {value!r}.")
        if self.stages is not None and (isinstance(self.stages, bool) or not 1 <= int(self.stages) == self.stages):
            raise AnalysisError(f"`stages` must be a whole number of stages, but got {self.stages!r}.")


def carry(
    results: Results,
    at: float,
    *,
    tokens: float | None = None,
    stages: int | None = None,
    trained: bool = False,
    within: float | None = None,
    quality: str = "auto",
) -> pd.DataFrame:
    """Extrapolate the harm of each setting to `at` parameters, or say why that is impossible: a row for each family and setting.

    Sizes of a family differ only in the model's dimensions, steps, batch, learning rate and stages. `harm` and its 90 % bounds
    average two laws, see `raysim.scaling`: a `power` of the size (`exponent`; `weight` is its chance), and a `constant`. They
    `disagree` if the bounds of one miss the other. Settings of one method share the exponent: those that differ in the first
    number of each notation. `tokens` follow by default from the family's sizes; other values, and other `stages`, need a size
    trained with several. `trained`: the model in question starts from trained weights. `verdict` is as in `settings`, for one
    setting, by these bounds. It is missing with a `refusal`, which names the run that would allow it: harm is extrapolated at
    most to `reach` parameters: the largest size times the factor over which held-out predictions from smaller sizes hold.
    Raises AnalysisError if there are fewer than three sizes, if sizes differ in more, or if a setting lacks one or was trained
    there in two ways.
    """
    asked = Asked(at, tokens, stages, trained)
    asked.check()
    families = size_families(results, quality=quality, within=within)
    pools: dict[tuple[Any, ...], list[_Setting]] = {}
    for family in families:
        for name, rows in family.rows.items():
            first = rows[family.sizes[0]]
            key = (without_strength(name), family.quantities, first["unit"], family.trained)
            pools.setdefault(key, []).append(_Setting(family, name, rows))
    groups = [_Pool(pool) for pool in pools.values()]
    carried = [group.row(i, asked) for group in groups for i in range(len(group.settings))]
    frame = pd.DataFrame(carried, columns=list(_COLUMNS))
    return frame.sort_values(["family", "setting"], ignore_index=True)


def law_sentence(row: Mapping[Any, Any]) -> str:
    """Return a sentence on a row of `carry`.

    >>> row = {"smallest": 3e5, "largest": 5e6, "harm": 0.9, "harm_low": 0.3, "harm_high": 2.4, "parameters": 1.3e9}
    >>> law_sentence(row | {"unit": "% of loss", "within": 1.0, "disagree": False, "refusal": None})
    'by a law from 0.3 M to 5 M: +0.9 % (+0.3 to +2.4) at 1.3 B'
    """
    if isinstance(row["refusal"], str):
        return str(row["refusal"])
    unit = "%" if str(row["unit"]).startswith("%") else "points"
    smallest, largest, asked = (format_parameters(row[name]) for name in ("smallest", "largest", "parameters"))
    harm, low, high = (decimals(row[name], 1, row["within"], sign="+") for name in ("harm", "harm_low", "harm_high"))
    text = f"by a law from {smallest} to {largest}: {harm} {unit} ({low} to {high}) at {asked}"
    if not row["disagree"]:
        return text
    power, constant = (
        f"{row[name]:+.1f} ({row[f'{name}_low']:+.1f} to {row[f'{name}_high']:+.1f})" for name in ("power", "constant")
    )
    return f"{text}; as a power of the size {power}, without size {constant}"


def without_strength(setting: str) -> str:
    """Return a setting without the first number of each method; settings that are equal without it share a law.

    >>> without_strength("forward=Quantize(4, per='block', block=64) replica_gradient=DiLoCo(30, codec=Quantize(4))")
    "forward=Quantize(#, per='block', block=64) replica_gradient=DiLoCo(#, codec=Quantize(#))"
    """
    return _STRENGTH.sub("(#", setting)


@dataclass(frozen=True, eq=False)
class _Setting:
    """A setting of a family."""

    family: SizeFamily
    name: str
    rows: Mapping[Size, Mapping[str, Any]]

    @cached_property
    def series(self) -> Series:
        rows = [self.rows[size] for size in self.family.sizes]
        errors = [row["deviation"] / math.sqrt(row["seeds"]) for row in rows]
        points = np.array([self.family.point(size) for size in self.family.sizes])
        return Series(points, np.array([row["harm"] for row in rows]), np.array(errors))

    def size(self, asked: Asked) -> Size:
        """Return the size in question, with the family's usual tokens and stages by default."""
        usual = self.family.usual(asked.parameters)
        return Size(usual.parameters, asked.tokens or usual.tokens, asked.stages or usual.stages)

    @cached_property
    def untold(self) -> str | None:
        """The reason why no law can be fitted to the runs; None if one can."""
        for size, row in self.rows.items():
            where = format_parameters(size.parameters)
            if row["diverged"]:
                return f"{row['diverged']} of {row['seeds']} runs diverged at {where}: train it there at a lower learning rate."
            if math.isnan(row["deviation"]):
                return f"One seed at {where} shows no spread: train it and dense there on two more."
        return None

    def bend(self) -> str | None:
        """Return the harms by size if they significantly rise and fall with size; None if not."""
        points, harms, errors = self.series
        if points.shape[1] > 1:  # one way, at equal tokens and stages
            base = (points[:, 1:] == points[0, 1:]).all(axis=1)
            points, harms, errors = points[base], harms[base], errors[base]
        pairs = [(i, j) for i in range(len(harms)) for j in range(i + 1, len(harms))]
        least = float(special.ndtri(1 - SURELY / (2 * len(pairs))))
        steps = {(i, j): (harms[j] - harms[i]) / max(math.hypot(errors[i], errors[j]), 1e-12) for i, j in pairs}
        if max(steps.values()) < least or min(steps.values()) > -least:
            return None
        sizes = [format_parameters(math.exp(point[0])) for point in points]
        return ", ".join(f"{harm:+.1f} at {size}" for harm, size in zip(harms, sizes, strict=True))


class _Pool:
    """The settings of one method, whose laws share an exponent."""

    def __init__(self, settings: Sequence[_Setting]) -> None:
        self.settings = settings
        self.told = [i for i, setting in enumerate(settings) if setting.untold is None]
        self.series = [settings[i].series for i in self.told]
        self.margin = float(next(iter(settings[0].rows.values()))["within"])
        self.laws = Laws(self.series, self.margin) if self.told else None

    @cached_property
    def reaches(self) -> list[float]:
        """The distances, in logarithms, to which harm is extrapolated beyond the values of each quantity."""
        quantities = range(1 + len(self.settings[0].family.quantities))
        return [reach(self.held_out(quantity)) for quantity in quantities] if self.told else [0.0]

    def held_out(self, quantity: int) -> list[HeldOut]:
        """Return held-out predictions of all harms, each from smaller values of a quantity."""
        return list(held_out(self.series, self.margin, quantity))

    def row(self, i: int, asked: Asked) -> dict[str, Any]:
        """Return the row of a setting for a model."""
        setting = self.settings[i]
        size = setting.size(asked)
        family, first = setting.family, next(iter(setting.rows.values()))
        smallest, largest = family.parameters[0], family.parameters[-1]
        refusal = self._refusal(i, asked, size)
        row: dict[str, Any] = {
            "family": family.label,
            "setting": setting.name,
            "parameters": size.parameters,
            "smallest": smallest,
            "largest": largest,
            "sizes": len(family.parameters),
            "seeds": min(row["seeds"] for row in setting.rows.values()),
            "factor": max(size.parameters / largest, smallest / size.parameters, 1.0),
            "reach": largest * math.exp(self.reaches[0]),
            "unit": first["unit"],
            "within": first["within"],
            "verdict": None,
            "refusal": refusal,
        }
        if refusal is not None or self.laws is None:
            return row
        carried = self.laws.at(self.told.index(i), np.array(family.point(size)))
        return row | _columns(carried, float(first["within"]))

    def _refusal(self, i: int, asked: Asked, size: Size) -> str | None:
        """Return why harm is not extrapolated, and the run that would allow it; None if it is."""
        setting = self.settings[i]
        family, here = setting.family, format_parameters(size.parameters)
        if asked.trained != family.trained:
            was, will = ("trained weights", "scratch") if family.trained else ("scratch", "trained weights")
            return f"The runs start from {was}, and trained models tolerate other settings: train it from {will}, at three sizes."
        if setting.untold is not None:
            return setting.untold
        if (bend := setting.bend()) is not None:
            return f"Harm surely rises and falls with size ({bend}): no law carries it; train it and dense at {here}."
        usual = family.usual(size.parameters)
        times = size.tokens / usual.tokens
        if PROPORTION not in family.quantities and not 1 / ALIKE < times < ALIKE:
            return (
                f"Each size has one number of tokens, {usual.tokens / usual.parameters:.2g} a parameter at {here}: train one size "
                f"with {three_digits(times)} times as many, too."
            )
        if CUTS not in family.quantities and size.stages != usual.stages:
            return f"The runs have {usual.stages} stages: train one size in {size.stages} stages, too."
        if size.parameters > family.parameters[-1] and _whole_range(next(iter(setting.rows.values()))):
            return (
                "One range for a whole tensor does not carry to larger models, whose largest values grow: train it and dense at "
                f"{here}, or group values by row or block."
            )
        return self._too_far(i, size)

    def _too_far(self, i: int, size: Size) -> str | None:
        family = self.settings[i].family
        points, names = np.array([family.point(size) for size in family.sizes]), ("parameters", *family.quantities)
        for name, value, own, limit in zip(names, family.point(size), points.T, self.reaches, strict=True):
            distance = max(value - own.max(), own.min() - value, 0.0)
            if distance <= limit + 1e-9:
                continue
            times, most = apart(three_digits, math.exp(distance), math.exp(limit))
            side, needed = ("largest", value - limit) if value > own.max() else ("smallest", value + limit)
            word = "or more" if side == "largest" else "or fewer"
            if name == "parameters":
                needed_text = f"train it and dense at {format_parameters(math.exp(needed))} {word}"
            else:
                needed_text = f"train one size with {math.exp(needed) + (name == CUTS):.3g} {name} {word}"
            return f"It is {times} times beyond the {side} of its {name}, and held-out predictions allow {most}: {needed_text}."
        return None


def _columns(carried: Carried, within: float) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, (harm, low, high) in (("harm", carried.both), ("power", carried.power), ("constant", carried.constant)):
        columns |= {name: harm, f"{name}_low": low, f"{name}_high": high}
    where: Where = "below" if carried.both.high < within else "above" if carried.both.low > within else "undecided"
    return columns | {
        "exponent": carried.exponent,
        "weight": carried.weight,
        "disagree": carried.disagree,
        "verdict": VERDICTS[where],
    }


def _whole_range(row: Mapping[str, Any]) -> bool:
    """Return whether links have one range for a whole tensor; false for codecs that are not installed."""
    for direction in ("forward", "backward"):
        try:
            compressors = [compressor for *_, compressor in entries(read_setting(direction, row[direction]))]
        except ValueError:
            continue
        if any(entry.codec.whole_range for compressor in compressors for entry in compressor.entries()):
            return True
    return False
