"""Numbers for a person to read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from raysim.analysis.comparison.rule import MIN_SEEDS
from raysim.analysis.runs.estimates import Estimate
from raysim.quality import Measure
from raysim.units import format_bytes

if TYPE_CHECKING:
    from raysim.analysis.report.material import SettingRuns


def seconds(value: float) -> str:
    """Return a duration with three digits.

    >>> seconds(0.0456), seconds(12.34), seconds(7200)
    ('45.6 ms', '12.3 s', '2 h')
    """
    if math.isnan(value):
        return "none"
    for limit, unit, size in ((1e-3, "µs", 1e-6), (1.0, "ms", 1e-3), (100.0, "s", 1.0), (3600.0, "min", 60.0)):
        if value < limit * 0.9995:
            return f"{value / size:.3g} {unit}"
    return f"{value / 3600:.3g} h"


def speedup(estimate: Estimate) -> str:
    """Return a speed-up with its interval, and "not distinguishable" if the interval allows either.

    >>> speedup(Estimate(1.31, 1.29, 1.34)), speedup(Estimate(1.01, 0.97, 1.05))
    ('1.31x (1.29 to 1.34)', '1.01x (0.97 to 1.05), not distinguishable')
    """
    alike = "" if estimate.verdict != "not distinguishable" else ", not distinguishable"
    return f"{estimate.value:.2f}x ({estimate.low:.2f} to {estimate.high:.2f}){alike}"


def step_time(estimate: Estimate) -> str:
    """Return a duration with its interval.

    >>> step_time(Estimate(0.0456, 0.0451, 0.0466))
    '45.6 ms (45.1 to 46.6)'
    """
    whole = seconds(estimate.value)
    if math.isnan(estimate.value):
        return whole
    unit = whole.split()[1]
    ends = [seconds(end).split() for end in (estimate.low, estimate.high)]
    low, high = (number if its == unit else f"{number} {its}" for number, its in ends)
    return f"{whole} ({low} to {high})"


def bytes_of(value: float) -> str:
    """Return a size, or that there is none."""
    return "none" if math.isnan(value) else format_bytes(value)


def plural(count: int, noun: str) -> str:
    """Return a count and its noun.

    >>> plural(1, "seed"), plural(1200, "run")
    ('1 seed', '1,200 runs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def points(value: float | None) -> str:
    """Return a difference as it is written: two digits or so, and a true minus.

    >>> points(0.456), points(-4.56), points(45.6)
    ('0.46', '\N{MINUS SIGN}4.6', '46')
    """
    if value is None or math.isnan(value):
        return "none"
    digits = 2 if abs(value) < 0.995 else 1 if abs(value) < 9.95 else 0
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def bandwidth(bps: float) -> str:
    """Return bits a second with three digits."""
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bps >= 0.9995 * size:
            return f"{bps / size:.3g} {unit}"
    return f"{bps:.3g} bit/s"


def against_dense(setting: SettingRuns, measure: Measure) -> str:
    """Return the difference of a setting's quality from dense with compression on, with its interval if it has one."""
    judged = setting.judged
    harm, low, high = (float(judged.get(name, math.nan)) for name in ("harm", "harm_low", "harm_high"))
    if math.isnan(harm):
        return "not compared with dense"
    if measure.higher:  # less of an accuracy is harm, and more of a loss
        harm, low, high = -harm, -high, -low
    name = measure.name.replace("_", " ")
    if float(points(abs(harm))) == 0:
        text = f"same {name} as dense"
    else:
        unit = "points" if measure.points else "%"
        text = f"{name} {points(abs(harm))} {unit} {'higher' if harm > 0 else 'lower'} than dense"
    count = int(judged.get("seeds", 1))
    if count < MIN_SEEDS:  # their interval is as wide as the world
        return f"{text} on {plural(count, 'seed')}"
    return f"{text} ({signed(low)} to {signed(high)})"


def signed(value: float) -> str:
    """Return a difference with its sign.

    >>> signed(0.456), signed(-4.56), signed(0.0)
    ('+0.46', '\N{MINUS SIGN}4.6', '0.00')
    """
    return f"+{points(value)}" if value > 0 else points(value + 0.0)


def listed(values: Iterable[Any]) -> str:
    """Return increasing values as a text, with three or more successive integers as a range.

    >>> listed([0, 1, 2, 5, 6]), listed([])
    ('0 to 2, 5, 6', 'none')
    """
    ranges: list[list[Any]] = []
    for value in values:
        if ranges and isinstance(value, int) and value == ranges[-1][-1] + 1:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    texts = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run) for run in ranges]
    return ", ".join(text for several in texts for text in several) or "none"
