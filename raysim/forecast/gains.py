"""The gains that a network allows, before training: the causes of a step's time, prices of settings, and other ways to save it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from raysim.config import RunConfig
from raysim.config.identity import IDENTITY, Setting
from raysim.forecast.forecast import Forecast, forecast
from raysim.forecast.link_costs import LinkCost, link_costs, packets_profile
from raysim.forecast.replica_costs import ReplicaCost, endings_of, replica_costs, tied_costs
from raysim.network.collectives import EXCHANGES
from raysim.network.costs import Expected, FleetCosts
from raysim.network.presets import DEVICES
from raysim.network.prices import without_exchange
from raysim.network.topology import Network

FASTEST = max(DEVICES, key=lambda name: DEVICES[name].peak_flops)
"""A device faster than any other, of which a measured speed is a share."""
MORE, FEWER = (2, 4, 8), (2, 4)
LOCAL_STEPS = 100


class Priced(NamedTuple):
    """The predicted step of a setting on a network."""

    setting: Setting
    step_s: float
    speedup: float
    """Dense's step over this one."""
    expected: Expected | None = None
    """The step with churn and money, if costs are given."""


class Alternative(NamedTuple):
    """Another way to run the same training, without compression."""

    name: str
    changes: Mapping[str, Any]
    """Keys of a run."""
    speedup: float
    """Samples a second over those of the run as it is."""
    step_s: float
    worker_bytes: int
    """Memory of the fullest worker."""


def silent(plan: Forecast) -> dict[str, Forecast]:
    """Return the run as if its links, its tied parameters, or its replicas sent nothing."""
    quiet = packets_profile((), plan.num_stages, plan.steady.compute_s.shape[2], first=False)
    left = {"links": replace(plan, steady=plan.steady.with_packets_of(quiet))}
    for name, direction in (("tied parameters", EXCHANGES[1]), ("replica gradients", EXCHANGES[0])):
        left[name] = replace(plan, endings=[(share, without_exchange(each, direction)) for share, each in plan.endings])
    return left


def limit(plan: Forecast, network: Network) -> float:
    """Return the upper bound of any codec's speed-up: link messages keep their latency, but have no bytes."""
    weightless = replace(plan.steady, wire_bytes=np.minimum(plan.steady.wire_bytes, 1.0))
    return plan.step_s(network) / replace(plan, steady=weightless).step_s(network)


def priced(
    settings: Iterable[Setting], dense: Forecast, network: Network, costs: FleetCosts | None = None
) -> Iterator[Priced]:
    """Yield each setting's price, compared with dense; settings that do not fit the run are left out."""
    dense_s = dense.step_s(network)
    for setting in settings:
        try:
            plan = coded(setting, dense)
            step_s = plan.step_s(network)
        except ValueError:
            continue  # such as a codec that cannot divide this run's tensors
        yield Priced(setting, step_s, dense_s / step_s, plan.expected(costs, network) if costs else None)


def coded(setting: Setting, dense: Forecast) -> Forecast:
    """Return the forecast of a setting, from packets made of seeded tensors; raises ValueError."""
    config, speed = dense.config.changed(**setting.changes()), dense.codec_bytes_per_s
    links = link_costs(config, dense.boundaries, speed, [])
    averages = replica_costs(config, dense.averaged, speed, []) if setting.replica_gradient != IDENTITY else []
    if config.tied_gradient != dense.config.tied_gradient:
        dense = _summed(dense, config)
    return recoded(dense, config, links, averages)


def _summed(dense: Forecast, config: RunConfig) -> Forecast:
    """Return a dense forecast with the sums of tied parameters of another setting."""
    sums, seconds = tied_costs(config, dense.tied, dense.codec_bytes_per_s)
    endings = [
        (share, replace(each, transfers=np.concatenate([without_exchange(each, EXCHANGES[1]).transfers, sums])))
        for share, each in dense.endings
    ]
    return replace(dense, steady=replace(dense.steady, update_s=dense.steady.update_s + seconds), endings=endings)


def recoded(dense: Forecast, config: RunConfig, links: Sequence[LinkCost], averages: Sequence[ReplicaCost]) -> Forecast:
    """Return a dense forecast with the messages of another setting; without `averages` its replicas average as before."""
    changes: dict[str, Any] = {"config": config, "links": tuple(links), "exchange_delay": config.exchange_delay}
    if averages:
        sums = dense.endings[0][1].transfers
        tied = sums[sums["direction"] == EXCHANGES[1]]
        changes |= {"endings": endings_of(config, averages, tied), "averages": tuple(averages)}
    endings = changes.get("endings", dense.endings)
    packets = packets_profile(links, dense.num_stages, dense.steady.compute_s.shape[2], first=False)
    steady = dense.steady.with_packets_of(packets).with_exchange_of(endings[0][1])
    return replace(dense, steady=steady, first=steady, first_steps=0, **changes)


def other_ways(dense: Forecast, network: Network, *, device: str | None = None) -> list[Alternative]:
    """Return other ways to run the same training, by the samples a second that they gain, best first.

    Compute is taken from `device`, or from `dense` in proportion to counted operations. Ways that do not fit the run are left out.
    """
    own = partial(forecast, transport=dense.steady.transport.name, shadows={})
    if device is None:
        fastest = own(dense.config, device=FASTEST, efficiency=1.0)
        seconds = [float(plan.steady.compute_s.mean(axis=3).sum()) for plan in (fastest, dense)]
        at = partial(own, device=FASTEST, efficiency=min(seconds[0] / seconds[1], 1.0))
    else:
        at = partial(own, device=device)
    rate = dense.config.batch_size / at(dense.config).step_s(network)
    best: dict[str, Alternative] = {}
    for kind, name, changes in _changes(dense):
        try:
            plan = at(dense.config.changed(**changes))
        except ValueError:
            continue  # such as microbatches that do not divide the batch
        if plan.capacity_bytes is not None and device is not None and max(plan.worker_bytes()) > plan.capacity_bytes:
            continue
        step_s = plan.step_s(network)
        way = Alternative(name, changes, plan.config.batch_size / step_s / rate, step_s, max(plan.worker_bytes()))
        if kind not in best or way.speedup > best[kind].speedup:
            best[kind] = way
    return sorted(best.values(), key=lambda way: -way.speedup)


def _changes(dense: Forecast) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield changes of layout, microbatches and averaging, each with its kind, in words and as keys."""
    config, stages, replicas = dense.config, dense.num_stages, dense.config.num_replicas
    count, batch = config.num_microbatches, config.batch_size
    if replicas > 1:
        yield from _local({}, "")
    if stages == 1:
        return
    for factor in FEWER:
        if count % factor == 0:
            yield "microbatches", _counted(count // factor, "larger"), {"num_microbatches": count // factor}
    for factor in MORE:
        yield "microbatches", _counted(count * factor, "smaller"), {"num_microbatches": count * factor}
    for factor in FEWER:
        grown = {"batch_size": batch * factor, "num_microbatches": count * factor}
        yield "batch", f"batches of {batch * factor} samples, {count * factor} microbatches in flight", grown
    if repr(config.schedule) != "GPipe":
        yield "schedule", "all microbatches in flight", {"schedule": "GPipe"}
    if dense.tied:
        ends = {"schedule": "ZBV", "num_stages": 2 * stages, "cuts": None}
        yield "tied", "both ends of the tied parameters on one worker", ends
    for factor in FEWER:
        if stages % factor == 0 and stages // factor > 1:
            yield "stages", f"{stages // factor} stages", {"num_stages": stages // factor, "cuts": None}
    alone = {"num_stages": 1, "cuts": None, "num_microbatches": 1, "schedule": "GPipe"}
    if replicas == 1:
        yield "alone", "one machine, without a network", alone
    yield from _local({**alone, "num_replicas": stages * replicas}, f"{stages * replicas} replicas, ")


def _local(changes: Mapping[str, Any], lead: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield local steps, in a run as long as one period."""
    keys = {**changes, "steps": LOCAL_STEPS, "epochs": None, "replica_gradient": f"DiLoCo({LOCAL_STEPS})"}
    yield "local", f"{lead}{LOCAL_STEPS} local steps between exchanges", keys


def _counted(count: int, size: str) -> str:
    return f"{count} {size} microbatch{'' if count == 1 else 'es'}"
