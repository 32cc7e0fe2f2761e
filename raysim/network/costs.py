"""Money and churn: GPU hours, egress, stragglers and departures of hosts, read from a file.

A file of costs has the fields of `FleetCosts`. The price of a step on a network becomes an expected step, and an amount of money.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from raysim.network.step_times import StepTimes, parse_step_times
from raysim.network.timeline import Timeline
from raysim.network.timeline_views import egress_bytes
from raysim.notation import InputError, check_real, known_words, shown
from raysim.storage.files import read_text
from raysim.storage.texts import parse_toml
from raysim.units import format_seconds, three_digits

HOUR_S = 3600.0
GB = 1e9


class Expected(NamedTuple):
    """A step with its churn, and its money."""

    step_s: float
    """Seconds of training for each completed step."""
    straggling: float
    """Factor on the step by hosts that wait for the slowest."""
    departures: float
    """Factor on the step by checkpoints, lost work and restarts."""
    money: float
    checkpoint_every_s: float | None = None
    """Seconds of training from one checkpoint to the next; None without departures, or if replicas join again."""

    @property
    def ends(self) -> bool:
        """False if hosts depart so often that no step is ever completed."""
        return math.isfinite(self.step_s)

    @classmethod
    def mean(cls, steps: Sequence[Expected]) -> Expected:
        """Return the mean of the steps of runs that differ in their seed."""
        step_s, straggling, departures, money = (
            fmean(values) for values in zip(*(each[:4] for each in steps), strict=True)
        )
        return cls(step_s, straggling, departures, money, steps[0].checkpoint_every_s)


@dataclass(frozen=True)
class FleetCosts:
    """Money, stragglers and departures of a fleet of hosts."""

    currency: str = ""
    gpu_hour: float = 0.0
    """Money for a GPU and hour, with its share of the host."""
    egress_gb: float = 0.0
    """Money for 10^9 bytes that leave a host, or on a network of sites a site."""
    departure_hours: float = math.inf
    """Mean hours until a host departs: a failure, or a spot instance called back."""
    restart_s: float = 0.0
    """Seconds from a departure until its replacement trains: a new host, start-up, loading."""
    checkpoint_s: float = 0.0
    """Seconds that training stops for a checkpoint."""
    checkpoint_every_s: float | None = None
    """Seconds of training between checkpoints; by default the interval that costs least."""
    step_times: StepTimes | None = None
    """Distribution of a host's compute seconds in a step, such as Lognormal(0.1)."""
    source: str = ""
    """The source of the figures."""

    def __post_init__(self) -> None:
        for name in ("currency", "source"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"`{name}` must be a text, but got {shown(getattr(self, name))}.")
        for name in ("gpu_hour", "egress_gb", "restart_s", "checkpoint_s"):
            object.__setattr__(self, name, check_real(name, getattr(self, name), 0, math.inf))
        hours = self.departure_hours
        if hours != math.inf:
            hours = check_real("departure_hours", hours, 0, math.inf, open_low=True)
        object.__setattr__(self, "departure_hours", hours)
        if self.step_times is not None and not isinstance(self.step_times, StepTimes):
            object.__setattr__(self, "step_times", parse_step_times(self.step_times))
        if self.checkpoint_every_s is not None:
            every = check_real("checkpoint_every_s", self.checkpoint_every_s, 0, math.inf, open_low=True)
            object.__setattr__(self, "checkpoint_every_s", every)
        for name in ("restart_s", "checkpoint_s", "checkpoint_every_s"):
            if getattr(self, name) and hours == math.inf:
                raise ValueError(
                    f"`{name}` is paid at departures: give `departure_hours`, the mean hours until a host departs."
                )

    @property
    def churns(self) -> bool:
        """True if hosts straggle or depart."""
        return self.step_times is not None or self.departure_hours < math.inf

    @property
    def cost(self) -> bool:
        """True if anything costs money."""
        return bool(self.gpu_hour or self.egress_gb)

    def of_step(
        self,
        step_s: float,
        *,
        compute_s: float,
        sent_bytes: float = 0.0,
        hosts: int = 1,
        replicas: int = 1,
        gpus: int = 1,
        period: float = 1.0,
    ) -> Expected:
        """Return the expected step, given its seconds, the compute seconds of its busiest host, and its egress.

        `hosts`: number of hosts of a replica, which stops if one of them departs. `gpus`: total number of GPUs. `period`: steps
        from one exchange of replicas to the next; if more than one, the other replicas train on when a host departs.
        """
        straggling = departures = 1.0
        if self.step_times is not None and step_s:
            slowest = self.step_times.slowest(hosts, replicas, max(round(period), 1))
            straggling = 1 + (slowest - 1) * compute_s / step_s
        every = None
        if self.departure_hours < math.inf and step_s:
            of_replica_s = self.departure_hours * HOUR_S / hosts
            of_any_s = of_replica_s / replicas
            every = self.checkpoint_every_s or best_interval_s(of_any_s, self.checkpoint_s)
            departures = restarting(of_any_s, self.restart_s, self.checkpoint_s, every)
            period_s = period * step_s * straggling
            trains_on = replicas > 1 and period > 1
            if trains_on and (joined := rejoining(of_replica_s, self.restart_s, period_s)) <= departures:
                departures, every = joined, None
        expected_s = step_s * straggling * departures
        money = expected_s / HOUR_S * gpus * self.gpu_hour + sent_bytes / GB * self.egress_gb
        return Expected(expected_s, straggling, departures, money, every)

    def money_text(self, amount: float) -> str:
        """Return an amount of money."""
        return f"{three_digits(amount)} {self.currency}".strip()

    def cells(self, expected: Expected) -> dict[str, str]:
        """Return the cells of an expected step, its money and its causes; "never" if no step is ever completed."""
        cells = {"expected step": format_seconds(expected.step_s) if expected.ends else "never"} if self.churns else {}
        if self.cost:
            cells["1,000 steps"] = self.money_text(1000 * expected.money) if expected.ends else "never"
        if self.step_times is not None:
            cells["by stragglers"] = f"{expected.straggling - 1:+.1%}"
        if self.departure_hours < math.inf:
            every = expected.checkpoint_every_s
            cells["by departures"] = f"{expected.departures - 1:+.1%}" if expected.ends else "all"
            cells["checkpoint every"] = "joins again" if every is None else format_seconds(every)
        return cells

    def sentence(self, expected: Expected, dense: Expected | None = None) -> str:
        """Return a sentence on an expected step and its cost, compared with dense; empty without churn and money."""
        other = {} if dense is None else self.cells(dense)
        parts = [
            f"{name}: {text}{f' (dense {other[name]})' if other else ''}"
            for name, text in self.cells(expected).items()
            if name in ("expected step", "1,000 steps")
        ]
        text = ", ".join(parts)
        return f"{text[0].upper()}{text[1:]}." if parts else ""

    def as_mapping(self) -> dict[str, Any]:
        """Return the given figures, with the keys of a costs file."""
        given = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        return given | ({"step_times": repr(self.step_times)} if self.step_times is not None else {})

    def words(self) -> str:
        """Return the figures as a sentence."""
        parts = [f"{self.money_text(self.gpu_hour)} for a GPU hour" if self.gpu_hour else ""]
        parts += [f"{self.money_text(self.egress_gb)} for a GB of egress" if self.egress_gb else ""]
        if self.departure_hours < math.inf:
            lasts = format_seconds(self.departure_hours * HOUR_S)
            parts += [f"a departure of each host every {lasts}, {format_seconds(self.restart_s)} to restart"]
            parts += [f"{format_seconds(self.checkpoint_s)} for a checkpoint" if self.checkpoint_s else ""]
        parts += [f"step times {self.step_times!r}" if self.step_times is not None else ""]
        return "; ".join([*filter(None, parts), *([self.source] if self.source else [])])


def expected_step(
    costs: FleetCosts,
    step_s: float,
    kinds: Sequence[tuple[float, Timeline]],
    *,
    period: float = 1.0,
    gpus: int = 1,
    shards: int = 1,
    sharded_bytes: float = 0.0,
) -> Expected:
    """Return the expected step of a job; `kinds` are timelines of its steps with their shares of all steps.

    `period`: steps from one exchange of replicas to the next. `gpus`: GPUs of each worker. `shards`: replicas with a copy of the
    model together, which wait for one another in every step; `sharded_bytes` is their egress.
    """
    hosts = kinds[0][1].placement.hosts
    compute_s = sum(share * max(worker.compute_s for worker in timeline.workers()) for share, timeline in kinds)
    sent = sum(share * egress_bytes(timeline) for share, timeline in kinds) if costs.egress_gb else 0.0
    return costs.of_step(
        step_s,
        compute_s=compute_s,
        sent_bytes=sent + sharded_bytes,
        hosts=len(set(hosts[: shards * kinds[0][1].table.num_workers])),
        replicas=kinds[0][1].num_replicas // shards,
        gpus=gpus * len(hosts),
        period=period,
    )


def restarting(mean_s: float, restart_s: float, checkpoint_s: float, every_s: float) -> float:
    """Return the expected seconds for each second of work, with restarts from the last checkpoint.

    Departures come every `mean_s` seconds, also during restarts and checkpoints; work is saved every `every_s` seconds (Daly 2006,
    10.1016/j.future.2004.11.016, complete model). Infinite if no work is ever saved.

    >>> round(restarting(mean_s=86_400, restart_s=300, checkpoint_s=60, every_s=3_000), 4)
    1.0419
    """
    try:
        return math.exp(restart_s / mean_s) * math.expm1((every_s + checkpoint_s) / mean_s) * mean_s / every_s
    except OverflowError:
        return math.inf


def best_interval_s(mean_s: float, checkpoint_s: float) -> float:
    """Return the seconds between checkpoints that minimise `restarting`, at least one.

    If departures are rare, sqrt(2 x checkpoint x mean) (Young 1974).

    >>> round(best_interval_s(86_400, 60))
    3180
    """
    from scipy.special import lambertw

    best = mean_s * (1 + lambertw(-math.exp(-1 - checkpoint_s / mean_s)).real)
    return max(1.0, float(best))  # also if the best is NaN: the function has its branch point at free checkpoints


def rejoining(mean_s: float, restart_s: float, period_s: float) -> float:
    """Return the expected seconds for each second of a replica's useful work, if it joins again at the next exchange.

    It departs every `mean_s` seconds, loses the period of `period_s` seconds in which it departs, and waits for the first exchange
    after `restart_s` seconds. Infinite if it never completes a period.
    """
    missed = -math.expm1(-period_s / mean_s)
    if missed == 1.0 or not period_s:
        return math.inf if period_s else 1.0
    whole, rest = divmod(restart_s, period_s)
    late = (
        -math.expm1(-rest / mean_s) * math.exp(-(period_s - rest) / mean_s) / missed
    )  # ready after the first exchange
    lost = whole + 1 + late
    return 1 + lost * missed / (1 - missed)


def load_costs(path: Path) -> FleetCosts:
    """Read a TOML file with fields of `FleetCosts`; raises InputError naming the file."""
    try:
        values: dict[str, Any] = parse_toml(read_text(path))
        known = [field.name for field in fields(FleetCosts)]
        for name in values:
            if name not in known:
                raise ValueError(f"Unknown field `{name}`.{known_words(name, known)}")
        if not values:
            raise ValueError(f"A file of costs must have one of the fields {', '.join(known)}.")
        return FleetCosts(**values)
    except OSError as error:
        raise InputError(f"The file of costs {str(path)!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise InputError(f"{str(error).rstrip('.')} (in {str(path)!r}).") from None
