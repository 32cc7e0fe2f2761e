"""Objectives and constraints of a study: figures of its runs, priced on networks, and the bounds that they must keep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from raysim.analysis.data.studies import USUAL_TRANSPORT, network_and_transport
from raysim.config import ConfigError
from raysim.network.presets import parse_network
from raysim.network.topology import Network
from raysim.network.transport import TRANSPORTS, parse_transport
from raysim.quality import MEASURES, Measure

if TYPE_CHECKING:
    from raysim.analysis import Replay, Target
    from raysim.records import Run

PRICED = ("step_s", "time_to_target_s")
DIRECTIONS = ("minimize", "maximize")
KNOWN = (*(f"{name}_on" for name in MEASURES), "wire_bytes", *(f"{name}@NETWORK" for name in PRICED))


class Figure(NamedTuple):
    """An objective of one trial: the mean over its seeds, null where a seed has none, and the standard deviation over them.

    Of a price `low` and `high` are the ends of its 90 % interval. Of a step, `speedup` is how many times as fast as a dense one it
    is, with the ends of its interval; it is known once the study's prices are settled.
    """

    value: float | None
    spread: float | None = None
    reached: bool | None = None  # of a time to a target
    low: float | None = None
    high: float | None = None
    speedup: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Objective:
    """A figure by name: of the last evaluation, of all packets, or of a step on a network, `step_s@100mbps`.

    A price may name its transport after the network, `step_s@100mbps/nccl`; it is Ray by default.

    `_on` and `_off` say whether compression is on in the evaluation. A metric of your own needs a `direction`: it has no other
    here. `target` ("accuracy=0.9") and `mode` ("on" or "off": compression in the evaluation) are of times to a target.

    >>> Objective("accuracy_on").direction, Objective("step_s@100mbps/nccl").network, Objective("step_s@100mbps").transport
    ('maximize', 100mbps, 'ray')
    """

    name: str
    direction: str = ""
    target: str | None = None
    mode: str = "on"

    def __post_init__(self) -> None:
        base = self._evaluated
        if base is not None and base not in MEASURES and not self.direction:
            raise ConfigError(
                f"Unknown objective `{self.name}`. Known: {', '.join(KNOWN)}, the same with _off; one of a metric of your own "
                "needs a `direction`."
            )
        if base is None and self.name != "wire_bytes" and not (self.kind in PRICED and "@" in self.name):
            raise ConfigError(f"Unknown objective `{self.name}`. Known: {', '.join(KNOWN)}, the same with _off.")
        if not self.direction:
            higher = base is not None and MEASURES[base].higher
            object.__setattr__(self, "direction", "maximize" if higher else "minimize")
        if self.direction not in DIRECTIONS:
            raise ConfigError(
                f"`objectives.direction` must be one of {', '.join(DIRECTIONS)}, but got {self.direction!r}."
            )
        if self.mode not in ("on", "off"):
            raise ConfigError(f"`objectives.mode` must be on or off, but got {self.mode!r}.")
        try:
            if self.kind in PRICED:
                network = network_and_transport(self.name)[0]
                where, _, transport = network.rpartition("/")
                if where and "." not in transport:  # no file
                    parse_transport(transport)
                parse_network(network)
        except ValueError as error:
            raise ConfigError(f"`objectives`: {self.name}: {error}") from None
        if self.kind != "time_to_target_s":
            if self.target is not None:
                raise ConfigError(f"`objectives.target` is of time_to_target_s alone, but {self.name} has it.")
        elif self.target is None:
            raise ConfigError(f"`objectives.target` must be given for {self.name}, as in 'accuracy=0.9'.")
        else:
            self._check_target(self.target)

    def _check_target(self, text: str) -> None:
        from raysim.analysis import ReplayError

        try:
            _target(text)
        except ReplayError as error:
            raise ConfigError(f"`objectives`: {self.name}: {error}") from None

    @property
    def kind(self) -> str:
        """The name without its network."""
        return self.name.partition("@")[0]

    @property
    def _evaluated(self) -> str | None:
        """The name of the measure of evaluations that it is, if it is one."""
        base, _, mode = self.name.rpartition("_")
        return base if base.isidentifier() and mode in ("on", "off") else None

    @property
    def quality(self) -> Measure | None:
        """The measure whose value with compression on it is, which says how near a setting comes to dense; None of others."""
        base = self._evaluated
        if base is None or self.name.endswith("_off"):
            return None
        return MEASURES.get(base) or Measure(base, higher=not self.minimize)

    @property
    def evaluates(self) -> bool:
        """True if it is a measure of the last evaluation."""
        return self._evaluated is not None

    @property
    def network(self) -> Network | None:
        """The network on which it is priced."""
        return parse_network(network_and_transport(self.name)[0]) if self.kind in PRICED else None

    @property
    def transport(self) -> str | None:
        """The transport over which it is priced."""
        return network_and_transport(self.name)[1] if self.kind in PRICED else None

    def over(self, transport: str) -> Objective:
        """Return it priced over a transport, unless it names one, or is no price."""
        named = self.name.rpartition("/")[2] in TRANSPORTS
        return self if self.transport in (None, transport) or named else replace(self, name=f"{self.name}/{transport}")

    @property
    def minimize(self) -> bool:
        """True if less is better."""
        return self.direction == "minimize"


def figures(
    objectives: Sequence[Objective],
    runs: Sequence[Run],
    replays: Sequence[Replay],
    dense: Sequence[Replay | None] = (),
) -> dict[str, Figure]:
    """Return every objective of a trial from the runs of its seeds; raises analysis.ReplayError where one cannot be priced.

    `replays`: the runs priced in company, over the transport of the objectives, needed where one of these is a price. `dense`: the
    dense replay to compare each with.
    """
    found = {}
    for objective in objectives:
        if objective.kind in PRICED:
            found[objective.name] = _price(objective, replays, dense)
            continue
        column = "wire_bytes" if objective.kind == "wire_bytes" else f"final_{objective.kind}"
        known = [float(run.row[column]) for run in runs if _is_known(run.row.get(column))]
        whole = len(known) == len(runs)
        found[objective.name] = Figure(
            statistics.fmean(known) if whole else None,
            statistics.stdev(known) if whole and len(known) > 1 else None,
        )
    return found


def _target(text: str) -> Target:
    from raysim.analysis import Target

    return Target.parse(text)


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def priced(objectives: Sequence[Objective]) -> bool:
    """Return whether any objective is a price, for which actions must be read."""
    return any(objective.kind in PRICED for objective in objectives)


def by_transport(objectives: Sequence[Objective]) -> dict[str, list[Objective]]:
    """Return objectives by the transport over which they are priced; those that are no prices go with the usual one."""
    found: dict[str, list[Objective]] = {}
    for objective in objectives:
        found.setdefault(objective.transport or USUAL_TRANSPORT, []).append(objective)
    return found


def _price(objective: Objective, replays: Sequence[Replay], dense: Sequence[Replay | None]) -> Figure:
    """Return the mean price over a trial's runs; missing where one of them did not reach the target."""
    from raysim.analysis.pricing.estimates import Estimate

    assert objective.network is not None
    prices, dense_s, speedups = [], [], []
    for place, one in enumerate(replays):
        (step,) = one.step_s([objective.network])
        count = 1
        if objective.target is not None:
            reached = one.steps_to_target(_target(objective.target))[objective.mode]
            if reached is None:
                return Figure(None, reached=False)
            count = reached
        prices.append([count * end for end in step])
        other = dense[place] if dense else None
        if other is not None and objective.target is None:
            dense_s.append(other.step_s([objective.network])[0].value)
            speedups += one.speedup(other, [objective.network])
    value, low, high = (statistics.fmean(ends) for ends in zip(*prices, strict=True))
    speedup = None
    if speedups and len(speedups) == len(replays):
        mean = Estimate(*(statistics.fmean(ends) for ends in zip(*speedups, strict=True)))
        speedup = mean.at(statistics.fmean(dense_s) / value)
    spread = statistics.stdev(price[0] for price in prices) if len(prices) > 1 else None
    return Figure(value, spread, True if objective.target is not None else None, low, high, speedup)


@dataclass(frozen=True)
class Constraint:
    """A bound on an objective: `at_most` or `at_least` a number, or `within` a share of a baseline's (`of`).

    `within = 0.01, of = "dense"`: at most 1 % worse than the trial named dense.
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
                f"`constraints` of {self.objective} must have just one of at_most, at_least and within, but got "
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

    def value(self, objective: Objective, found: float, reference: float | None) -> float:
        """Return by how much it is broken: feasible where it is 0 or less."""
        if self.within is None:
            return found - self._bound if self.at_most is not None else self._bound - found
        assert reference is not None
        slack = self.within * abs(reference)
        return found - reference - slack if objective.minimize else reference - slack - found


def as_mapping(one: Objective | Constraint) -> dict[str, Any]:
    """Return the fields that are set, as a study's file writes them."""
    fields: Mapping[str, Any] = vars(one)
    return {name: value for name, value in fields.items() if value is not None and (name, value) != ("mode", "on")}
