"""Objectives and constraints of a study: figures of its runs, priced on networks, and bounds on them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from raysim.analysis.data.folders import network_and_transport
from raysim.config import ConfigError
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.topology import Network
from raysim.network.transport import TRANSPORTS, parse_transport
from raysim.quality import MEASURES, Measure

if TYPE_CHECKING:
    from raysim.analysis import Replay, Target
    from raysim.records import Run

PRICED = ("step_s", "time_to_target_s")
DIRECTIONS = ("minimize", "maximize")
KNOWN = (*(f"{name}_on" for name in MEASURES), "wire_bytes", *(f"{name}@NETWORK" for name in PRICED))


class Pricing(TypedDict):
    """The compute seconds behind prices, as arguments of `replay`: a clock of the recording, or a profile."""

    compute: str
    profile: Profile | None


class Figure(NamedTuple):
    """An objective of one trial: the mean over its seeds (null if a seed has none) and the standard deviation over them.

    For a price, `low` and `high` are the ends of its 90 % interval. For a step, `speedup` is the dense step's time over its own,
    with the ends of the interval; it is known once the study's prices are settled.
    """

    value: float | None
    spread: float | None = None
    reached: bool | None = None
    """Whether a time to a target reached it."""
    low: float | None = None
    high: float | None = None
    speedup: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Objective:
    """A figure by name: a measure of the last evaluation, the wire bytes, or a price on a network such as `step_s@100mbps`.

    A price may name its transport after the network, `step_s@100mbps/nccl`; the default is Ray.

    `_on` and `_off` say whether compression is on in the evaluation. A metric of your own needs a `direction`. `target`
    ("accuracy=0.9") and `mode` ("on" or "off": compression in the evaluation) are for times to a target. Raises ConfigError.

    >>> Objective("accuracy_on").direction, Objective("step_s@100mbps/nccl").network, Objective("step_s@100mbps").transport
    ('maximize', 100mbps, 'ray')
    """

    name: str
    direction: str = ""
    target: str | None = None
    mode: str = "on"

    def __post_init__(self) -> None:
        base = self._evaluated
        unknown = f"Unknown objective `{self.name}`. Known: {', '.join(KNOWN)}, the same with _off"
        if base is not None and base not in MEASURES and not self.direction:
            raise ConfigError(f"{unknown}; for a metric of your own, give a `direction`.")
        if base is None and self.name != "wire_bytes" and not (self.kind in PRICED and "@" in self.name):
            raise ConfigError(f"{unknown}.")
        if not self.direction:
            higher = base is not None and MEASURES[base].higher
            object.__setattr__(self, "direction", "maximize" if higher else "minimize")
        if self.direction not in DIRECTIONS:
            raise ConfigError(
                f"`objectives.direction` must be one of {', '.join(DIRECTIONS)}, but got {self.direction!r}."
            )
        if self.mode not in ("on", "off"):
            raise ConfigError(f"`objectives.mode` must be on or off, but got {self.mode!r}.")
        if self.kind != "time_to_target_s":
            if self.target is not None:
                raise ConfigError(f"`objectives.target` is only for time_to_target_s, but {self.name} has it.")
        elif self.target is None:
            raise ConfigError(f"`objectives.target` must be given for {self.name}, as in 'accuracy=0.9'.")
        try:
            _ = self.network, self.goal
        except ValueError as error:
            raise ConfigError(f"`objectives`: {self.name}: {error}") from None

    @property
    def kind(self) -> str:
        """The name without its network."""
        return self.name.partition("@")[0]

    @property
    def _evaluated(self) -> str | None:
        """The measure of evaluations in the name, if there is one."""
        base, _, mode = self.name.rpartition("_")
        return base if base.isidentifier() and mode in ("on", "off") else None

    @property
    def measure(self) -> Measure | None:
        """The measure of the last evaluation, with compression on or off; None for other objectives."""
        base = self._evaluated
        return None if base is None else MEASURES.get(base) or Measure(base, higher=not self.minimize)

    @property
    def quality(self) -> Measure | None:
        """The measure of quality with compression on, by which settings are compared with dense; None for other objectives."""
        return None if self.name.endswith("_off") else self.measure

    @property
    def evaluates(self) -> bool:
        """True if the objective is a measure of the last evaluation."""
        return self._evaluated is not None

    @cached_property
    def network(self) -> Network | None:
        """The network of a price; raises ValueError if the name has none."""
        if self.kind not in PRICED:
            return None
        network = network_and_transport(self.name)[0]
        where, _, transport = network.rpartition("/")
        if where and "." not in transport:  # not a file
            parse_transport(transport)
        return parse_network(network)

    @property
    def transport(self) -> str | None:
        return network_and_transport(self.name)[1] if self.kind in PRICED else None

    @cached_property
    def goal(self) -> Target | None:
        """The parsed `target`; raises ValueError."""
        if self.target is None:
            return None
        from raysim.analysis import Target

        return Target.parse(self.target)

    def over(self, transport: str) -> Objective:
        """Return the objective priced over a transport; unchanged if it names a transport or is not a price."""
        named = self.name.rpartition("/")[2] in TRANSPORTS
        return self if self.transport in (None, transport) or named else replace(self, name=f"{self.name}/{transport}")

    @property
    def minimize(self) -> bool:
        return self.direction == "minimize"


def figures(
    objectives: Sequence[Objective],
    runs: Sequence[Run],
    replays: Callable[[str], Sequence[tuple[Replay, Replay | None]]],
) -> dict[str, Figure]:
    """Return every objective of a trial from the runs of its seeds; raises analysis.ReplayError if one cannot be priced.

    `replays` returns each run priced over a transport, pooled with the runs of its job, and the dense run to compare it with; it is
    called for the transports of prices only.
    """
    replays = cache(replays)
    return {
        each.name: _measured(each, runs) if each.transport is None else _price(each, replays(each.transport))
        for each in objectives
    }


def any_priced(objectives: Sequence[Objective]) -> bool:
    """Return whether any objective is a price."""
    return any(objective.transport is not None for objective in objectives)


def cost_among(objectives: Sequence[Objective]) -> Objective | None:
    """Return the objective that orders settings of equal quality: the first price, or else the bytes; None without either.

    >>> cost_among([Objective("loss_on"), Objective("wire_bytes"), Objective("step_s@1gbps")]).name
    'step_s@1gbps'
    """
    costs = [each for each in objectives if not each.evaluates]
    return next((each for each in costs if each.network is not None), next(iter(costs), None))


def _measured(objective: Objective, runs: Sequence[Run]) -> Figure:
    """Return the mean of a recorded figure over a trial's runs; missing if a run lacks it."""
    column = "wire_bytes" if objective.kind == "wire_bytes" else f"final_{objective.kind}"
    values = [run.row.get(column) for run in runs]
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(runs):
        return Figure(None)
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def _price(objective: Objective, replays: Sequence[tuple[Replay, Replay | None]]) -> Figure:
    """Return the mean price over a trial's runs; missing if one of them did not reach the target."""
    from raysim.analysis.runs.estimates import Estimate

    assert objective.network is not None
    prices, dense_s, speedups = [], [], []
    for replay, other in replays:
        (step,) = replay.step_s([objective.network])
        count = 1
        if objective.goal is not None:
            reached = replay.steps_to_target(objective.goal)[objective.mode]
            if reached is None:
                return Figure(None, reached=False)
            count = reached
        prices.append([count * end for end in step])
        if other is not None and objective.goal is None:
            dense_s.append(other.step_s([objective.network])[0].value)
            speedups += replay.speedup(other, [objective.network])
    value, low, high = (statistics.fmean(ends) for ends in zip(*prices, strict=True))
    speedup = None
    if speedups and len(speedups) == len(replays):
        mean = Estimate(*(statistics.fmean(ends) for ends in zip(*speedups, strict=True)))
        speedup = mean.at(statistics.fmean(dense_s) / value)
    spread = statistics.stdev(price[0] for price in prices) if len(prices) > 1 else None
    return Figure(value, spread, True if objective.goal is not None else None, low, high, speedup)


@dataclass(frozen=True)
class Constraint:
    """A bound on an objective: `at_most` or `at_least` a number, or `within` hundredths of a baseline's (`of`).

    `within = 0.01, of = "dense"`: worse than the trial named dense by at most one point of an accuracy, or 1 % of another objective:
    the units of harm, see `raysim.quality.Measure`.
    """

    objective: str
    at_most: float | None = None
    at_least: float | None = None
    within: float | None = None
    of: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("at_most", "at_least", "within") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"`constraints` of {self.objective} must have exactly one of at_most, at_least and within, but got "
                f"{' and '.join(given) or 'none'}."
            )
        value = getattr(self, given[0])
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"`constraints.{given[0]}` must be a number, but got {value!r}.")
        if (self.within is None) != (self.of is None):
            raise ConfigError("`constraints.within` and `constraints.of`, the name of a baseline, belong together.")

    @property
    def name(self) -> str:
        """Text in the rows, such as "loss_on within 0.01 of dense"."""
        if self.within is not None:
            return f"{self.objective} within {self.within:g} of {self.of}"
        return f"{self.objective} {'<=' if self.at_most is not None else '>='} {self._bound:g}"

    @property
    def _bound(self) -> float:
        bound = self.at_most if self.at_most is not None else self.at_least
        assert bound is not None
        return float(bound)

    def value(self, objective: Objective, figure: float, reference: float | None) -> float:
        """Return the amount of violation; the constraint holds if it is 0 or less."""
        if self.within is None:
            return figure - self._bound if self.at_most is not None else self._bound - figure
        assert reference is not None
        slack = self.within * (1.0 if objective.measure is not None and objective.measure.points else abs(reference))
        return figure - reference - slack if objective.minimize else reference - slack - figure


def as_mapping(part: Any) -> dict[str, Any]:
    """Return the fields set on an objective, constraint or baseline, as in a study's file."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value for name, value in values.items() if value is not None and (name, value) != ("mode", "on")}
