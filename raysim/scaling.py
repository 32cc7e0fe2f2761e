"""Predict a setting's harm at another model size, by laws fitted to its harm at several sizes.

Two laws are averaged, weighted by how well they fit: harm is a power of the size, with one exponent for all settings of a
method, or it does not depend on size. The first has several forms: harm falls to zero, or to a floor, or its sign changes, as
when losses are powers of the size themselves (Charles et al. 2025, 2503.09799). A setting may drift from its law: by a random
walk in the logarithm of the size, and by scatter at each size. Intervals integrate over the exponents, in cells halved as long
as one is too likely, and over a grid of drifts. So they include the uncertainty of the seeds, the law and the distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy import special

Array = np.ndarray[Any, Any]

LEVEL = 0.9
"""Share of true harms inside an interval."""
HOLD = 0.8
"""Share of held-out harms inside their intervals from which predictions over a distance count as holding."""
FEWEST = 3
"""Sizes that a law needs."""
_EXPONENTS = (-1, 1, 40)  # bounds, and cells before any is halved
_OTHERS = (-2, 2, 8)  # exponents of further quantities, such as the number of cuts
_MOST = 0.1  # chance of a cell, given that size matters or that it does not, above which all are halved
_LEAST = 1e-6  # and below which it is left out
_FORMS = {"flat": 0.5, "power": 0.25, "floor": 0.125, "losses": 0.125}  # and their chances before any run is seen
_FLOORS = (0.25, 0.5)  # harm of an infinite size, as a share of that of the smallest
_DRIFTS = (0.01, 1, 10)  # a unit of log size, in units of harm: bounds, and cells of their logarithm
_SCATTERS = (0.01, 0.5, 6)  # at each size
_RELATIVE = (0.0, 1.0)  # drift is alike for all settings of a method, or in proportion to their harm


class Series(NamedTuple):
    """Harm of one setting at several sizes."""

    points: Array
    """(sizes, quantities): logarithms of the number of parameters and of any further quantities."""
    harms: Array
    errors: Array
    """Standard errors of the harms."""

    def where(self, chosen: Array) -> Series:
        """Return the harms at some of the sizes."""
        return Series(self.points[chosen], self.harms[chosen], self.errors[chosen])


class Interval(NamedTuple):
    """A predicted harm with the bounds of `LEVEL`."""

    harm: float
    low: float
    high: float

    def holds(self, harm: float) -> bool:
        """Return whether a harm lies inside."""
        return self.low <= harm <= self.high


class Carried(NamedTuple):
    """The harm of a setting at another size: the average of both laws, and each law alone."""

    both: Interval
    power: Interval
    constant: Interval
    exponent: float
    """Mean exponent of the size, if harm falls to zero: harm goes as size to its negative."""
    weight: float
    """Chance that size matters."""

    @property
    def disagree(self) -> bool:
        """True if the interval of one law misses the estimate of the other."""
        return not (self.power.holds(self.constant.harm) and self.constant.holds(self.power.harm))


class Laws:
    """The laws of the settings of one method, whose harms share an exponent and the spread of their drift.

    `margin`: the tolerated harm, which sets the scale of drifts of small harms. The first quantity of `points` is the size.
    """

    def __init__(self, settings: Sequence[Series], margin: float) -> None:
        self._settings = settings
        points = np.concatenate([each.points for each in settings])
        self._origin = points[np.lexsort(points.T[::-1])[0]]  # where drifts begin: at the smallest size
        drifts, scatters = (
            np.exp(_centres(math.log(low), math.log(high), cells)) for low, high, cells in (_DRIFTS, _SCATTERS)
        )
        grid = np.array(list(product(drifts, scatters, _RELATIVE)))
        sizes = np.array([math.hypot(margin, float(np.mean(each.harms))) for each in settings])
        typical = float(np.exp(np.log(sizes).mean()))
        scales = typical * (sizes[:, None] / typical) ** grid[:, 2]
        self._drifts, self._scatters = ((scales * grid[:, i]) ** 2 for i in (0, 1))  # variances, by setting
        self._curves = _coarse(points.shape[1] - 1)
        while not self._weigh():
            pass

    def _weigh(self) -> bool:
        """Fit all laws and weigh them; return whether the cells of their exponents were fine enough, else halve them."""
        curves = self._curves
        self._fits = [self._fit(i) for i in range(len(self._settings))]
        evidence = sum(fit.evidence for fit in self._fits) + np.log(curves.prior)
        weights = np.exp(evidence - evidence.max())
        self._weights = weights / weights.sum()
        chances, flat = self._weights.sum(axis=0), curves.forms == "flat"
        chances /= np.where(flat, chances[flat].sum(), chances[~flat].sum())
        coarse = (chances > _MOST) & (curves.widths > 0).any(axis=1)
        halved = (chances > _LEAST) & np.where(flat, coarse[flat].any(), coarse[~flat].any())
        if coarse.any():
            self._curves = curves.refined(chances > _LEAST, halved)
        return not coarse.any()

    def _fit(self, i: int) -> _Fit:
        points, harms, errors = self._settings[i]
        walk = _walk(points - self._origin, points - self._origin)
        covariance = self._drifts[i][:, None, None] * walk
        covariance = covariance + np.eye(len(harms)) * (self._scatters[i][:, None, None] + errors**2)
        inverse = np.linalg.inv(covariance)
        shape = self._curves.at(points - self._origin)
        solved = np.einsum("gij,bj->gbi", inverse, shape)
        information = np.einsum("gbi,bi->gb", solved, shape)
        level = solved @ harms / information
        rest = np.einsum("i,gij,j->g", harms, inverse, harms)[:, None] - level**2 * information
        evidence = -0.5 * (
            np.linalg.slogdet(covariance)[1][:, None] + np.log(information / (shape**2).sum(axis=1)) + rest
        )
        return _Fit(inverse, shape, information, level, evidence)

    def _moments(self, i: int, point: Array) -> tuple[Array, Array]:
        """Return the mean and the variance of a setting's harm at a point, by grid point and law."""
        points, harms, _ = self._settings[i]
        fit, beyond = self._fits[i], (point - self._origin)[None]
        shape = self._curves.at(beyond)[:, 0]
        shared = self._drifts[i][:, None] * _walk(points - self._origin, beyond)[:, 0]
        solved = np.einsum("gi,gij->gj", shared, fit.inverse)
        change = shape - solved @ fit.shape.T
        mean = (solved @ harms)[:, None] + fit.level * change
        own = self._drifts[i] * _walk(beyond, beyond)[0, 0] + self._scatters[i] - (solved * shared).sum(axis=1)
        return mean, own[:, None] + change**2 / fit.information

    def at(self, i: int, point: Array) -> Carried:
        """Return the harm of setting `i` at a point."""
        mean, variance = self._moments(i, point)
        flat, power = (self._curves.forms == name for name in ("flat", "power"))
        both, curved, constant = (_interval(mean, variance, self._weights * mask) for mask in (1.0, ~flat, flat))
        exponents = self._weights[:, power].sum(axis=0)
        exponent = float(exponents @ self._curves.exponents[power, 0] / max(exponents.sum(), 1e-300))
        return Carried(both, curved, constant, exponent, float(self._weights[:, ~flat].sum()))

    def chance_below(self, i: int, point: Array, harm: float, error: float) -> float:
        """Return the chance that a measurement of setting `i` at a point, with standard error `error`, is below `harm`."""
        mean, variance = self._moments(i, point)
        return float((self._weights * special.ndtr((harm - mean) / np.sqrt(variance + error**2))).sum())


@dataclass(frozen=True, eq=False)
class _Curves:
    """Candidate laws, one for each form and cell of exponents: harm divided by the harm at the origin."""

    forms: Array
    floors: Array
    exponents: Array
    """(laws, quantities): the centres of the cells."""
    widths: Array
    """(laws, quantities): of the cells; 0 for an exponent that is no part of a law."""
    prior: Array

    def at(self, points: Array) -> Array:
        """Return the harm of each law at `points`, logarithms relative to the origin: shape (laws, points)."""
        size, floors = points[:, 0], self.floors[:, None]
        slopes = self.exponents[:, :1] * size
        curve = np.where(self.forms[:, None] == "losses", 1 - slopes, floors + (1 - floors) * np.exp(-slopes))
        return np.asarray(curve * np.exp(-self.exponents[:, 1:] @ points[:, 1:].T))

    def refined(self, kept: Array, halved: Array) -> _Curves:
        """Return the kept laws, with some cells halved along each exponent."""
        cells = [self._rows(kept & ~halved)]
        for signs in product((-1, 1), repeat=self.exponents.shape[1]):
            half = self._rows(halved)
            single = (half.widths > 0) | (np.array(signs) > 0)  # one cell of no width, not two
            share = 2.0 ** (half.widths > 0).sum(axis=1)
            moved = half.exponents + np.array(signs) * half.widths / 4
            part = replace(half, exponents=moved, widths=half.widths / 2, prior=half.prior / share)
            cells.append(part._rows(np.asarray(single.all(axis=1))))
        return _Curves(*(np.concatenate([getattr(cell, each.name) for cell in cells]) for each in fields(self)))

    def _rows(self, chosen: Array) -> _Curves:
        return _Curves(*(getattr(self, each.name)[chosen] for each in fields(self)))


def _coarse(others: int) -> _Curves:
    """Return the laws before any cell is halved, for a number of quantities besides size."""
    floors = {"flat": [0.0], "power": [0.0], "floor": _FLOORS, "losses": [0.0]}
    rows = [
        (form, floor, (own, *rest))
        for form in _FORMS
        for floor in floors[form]
        for own in ([0.0] if form == "flat" else _centres(*_EXPONENTS))
        for rest in product(_centres(*_OTHERS), repeat=others)
    ]
    forms, own_floors, exponents = (np.array([row[i] for row in rows]) for i in range(3))
    widths = np.tile([(high - low) / cells for low, high, cells in (_EXPONENTS, *[_OTHERS] * others)], (len(rows), 1))
    widths[forms == "flat", 0] = 0.0
    prior = np.array([_FORMS[form] / np.sum(forms == form) for form in forms])
    return _Curves(forms, own_floors, exponents, widths, prior)


def _centres(low: float, high: float, cells: int) -> Array:
    """Return the centres of equal cells."""
    edges = np.linspace(low, high, cells + 1)
    return np.asarray((edges[1:] + edges[:-1]) / 2)


class _Fit(NamedTuple):
    """A setting's fits by grid point and law."""

    inverse: Array
    shape: Array
    information: Array
    level: Array
    evidence: Array


def _walk(one: Array, other: Array) -> Array:
    """Return the covariance of random walks from the origin between two lists of points."""
    a, b = one[:, None, :], other[None, :, :]
    return np.asarray(np.where(a * b > 0, np.minimum(np.abs(a), np.abs(b)), 0.0).sum(axis=2))


def _interval(mean: Array, variance: Array, weights: Array) -> Interval:
    """Return the median and the bounds of a mixture of normal distributions."""
    kept = weights > 1e-5 * weights.max()
    centre, spread, share = mean[kept], np.sqrt(variance[kept]), weights[kept] / weights[kept].sum()

    def quantile(probability: float) -> float:
        low, high = float((centre - 9 * spread).min()), float((centre + 9 * spread).max())
        for _ in range(60):
            middle = (low + high) / 2
            below = float((share * special.ndtr((middle - centre) / spread)).sum()) < probability
            low, high = (middle, high) if below else (low, middle)
        return (low + high) / 2

    return Interval(*map(quantile, (0.5, (1 - LEVEL) / 2, (1 + LEVEL) / 2)))


class HeldOut(NamedTuple):
    """A measured harm, predicted only from smaller sizes."""

    setting: int
    distance: float
    """From the largest of these sizes, in the logarithm of the quantity."""
    chance: float
    """The predicted chance of a lower harm."""

    @property
    def holds(self) -> bool:
        """True if the harm lies inside its interval."""
        return (1 - LEVEL) / 2 <= self.chance <= (1 + LEVEL) / 2


def held_out(settings: Sequence[Series], margin: float, quantity: int = 0) -> Iterator[HeldOut]:
    """Yield held-out predictions: each harm from smaller values of a quantity.

    Predictions use the three smallest values, then four, and so on; if there are only three values, the two smallest.
    """
    values = np.unique(np.concatenate([each.points[:, quantity] for each in settings]))
    for end in values[min(FEWEST, len(values) - 1) - 1 : -1]:
        inside = [each.where(each.points[:, quantity] <= end) for each in settings]
        usable = [i for i, each in enumerate(inside) if len(np.unique(each.points[:, quantity])) > 1]
        if not usable:
            continue
        laws = Laws([inside[i] for i in usable], margin)
        for number, i in enumerate(usable):
            for point, harm, error in zip(*settings[i], strict=True):
                if point[quantity] > end:
                    chance = laws.chance_below(number, point, float(harm), float(error))
                    yield HeldOut(i, float(point[quantity] - end), chance)


def reach(predictions: Sequence[HeldOut]) -> float:
    """Return the longest distance up to which a share `HOLD` of held-out predictions hold; 0 if there is none."""
    ordered = sorted(predictions, key=lambda each: each.distance)
    longest, held = 0.0, 0
    for count, each in enumerate(ordered, 1):
        held += each.holds
        last = count == len(ordered) or ordered[count].distance > each.distance + 1e-9
        if last and held >= HOLD * count:
            longest = each.distance
    return longest
