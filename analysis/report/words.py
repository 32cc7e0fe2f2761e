"""Numbers for a person to read."""

from __future__ import annotations

import math

from raysim.network.memory import format_bytes


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
    """Return a difference with its sign, as it is written: a true minus."""
    if value is None or math.isnan(value):
        return "none"
    text = f"{abs(value):.2g}" if abs(value) < 9.95 else f"{abs(value):.0f}"
    return f"−{text}" if value < 0 else text
