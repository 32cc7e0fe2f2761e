"""Format counts, bytes, seconds and bandwidths for people, with three digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Units = Sequence[tuple[float, str, float]]
"""The least value that is too large for each unit, its name and its size."""
TIMES: Units = (
    (1e-3, "us", 1e-6),
    (1.0, "ms", 1e-3),
    (100.0, "s", 1.0),
    (3600.0, "min", 60.0),
    (86400.0, "h", 3600.0),
    (math.inf, "d", 86400.0),
)
RATES: Units = ((1e3, "bit/s", 1.0), (1e6, "kbit/s", 1e3), (1e9, "Mbit/s", 1e6), (math.inf, "Gbit/s", 1e9))


def unit_of(value: float, units: Units) -> tuple[str, float]:
    """Return the unit for a value and its size; values that round up to a limit have the next unit."""
    return next(((unit, size) for limit, unit, size in units if value < limit * 0.9995), units[-1][1:])


def plural(count: int, noun: str) -> str:
    """Return a count and its noun.

    >>> plural(1, "seed"), plural(1200, "run")
    ('1 seed', '1,200 runs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(size: float, more: int = 0) -> str:
    """Return a size in decimal units with three digits, or `more`.

    >>> format_bytes(999), format_bytes(4_194_304), format_bytes(22_937_600_000)
    ('999 B', '4.19 MB', '22.9 GB')
    """
    if abs(size) < 1000:
        return f"{size:.{more}f} B"
    power = min(int(math.log10(abs(size)) // 3), 5)
    if round(abs(size) / 1000**power, 1) >= 1000:
        power += 1
    return f"{size / 1000**power:.{3 + more}g} {['B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB'][power]}"


def format_seconds(seconds: float, of: float | None = None) -> str:
    """Return a duration with three digits, in a suitable unit, or in the unit of the whole `of` if it is a part of it.

    >>> [format_seconds(s) for s in (0.0000123, 0.0456, 0.9996, 12.34, 119.96, 3725, 400_000)]
    ['12.3 us', '45.6 ms', '1.00 s', '12.3 s', '2.00 min', '1.03 h', '4.63 d']
    >>> [format_seconds(s, of=0.110) for s in (0.0, 0.0000018, 0.0456)]
    ['0 ms', '0.0018 ms', '45.6 ms']
    """
    unit, size = unit_of(seconds if of is None else of, TIMES)
    return f"{three_digits(seconds / size)} {unit}"


def format_bandwidth(bps: float) -> str:
    """Return a bandwidth in bit/s with three digits.

    >>> format_bandwidth(1_128_678_908.6), format_bandwidth(8e4)
    ('1.13 Gbit/s', '80.0 kbit/s')
    """
    unit, size = unit_of(bps, RATES)
    return f"{three_digits(bps / size)} {unit}"


def format_parameters(count: float) -> str:
    """Return a number of parameters in millions or billions.

    >>> format_parameters(43_904), format_parameters(134_515_008), format_parameters(1.3e9)
    ('0.044 M', '135 M', '1.3 B')
    """
    if count >= 0.9995e9:
        return f"{count / 1e9:.3g} B"
    return f"{count / 1e6:{'.2g' if count < 1e7 else ',.0f'}} M"


def decimals(value: float, digits: int, *limits: float, sign: str = "") -> str:
    """Return a number with `digits` decimals, or more if these would put it on another side of one of `limits`.

    `sign`: "+" to write that of a positive number too.

    >>> decimals(1.234, 2, 1.05), decimals(1.0496, 2, 1.05), decimals(1.05, 2, 1.05), decimals(0.9996, 1, 1.0, sign="+")
    ('1.23', '1.0496', '1.05', '+0.9996')
    """
    text = f"{value:{sign}.{digits}f}"
    shown = float(text)
    moved = any((shown < limit, shown > limit) != (value < limit, value > limit) for limit in limits)
    return decimals(value, digits + 1, *limits, sign=sign) if moved else text


def apart(write: Callable[[float, int], str], first: float, second: float, more: int = 0) -> tuple[str, str]:
    """Return two quantities as `write` does, with as many `more` digits as different ones need to look different.

    >>> apart(format_bytes, 80e9, 8e9), apart(format_bytes, 80.04e9, 80e9)
    (('80 GB', '8 GB'), ('80.04 GB', '80 GB'))
    """
    texts = write(first, more), write(second, more)
    return texts if texts[0] != texts[1] or math.isclose(first, second) else apart(write, first, second, more + 1)


def two_digits(value: float, sign: str = "") -> str:
    """Return a number with two digits, or all before the point; `sign`: "+" to write that of a positive number too.

    >>> two_digits(1.234), two_digits(61.4), two_digits(99.7), two_digits(123.4, "+")
    ('1.2', '61', '100', '+123')
    """
    return f"{value:{sign}.2g}" if abs(value) < 99.5 else f"{value:{sign},.0f}"


def three_digits(value: float, more: int = 0) -> str:
    """Return a number with three digits, or `more`, without an exponent.

    >>> three_digits(0.5), three_digits(12345.6)
    ('0.500', '12,346')
    """
    if value == 0:
        return "0"
    digits = max(2 - math.floor(math.log10(abs(value) * 1.0005)), 0)
    return f"{value:,.{min(digits, 4) + more}f}"
