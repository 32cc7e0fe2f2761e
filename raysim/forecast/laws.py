"""Verdicts carried by laws of size to models that nobody trained with a setting."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, NamedTuple

from raysim.forecast.fleet import Setting
from raysim.units import format_parameters

MARGIN = 1.0  # per cent of the loss


class CarriedHarm(NamedTuple):
    """Harm at a size, in per cent of the loss, with 90 % bounds, by a law through other sizes."""

    harm: float
    low: float
    high: float
    parameters: int
    smallest: int
    largest: int

    @property
    def verdict(self) -> str:
        """Return the verdict by the bounds."""
        return "safe" if self.high < MARGIN else "harmful" if self.low > MARGIN else "undecided"

    def __str__(self) -> str:
        """Return the harm in words.

        >>> str(CarriedHarm(0.9, 0.3, 2.4, 1_300_000_000, 300_000, 5_000_000))
        'by a law from 0.3 M to 5 M: +0.9 % (+0.3 to +2.4) at 1.3 B'
        """
        smallest, largest, asked = map(format_parameters, (self.smallest, self.largest, self.parameters))
        return f"by a law from {smallest} to {largest}: {self.harm:+.1f} % ({self.low:+.1f} to {self.high:+.1f}) at {asked}"


def carried(setting: Setting, kind: str, parameters: int, replicas: int) -> CarriedHarm | None:
    """Return the harm of a setting in training from scratch; None if no law carries it there.

    Harm grows with replicas: between two numbers of them, that of the greater counts.
    """
    laws = [
        law
        for law in _laws()
        if setting == Setting(replica_gradient=law["replica_gradient"])
        and kind == law["kind"]
        and replicas <= law["replicas"]
        and law["curve"][0][0] <= parameters <= law["curve"][-1][0]
    ]
    if not laws or replicas < 2:
        return None
    law = min(laws, key=lambda law: law["replicas"])
    for (size, *lower), (following, *upper) in pairwise(law["curve"]):
        if size <= parameters <= following:
            share = math.log(parameters / size) / math.log(following / size)
            bounds = (low + share * (high - low) for low, high in zip(lower, upper, strict=True))
            return CarriedHarm(*bounds, parameters, law["smallest"], law["largest"])
    return None


@cache
def _laws() -> list[dict[str, Any]]:
    """Return the curves written by `make findings`."""
    text = resources.files("raysim.forecast").joinpath("laws.json").read_text(encoding="utf-8")
    laws: list[dict[str, Any]] = json.loads(text)
    return laws
