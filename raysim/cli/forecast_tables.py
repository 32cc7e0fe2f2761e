"""Tables of forecasts and profiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from raysim.cli.terminal import (
    Shares,
    console,
    first_and_last,
    show_notes,
    show_shares,
    table_of,
    wire_cells,
    write_line,
)
from raysim.network.collectives import EXCHANGES
from raysim.network.prices import wire_seconds
from raysim.network.timeline_views import busiest_share, summary
from raysim.network.topology import Network
from raysim.pipeline.groups import ring_bytes
from raysim.pipeline.link import DIRECTIONS
from raysim.units import format_bytes, format_seconds, plural, three_digits
from raysim.workloads.partition import cut_lines

if TYPE_CHECKING:
    from raysim.forecast.forecast import Forecast
    from raysim.forecast.link_costs import LinkCost
    from raysim.forecast.timings import TimedStep
    from raysim.network.profile import Profile
    from raysim.network.sharding import Sharded
    from raysim.network.timeline import Timeline


def show_forecast(plan: Forecast, networks: Sequence[Network]) -> None:
    """Print the forecast of a run: memory, packets, and steps by network and by stage."""
    out = console()
    config = plan.config
    timelines = [plan.simulate(network) for network in dict.fromkeys(networks)]
    replicas = f", {config.num_replicas} replicas" if config.num_replicas > 1 else ""
    write_line(
        out,
        f"{config.name}: {plan.schedule!r}, {plural(plan.num_stages, 'stage')} on {plural(plan.num_workers, 'worker')}{replicas}, "
        f"{config.num_microbatches} microbatches of {config.microbatch_size} samples; "
        f"{sum(plan.flops_forward) * config.num_microbatches:.3g} operations forward a step",
    )
    for line in cut_lines(plan.cut_choices):
        write_line(out, line)
    write_line(out, "")
    out.print(_memory_table(plan))
    if plan.links:
        out.print(_links_table(plan))
    out.print(_steps_table(plan, timelines))
    show_shares(out, _shares(timelines))
    show_notes(out, plan.notes)


def _steps_table(plan: Forecast, timelines: Sequence[Timeline]) -> Table:
    """Return the seconds of a step by network."""
    rows = []
    steps = wire_rows(plan, [timeline.network for timeline in timelines])
    for timeline, step, wire in zip(timelines, steps, wire_cells(steps), strict=True):
        network, step_s = timeline.network, step["step_s"]
        row = {"network": repr(network), "step": format_seconds(step_s), **wire}
        bounds = plan.step_bounds_s(network)
        if bounds is not None:
            row["90 % interval"] = " to ".join(map(format_seconds, bounds))
        if plan.first_steps:
            row["first visits"] = format_seconds(plan.step_s(network, first=True))
        if len(plan.endings) > 1:
            row["without exchange"] = format_seconds(quiet_step_s(plan, network))
            row["with one"] = format_seconds(plan.ending_s(network, 0))
        if any(each.collectives for each in timelines):
            row["collectives"] = format_seconds(timeline.collective_s, of=timeline.step_s)
        row["update, driver"] = format_seconds(timeline.outside_s, of=timeline.step_s)
        row["busiest link"] = f"{busiest_share(timeline):.0%} busy"
        row["samples/s"] = three_digits(plan.config.batch_size / step_s)
        row[f"{plan.num_steps:,} steps"] = format_seconds(plan.run_s(network))
        rows.append(row)
    return table_of(rows, f"A step by network (compute: {plan.steady.source})")


def wire_rows(plan: Forecast | TimedStep, networks: Sequence[Network]) -> list[dict[str, float]]:
    """Return the seconds of a step on each network, with those that bytes and latency add."""
    wires = wire_seconds(lambda chosen: np.array([plan.step_s(network) for network in chosen]), networks)
    return [
        {"step_s": plan.step_s(network)} | {f"step_{name}": value for name, value in wire._asdict().items()}
        for network, wire in zip(networks, wires, strict=True)
    ]


def _shares(timelines: Sequence[Timeline]) -> list[Shares]:
    """Return the parts of each step for the workers of the first replica."""
    return [
        Shares(
            repr(timeline.network),
            [worker._asdict() for worker in timeline.workers()[: timeline.table.num_workers]],
            timeline.explain(),
        )
        for timeline in timelines
    ]


def show_timed(timed: TimedStep, networks: Sequence[Network]) -> None:
    """Print the step simulated from hand-written timings: its seconds by network and by worker."""
    out = console()
    timelines = [timed.simulate(network) for network in dict.fromkeys(networks)]
    for timeline in timelines:
        rate = f", {three_digits(timed.samples / timeline.step_s)} samples a second" if timed.samples else ""
        write_line(out, f"A step takes {format_seconds(timeline.step_s)} on {timeline.network!r}{rate}.")
    replicas = f", {timed.num_replicas} replicas" if timed.num_replicas > 1 else ""
    if timed.averaging_delay:
        replicas += (
            f", averages under the next {'step' if timed.averaging_delay == 1 else f'{timed.averaging_delay} steps'}"
        )
    write_line(
        out,
        f"{timed.schedule!r}, {plural(timed.profile.num_stages, 'stage')}, {timed.num_microbatches} microbatches{replicas}; "
        f"{timed.profile.source or 'timings by hand'}.",
    )
    if timed.sharded is not None:
        write_line(out, sharding_words(timed, timed.sharded, timelines))
    write_line(out, "")
    rows = []
    cells = wire_cells(wire_rows(timed, [timeline.network for timeline in timelines]))
    for timeline, wire in zip(timelines, cells, strict=True):
        parts = {"pipeline": timeline.pipeline_s, "collectives": timeline.collective_s}
        parts["update and rest"] = timeline.outside_s
        row = {"network": repr(timeline.network), "step": format_seconds(timeline.step_s), **wire}
        row |= {name: format_seconds(part, of=timeline.step_s) for name, part in parts.items()}
        row |= {"GPUs busy": f"{_busy(timeline):.0%}", "bubble": f"{timeline.bubble:.0%}"}
        if timed.sharded is None:  # `busiest_share` counts no shards
            row["busiest link"] = f"{busiest_share(timeline):.0%} busy"
        rows.append(row)
    out.print(table_of(rows, "A step by network"))
    show_shares(out, _shares(timelines))


def sharding_words(timed: TimedStep, sharded: Sharded, timelines: Sequence[Timeline]) -> str:
    """Return a sentence on the bytes that sharding sends in a step, and the seconds they add on each network."""
    whole = replace(timed, sharded=None)
    added = [
        f"{format_seconds(timeline.step_s - whole.simulate(timeline.network).step_s)} on {timeline.network!r}"
        for timeline in timelines
    ]
    sent = sharded.sent_bytes(timed.num_replicas, timed.num_microbatches)
    return (
        f"{sharded.sharding!r}: the workers of a replica send {format_bytes(sent)} of parameters and gradients a step, which "
        f"adds {', '.join(added)}."
    )


def timed_figures(timed: TimedStep, networks: Sequence[Network]) -> dict[str, Any]:
    """Return the content of `show_timed`, for JSON."""
    timelines = [timed.simulate(network) for network in networks]
    return {
        "schedule": repr(timed.schedule),
        "num_stages": timed.profile.num_stages,
        "num_microbatches": timed.num_microbatches,
        "num_replicas": timed.num_replicas,
        "averaging_delay": timed.averaging_delay,
        "samples": timed.samples,
        "source": timed.profile.source,
        "sharded_bytes": timed.sharded.sent_bytes(timed.num_replicas, timed.num_microbatches) if timed.sharded else 0.0,
        "networks": [
            {
                "network": repr(timeline.network),
                **wire,
                "busy": _busy(timeline),
                "pipeline": summary(timeline),
            }
            for timeline, wire in zip(timelines, wire_rows(timed, networks), strict=True)
        ],
    }


def _busy(timeline: Timeline) -> float:
    """Return the mean share of the step in which workers compute."""
    return timeline.mean_s("compute_s") / timeline.step_s if timeline.step_s else 0.0


def quiet_step_s(plan: Forecast, network: Network) -> float:
    """Return the seconds of a step with the smallest exchange of replicas, or without one if such steps exist."""
    return plan.simulate(network, ending=len(plan.endings) - 1).step_s


def show_profile(figures: Mapping[str, Any]) -> None:
    """Print the `profile_figures` of a profile."""
    out = console()
    pairs = (
        ("encode", "encode_s", format_seconds),
        ("decode", "decode_s", format_seconds),
        ("wire", "wire_bytes", format_bytes),
    )
    rows = [
        {"stage": str(stage["stage"])}
        | {op: format_seconds(stage[f"{op}_compute_s"]) for op in DIRECTIONS}
        | {"update": format_seconds(stage["update_s"])}
        | {name: " + ".join(write(stage[f"{op}_{key}"]) for op in DIRECTIONS) for name, key, write in pairs}
        for stage in figures["stages"]
    ]
    table = table_of(first_and_last(rows), "An action, mean over microbatches", text=["stage"])
    table.caption = "encode, decode and wire: forward + backward"
    out.print(table)
    source = figures["source"]
    show_notes(out, [f"{source[0].upper()}{source[1:]}."])


def profile_figures(profile: Profile) -> dict[str, Any]:
    """Return the source of a profile, and the seconds and bytes of each stage's actions, means over microbatches."""
    costs = {name: getattr(profile, f"{name}_s") for name in ("compute", "encode", "decode")}
    stages = [
        {"stage": stage, "update_s": update_s}
        | {
            f"{op}_{name}_s": float(cost[0, stage, i].mean())
            for name, cost in costs.items()
            for i, op in enumerate(DIRECTIONS)
        }
        | {f"{op}_wire_bytes": float(profile.wire_bytes[0, stage, i].mean()) for i, op in enumerate(DIRECTIONS)}
        for stage, update_s in enumerate(profile.update_s.tolist())
    ]
    return {"source": profile.source, "stages": stages}


def _memory_table(plan: Forecast) -> Table:
    rows = []
    for worker, total in enumerate(plan.worker_bytes()):
        stages = [stage for stage, owner in enumerate(plan.owner) if owner == worker]
        memories = [plan.memories[stage] for stage in stages]
        parts = {
            "weights": sum(m.weights_bytes for m in memories),
            "versions": sum(m.versions_bytes for m in memories),
            "gradients": sum(m.gradients_bytes for m in memories),
            "optimiser": sum(m.optimizer_bytes for m in memories),
            "activations": sum(m.activations_bytes + m.waiting_bytes + m.workspace_bytes for m in memories),
            "memories": sum(m.residuals_bytes + m.references_bytes for m in memories),
            "packets": sum(m.messages_bytes for m in memories),
            "total": total,
        }
        if not any(memory.versions_bytes for memory in plan.memories):
            del parts["versions"]
        row = {"worker": str(worker), "stages": ", ".join(map(str, stages))}
        row |= {name: format_bytes(size) for name, size in parts.items()}
        rows.append(row | {"verdict": fits_words(total, plan.capacity_bytes)})
    return table_of(
        first_and_last(rows), "Peak memory of a worker, without framework and allocator", text=["worker", "stages"]
    )


def fits_words(needed: int, capacity: int | None) -> str:
    """Describe whether a stage fits into its device's memory.

    >>> fits_words(75 * 10**9, 80 * 10**9), fits_words(96 * 10**9, 80 * 10**9), fits_words(1, None)
    ('fits 80 GB', 'too much for 80 GB', 'no device named')
    """
    if capacity is None:
        return "no device named"
    return f"fits {format_bytes(capacity)}" if needed <= capacity else f"too much for {format_bytes(capacity)}"


def _links_table(plan: Forecast) -> Table:
    """Return the costs of a message at each boundary, and of the sum of each tied parameter; equal boundaries share a row."""
    alike: dict[tuple[Any, ...], list[LinkCost]] = {}
    for link in plan.links:
        alike.setdefault((link.replica, *link[2:]), []).append(link)
    rows = []
    for link, *others in alike.values():
        span = f"{link.boundary} to {others[-1].boundary}" if others else f"{link.boundary}"
        replica = "" if link.replica is None else f"replica {link.replica}"
        where = ", ".join(filter(None, (f"{span} {link.direction}", link.tensor, replica)))
        rows.append(_sizes(where, link.codec, link.dense_bytes, link.wire_bytes))
        seconds = {"encode": format_seconds(link.encode_s), "decode": format_seconds(link.decode_s)}
        rows[-1] |= {"first visit": format_bytes(link.first_bytes)} | seconds
    sums = plan.endings[0].costs["transfers"]
    sums = sums[(sums["direction"] == EXCHANGES[1]) & (sums["source_replica"] == 0)]
    for stages, shape in plan.tied:
        own = sums[sums["stage"] == stages[0]]
        sent = max((int(own["wire_bytes"][own["source_stage"] == stage].sum()) for stage in stages), default=0)
        where = f"tied sum of stages {', '.join(map(str, stages))}"
        dense = ring_bytes(math.prod(shape), len(stages))
        rows.append(_sizes(where, repr(plan.config.tied_gradient), dense, sent))
        rows[-1] |= dict.fromkeys(("first visit", "encode", "decode"), "-")
    return table_of(rows, "A message", text=["boundaries"], fold=["codec"])


def _sizes(where: str, codec: str, dense_bytes: int, wire_bytes: int) -> dict[str, str]:
    factor = f"{dense_bytes / wire_bytes:.2f}x" if wire_bytes else "-"
    return {
        "boundaries": where,
        "codec": codec,
        "dense": format_bytes(dense_bytes),
        "wire": format_bytes(wire_bytes),
        "factor": factor,
    }


def forecast_figures(plan: Forecast, networks: Sequence[Network]) -> dict[str, Any]:
    """Return the content of `show_forecast`, for JSON."""
    rows = []
    for network, wire in zip(networks, wire_rows(plan, networks), strict=True):
        timeline = plan.simulate(network)
        first_s = plan.step_s(network, first=True) if plan.first_steps else None
        times = {"network": repr(network), **wire, "first_step_s": first_s}
        if bounds := plan.step_bounds_s(network):
            times |= {"step_low_s": bounds[0], "step_high_s": bounds[1]}
        if len(plan.endings) > 1:
            times |= {"quiet_step_s": quiet_step_s(plan, network), "exchange_step_s": plan.ending_s(network, 0)}
        rows.append(times | {"run_s": plan.run_s(network), "pipeline": summary(timeline)})
    return {
        "name": plan.config.name,
        "schedule": repr(plan.schedule),
        "num_stages": plan.num_stages,
        "num_microbatches": plan.config.num_microbatches,
        "num_replicas": plan.config.num_replicas,
        "cuts": [
            {**choice.cut._asdict(), "other": choice.other._asdict() if choice.other else None}
            for choice in plan.cut_choices
        ],
        "flops_forward": list(plan.flops_forward),
        "memories": [
            {"stage": memory.stage, "total_bytes": memory.total_bytes, "explained": memory.explain()}
            for memory in plan.memories
        ],
        "worker_bytes": plan.worker_bytes(),
        "capacity_bytes": plan.capacity_bytes,
        "links": [link._asdict() for link in plan.links],
        "steps": plan.num_steps,
        "first_steps": plan.first_steps,
        "notes": list(plan.notes),
        "networks": rows,
    }
