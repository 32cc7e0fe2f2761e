"""Known harm of settings: the verdicts of raysim's own findings, each on one small model and one data set."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import NamedTuple

from raysim.advice.job import SAME, Way


class Verdict(NamedTuple):
    """The verdict of one study on one setting; harm in `unit`, with its bounds."""

    study: str
    job: str
    forward: str
    backward: str
    replica_gradient: str
    seeds: int
    harm: float
    low: float | None
    high: float | None
    unit: str
    verdict: str

    def __str__(self) -> str:
        """Return the verdict in words."""
        bounds = "" if self.low is None or self.high is None else f" ({self.low:+.2g} to {self.high:+.2g})"
        return (
            f"{self.verdict}: harm {self.harm:+.2g}{bounds} {self.unit}, {self.job}, {self.seeds} seeds ({self.study})"
        )


@cache
def verdicts() -> tuple[Verdict, ...]:
    """Return all verdicts, as `make findings` writes them."""
    text = resources.files("raysim.advice").joinpath("evidence.json").read_text(encoding="utf-8")
    return tuple(Verdict(**row) for row in json.loads(text))


def known(way: Way) -> tuple[Verdict, ...]:
    """Return the verdicts on a way's setting; if there are none, those on its links and on its replica method alone."""
    whole = (way.forward, way.backward, way.method)
    parts = [(way.forward, way.backward, SAME), (SAME, SAME, way.method)]
    for wanted in ([whole], parts):
        found = tuple(each for each in verdicts() if each[2:5] in wanted and each[2:5] != (SAME, SAME, SAME))
        if found:
            return found
    return ()


def known_word(way: Way) -> str:
    """Return what is known in a word or two: the worst verdict that a study reached."""
    if way.dense:
        return ""
    found = [each.verdict for each in known(way)]
    return next((word for word in ("harmful", "undecided", "safe") if word in found), "untried")
