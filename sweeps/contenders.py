"""The settings of a decision, and which of them are worth a place in its race."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.network.costs import Expected
from raysim.quality import MEASURES
from raysim.screening.screen import Screened, words
from raysim.screening.verdicts import HOPELESS, NO_GAIN

SET_ASIDE = "set aside"
MOST = 6
"""Most screened settings in a race: each more takes from the seeds of the others."""


@dataclass
class Candidate:
    """A setting, and the results of each part of a decision."""

    setting: Setting
    speedup: float | None = None
    """As priced; at most this, if its own price could not matter."""
    step_s: float | None = None
    expected: Expected | None = None
    """The step with churn and money as priced before the screen, if costs are given."""
    difference: float | None = None
    """Of the loss at once from dense's, on the model's own weights."""
    error: float | None = None
    """Of the gradient at once, relative to dense's, of the stage where it is largest."""
    harm: str = ""
    """After training, in words with bounds."""
    faster: str = ""
    """The speed-up after training, with bounds."""
    outcome: str = ""
    """What ruled it out before training; empty for a setting to be trained."""
    reason: str = ""
    verdict: str = ""
    """After training: safe, harmful or undecided, or why the race left it."""

    @property
    def open(self) -> bool:
        """True if nothing has ruled it out before training."""
        return not self.outcome

    @property
    def screened(self) -> Setting:
        """The setting that a screen measures: dense if only training can judge it, by local steps or sums of tied parameters."""
        method = self.setting.replica_gradient
        averaged = IDENTITY if method.startswith("DiLoCo") else method
        return self.setting._replace(replica_gradient=averaged, tied_gradient=IDENTITY)

    def take(self, found: Screened, network: str) -> None:
        """Store the results of a screen."""
        loss, price = found.result.measures.get("loss"), found.prices.get(network)
        if loss is not None:
            self.difference = loss.difference
            self.error = max((each.error for each in found.result.directions), default=None)
        whole = found.setting == self.setting
        if price is not None and whole:
            self.speedup, self.step_s = price.speedup, price.step_s
        if found.verdict == HOPELESS or (found.verdict == NO_GAIN and whole):
            self.outcome, self.reason = found.verdict, found.reason

    def as_mapping(self) -> dict[str, Any]:
        """Return the candidate for JSON."""
        values = asdict(self) | {"expected": self.expected and self.expected._asdict()}
        del values["setting"]
        return {**self.setting.methods(), **values}


def nested(values: Any) -> Any:
    """Return a candidate's mapping with its setting as one value, which pydantic reads."""
    if not isinstance(values, dict):
        return values
    rest = {name: value for name, value in values.items() if name not in Setting._fields}
    return {**rest, "setting": {name: values[name] for name in Setting._fields if name in values}}


def choose(candidates: Sequence[Candidate], *, by_loss: bool, kept: Sequence[Setting] = ()) -> None:
    """Rule out screened candidates that another one beats in both speed and harm, and candidates beyond `MOST`.

    Harm is the error of the gradient, and with `by_loss` (the model is well below chance) also the loss. Settings in `kept` stay.
    """
    rivals = [each for each in candidates if each.open and each.error is not None and each.speedup is not None]
    front: list[Candidate] = []
    for each in sorted(rivals, key=lambda each: (-(each.speedup or 0.0), _harms(each, by_loss))):
        mine = _harms(each, by_loss)
        better = (rival for rival in front if all(map(operator.le, _harms(rival, by_loss), mine)))
        if (best := next(better, None)) is None:
            front.append(each)
        elif each.setting not in kept:
            each.outcome, each.reason = (
                SET_ASIDE,
                f"{_differing(best.setting, each.setting)} is faster and does less harm at once",
            )
    if len(front) > MOST:
        places = {round(i * (len(front) - 1) / (MOST - 1)) for i in range(MOST)}
        for i, each in enumerate(front):
            if i not in places and each.setting not in kept:
                each.outcome, each.reason = SET_ASIDE, "others race that are a little faster, and do a little less harm"


def by_promise(candidates: Sequence[Candidate], dense_loss: float) -> list[Candidate]:
    """Sort candidates by price, fastest first; those whose screened loss is beyond the margin come last."""
    loss = MEASURES["loss"]

    def key(each: Candidate) -> tuple[bool, float]:
        harm = loss.harm(dense_loss + (each.difference or 0.0), dense_loss)
        return harm > loss.margin, -(each.speedup or 0.0)

    return sorted(candidates, key=key)


def fastest_pair(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest setting of links together with the fastest method of replicas, which may gain more than either."""
    links = [each for each in candidates if each.setting.replica_gradient == IDENTITY]
    methods = [each for each in candidates if each.setting.replica_gradient != IDENTITY]
    if not links or not methods:
        return []
    best, method = (max(some, key=lambda each: each.speedup or 0.0) for some in (links, methods))
    return [Candidate(best.setting._replace(replica_gradient=method.setting.replica_gradient))]


def _differing(setting: Setting, other: Setting) -> str:
    """Return a setting in words, without its methods of replicas and tied parameters if `other` has the same ones."""
    links = Setting(setting.forward, setting.backward)
    shared = other._replace(forward=links.forward, backward=links.backward) == setting
    return words(links if shared and links != DENSE else setting)


def _harms(candidate: Candidate, by_loss: bool) -> tuple[float, ...]:
    error, difference = candidate.error, candidate.difference
    assert error is not None
    assert difference is not None
    return (error, max(difference, 0.0)) if by_loss else (error,)
