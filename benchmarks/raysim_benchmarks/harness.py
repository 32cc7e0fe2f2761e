"""Harness of all benchmarks: sides measured in turn, their ratios, and the ratios' intervals.

Each turn measures every side once, in reversed order every other time, so that other work on the machine affects all sides alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from rich.table import Table

from raysim.cli.terminal import console
from raysim.console import PlainConsole
from raysim.units import format_seconds

T = TypeVar("T")

LEVEL = 0.95  # coverage of a median's interval, given enough measurements


class FailedError(RuntimeError):
    """A measured run or process failed."""


class MedianInterval(NamedTuple):
    """A median, the order statistics around it, and the probability that the true median lies between them."""

    median: float
    low: float
    high: float
    coverage: float
    """Actual coverage: less than 95 % with fewer than six measurements."""

    def __str__(self) -> str:
        """Return the interval with its coverage.

        >>> str(MedianInterval(1.0, 0.97, 1.1, 0.75))
        '0.970 to 1.100 (75 %)'
        """
        return f"{self.low:.3f} to {self.high:.3f} ({100 * self.coverage:.0f} %)"

    def figures(self, name: str = "ratio") -> dict[str, float]:
        """Return the figures by name: `ratio`, `ratio_low`, `ratio_high` and `ratio_coverage`."""
        return {name: self.median} | {f"{name}_{key}": getattr(self, key) for key in ("low", "high", "coverage")}


def median_interval(values: Sequence[float]) -> MedianInterval:
    """Return the median and its narrowest distribution-free interval of at least 95 % between order statistics.

    With fewer than six values the interval spans the least to the greatest.

    >>> median_interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
    MedianInterval(median=5, low=2, high=8, coverage=0.9609375)
    >>> [median_interval(range(count)).coverage for count in (2, 3, 5, 6)]
    [0.5, 0.75, 0.9375, 0.96875]
    """
    ordered, count = sorted(values), len(values)
    tails = [sum(math.comb(count, below) for below in range(cut + 1)) / 2**count for cut in range((count + 1) // 2)]
    cut = max((i for i, tail in enumerate(tails) if 1 - 2 * tail >= LEVEL), default=0)
    return MedianInterval(
        statistics.median(ordered), ordered[cut], ordered[count - 1 - cut], max(0.0, 1 - 2 * tails[cut])
    )


def in_turn(sides: Sequence[T], turn: int) -> Sequence[T]:
    """Return the sides in the order of a turn: reversed every other time."""
    return sides[::-1] if turn % 2 else sides


def alternate(
    sides: Mapping[str, Callable[[], T]], turns: int, *, warm_up: int = 0, progress: str = ""
) -> list[dict[str, T]]:
    """Return the measurements of every side in every turn, after `warm_up` turns that are dropped.

    `progress`: a name under which each turn is printed on the error stream; none is printed if it is empty.

    >>> alternate({"a": lambda: 1.0, "b": lambda: 2.0}, 2)
    [{'a': 1.0, 'b': 2.0}, {'b': 2.0, 'a': 1.0}]
    """
    runs = []
    for turn in range(-warm_up, turns):
        run = {name: sides[name]() for name in in_turn(list(sides), turn)}
        if turn < 0:
            continue
        runs.append(run)
        if progress:
            words = (f"{name} {format_seconds(x) if isinstance(x, float) else x}" for name, x in run.items())
            PlainConsole(stderr=True).print(f"{progress}, turn {turn + 1}: {', '.join(words)}")
    return runs


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call."""
    start = clock()
    result = work()
    seconds = clock() - start
    del result  # freed outside the measured time
    return seconds


class Comparison(NamedTuple):
    """Seconds of two sides in every turn, as a row of a table and of a JSON file."""

    labels: Mapping[str, Any]
    """Names and values that distinguish this comparison from others in a benchmark."""
    base: str
    other: str
    runs: Sequence[Mapping[str, float]]
    """Seconds by turn and name, of both sides and of any parts of them."""

    @property
    def ratio(self) -> MedianInterval:
        """The other side's seconds over the base's, turn by turn."""
        return median_interval([run[self.other] / run[self.base] for run in self.runs])

    def median_s(self, name: str) -> float:
        """Return the median seconds of a side, or of a part."""
        return statistics.median(run[name] for run in self.runs)

    def figures(self) -> dict[str, Any]:
        """Return the labels, all runs, the median seconds of each name, and the ratio with its interval."""
        medians = {f"{name}_s": self.median_s(name) for name in self.runs[0]}
        return {**self.labels, "runs": list(self.runs), **medians, **self.ratio.figures()}


def print_comparisons(title: str, comparisons: Sequence[Comparison]) -> None:
    """Print a row for every comparison: its labels, median seconds, and the ratio with its interval."""
    labels, base, other, runs = comparisons[0]
    names = list(runs[0])
    table = Table(*(label.replace("_", " ") for label in labels), title=title)
    for name in (*names, f"{other} / {base}", "interval (covers)"):
        table.add_column(name, justify="right")
    for comparison in comparisons:
        seconds = (format_seconds(comparison.median_s(name)) for name in names)
        ratio = comparison.ratio
        table.add_row(*map(str, comparison.labels.values()), *seconds, f"{ratio.median:.3f}", str(ratio))
    console().print(table)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
