"""The budget of a race: seconds of a sweep, GPU hours, or money."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from raysim.config import ConfigError

HOUR_S = 3600.0
UNITS_S = {"s": 1.0, "min": 60.0, "h": HOUR_S, "d": 24 * HOUR_S}
_AMOUNT = re.compile(r"(?P<sign>[$€£]?)\s*(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z ]*)")
_NAMES = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "minute", "minutes"), "min"),
    **dict.fromkeys(("h", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "d"),
}
_EXAMPLES = "a time such as 90min or 3h, GPU hours such as '2 GPU hours', or money such as '40 EUR'"


@dataclass(frozen=True)
class Budget:
    """The limit of a race, in seconds of the sweep from its start or of its GPUs."""

    text: str
    """As given."""
    seconds: float
    of_gpus: bool = False

    @classmethod
    def parse(cls, given: str | float, price_per_hour: float | None = None) -> Budget:
        """Parse a budget given as text or as a number of seconds; raises ConfigError.

        `price_per_hour`: the hourly cost of all machines of the sweep together, which converts money to seconds.

        >>> Budget.parse("90min").seconds, Budget.parse("2 GPU hours").of_gpus, Budget.parse("40 EUR", 20.0).seconds
        (5400.0, True, 7200.0)
        """
        text = f"{given:g}" if isinstance(given, (int, float)) else given.strip()
        match = _AMOUNT.fullmatch(text)
        if match is None or float(match["amount"]) <= 0:
            raise ConfigError(f"`budget` must be {_EXAMPLES}, but got {given!r}.")
        amount, unit = float(match["amount"]), match["unit"].strip()
        gpus = unit.lower().startswith("gpu")
        if match["sign"] or (re.fullmatch("[A-Z]{3}", unit) and not gpus):
            if price_per_hour is None:
                raise ConfigError(
                    f"`budget` = {text!r} is money: add `--price-per-hour`, of all machines of the sweep together."
                )
            return cls(text, amount / price_per_hour * HOUR_S)
        if price_per_hour is not None:
            raise ConfigError(f"`price_per_hour` is for a `budget` in money, but `budget` is {text!r}.")
        name = _NAMES.get(unit.lower().removeprefix("gpu").strip())
        if name is None or (gpus and not unit[3:].strip()):
            raise ConfigError(f"`budget` must be {_EXAMPLES}, but got {given!r}.")
        return cls(text, amount * UNITS_S[name], gpus)


def duration(seconds: float, more: int = 0) -> str:
    """Format a duration in seconds, minutes or hours, to about two digits, or `more`.

    >>> duration(42.4), duration(129), duration(600), duration(9000)
    ('42 s', '2.1 min', '10 min', '2.5 h')
    """
    if seconds < 99.5:
        return f"{seconds:.{more}f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.{(1 if seconds < 9.95 * 60 else 0) + more}f} min"
    return f"{seconds / 3600:.{1 + more}f} h"


class Spending:
    """The spent part of a budget in run-seconds: runs that train in parallel all count.

    `jobs` runs train in parallel, on `gpus` GPUs each. `before_s`: seconds of earlier sessions. Raises ConfigError for GPU
    hours without GPUs.
    """

    def __init__(self, budget: Budget, *, jobs: int, gpus: float, before_s: float = 0.0) -> None:
        if budget.of_gpus and not gpus:
            raise ConfigError(
                f"`budget` = {budget.text!r} needs GPUs, but these trials train on CPUs: give hours, such as 3h."
            )
        self.budget = budget
        self._jobs, self.gpus = jobs, gpus
        self._before_s, self._began_s = before_s, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds of the race, over all sessions."""
        return self._before_s + time.monotonic() - self._began_s

    @property
    def total_s(self) -> float:
        """The budget in run-seconds."""
        return self.budget.seconds / self.gpus if self.budget.of_gpus else self.budget.seconds * self._jobs

    def remaining_s(self, trained_s: float) -> float:
        """Return the remaining run-seconds after `trained_s` seconds of training."""
        return self.total_s - (trained_s if self.budget.of_gpus else self.elapsed_s * self._jobs)

    def elapsing_s(self, runs_s: float) -> float:
        """Convert run-seconds to seconds of the sweep."""
        return runs_s / self._jobs
