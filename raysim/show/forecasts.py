"""Tables of forecasts and profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from raysim.network.topology import Network
from raysim.network.wire_use import busiest_share, summary
from raysim.show.terminal import both_ends, by_name, console, critical_words, show_notes, show_workers, write_line
from raysim.units import format_bytes, format_seconds, three_digits

if TYPE_CHECKING:
    from raysim.advice.timings import TimedStep
    from raysim.forecast.forecast import Forecast
    from raysim.network.profile import Profile
    from raysim.network.timeline import Timeline


def show_forecast(plan: Forecast, networks: Sequence[Network]) -> None:
    """Print the forecast of a run: memory, packets, and steps by network and by stage."""
    out = console()
    config = plan.config
    timelines = {network: plan.simulate(network) for network in networks}
    replicas = f", {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
    stages = "1 stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
    workers = "1 worker" if plan.num_workers == 1 else f"{plan.num_workers} workers"
    out.print(
        f"{config.name}: {plan.schedule!r}, {stages} on {workers}{replicas}, "
        f"{config.num_microbatches} microbatches of {config.microbatch_size} samples; "
        f"{sum(plan.flops_forward) * config.num_microbatches:.3g} operations forward a step",
        highlight=False,
        soft_wrap=True,
    )
    for line in plan.cut_lines:
        write_line(out, line)
    write_line(out, "")
    _show_memory(out, plan)
    _show_links(out, plan)
    out.print(_steps_table(plan, timelines))
    show_workers(
        out,
        [
            (repr(network), [by_name(worker._asdict()) for worker in timeline.workers() if not worker.replica])
            for network, timeline in timelines.items()
        ],
    )
    for network, timeline in timelines.items():
        write_line(out, critical_words(repr(network), timeline.explain()))
    show_notes(out, plan.notes)


def _steps_table(plan: Forecast, timelines: Mapping[Network, Timeline]) -> Table:
    """Return the seconds of a step by network."""
    table = Table("network", title=f"A step by network (compute: {plan.steady.source})")
    first = ["first visits"] if plan.first_steps else []
    ends = ["collectives"] if any(timeline.collectives for timeline in timelines.values()) else []
    kinds = ["without exchange", "with one"] if len(plan.endings) > 1 else []
    bounds = ["90 % interval"] if len(plan.steady.paces) > 1 else []
    names = (
        "step",
        *bounds,
        *first,
        *kinds,
        *ends,
        "update, driver",
        "busiest link",
        "samples/s",
        f"{plan.num_steps:,} steps",
    )
    for name in names:
        table.add_column(name, justify="right")
    for network, timeline in timelines.items():
        table.add_row(
            repr(network),
            format_seconds(plan.step_s(network)),
            *([_bounds(plan, network)] if bounds else []),
            *([format_seconds(plan.step_s(network, first=True))] if first else []),
            *(
                [format_seconds(each) for each in (quiet_step_s(plan, network), plan.ending_s(network, 0))]
                if kinds
                else []
            ),
            *([format_seconds(timeline.collective_s, of=timeline.step_s)] if ends else []),
            format_seconds(timeline.outside_s, of=timeline.step_s),
            f"{busiest_share(timeline):.0%} busy",
            three_digits(plan.config.batch_size / plan.step_s(network)),
            format_seconds(plan.run_s(network)),
        )
    return table


def show_timed(timed: TimedStep, networks: Sequence[Network]) -> None:
    """Print the step simulated from hand-written timings: its seconds by network and by worker."""
    out = console()
    timelines = {repr(network): timed.simulate(network) for network in networks}
    for network, timeline in timelines.items():
        rate = f", {three_digits(timed.samples / timeline.step_s)} samples a second" if timed.samples else ""
        write_line(out, f"A step takes {format_seconds(timeline.step_s)} on {network}{rate}.")
    replicas = f", {timed.num_replicas} replicas" if timed.num_replicas > 1 else ""
    stages = "1 stage" if timed.profile.num_stages == 1 else f"{timed.profile.num_stages} stages"
    write_line(
        out,
        f"{timed.schedule!r}, {stages}, {timed.num_microbatches} microbatches{replicas}; "
        f"{timed.profile.source or 'timings by hand'}.",
    )
    if timed.sharded is not None:
        write_line(out, sharding_words(timed, timelines))
    write_line(out, "")
    table = Table("network", title="A step by network")
    links = [] if timed.sharded else ["busiest link"]  # which counts packets and averages, and no shards
    for name in ("step", "pipeline", "collectives", "update and rest", "GPUs busy", "bubble", *links):
        table.add_column(name, justify="right")
    for network, timeline in timelines.items():
        parts = (timeline.pipeline_s, timeline.collective_s, timeline.outside_s)
        table.add_row(
            network,
            format_seconds(timeline.step_s),
            *(format_seconds(part, of=timeline.step_s) for part in parts),
            f"{_busy(timeline):.0%}",
            f"{timeline.bubble:.0%}",
            *(f"{busiest_share(timeline):.0%} busy" for _ in links),
        )
    out.print(table)
    show_workers(
        out,
        [
            (network, [by_name(worker._asdict()) for worker in timeline.workers() if not worker.replica])
            for network, timeline in timelines.items()
        ],
    )
    for network, timeline in timelines.items():
        write_line(out, critical_words(network, timeline.explain()))


def sharding_words(timed: TimedStep, timelines: Mapping[str, Timeline]) -> str:
    """Return the bytes that the shards of a replica cost in a step, and the seconds on each network."""
    assert timed.sharded is not None
    whole = replace(timed, sharded=None)
    added = [
        f"{format_seconds(timeline.step_s - whole.simulate(timeline.network).step_s)} on {network}"
        for network, timeline in timelines.items()
    ]
    sent = timed.sharded.sent_bytes(timed.num_replicas, timed.num_microbatches)
    return (
        f"{timed.sharded.sharding!r}: the workers of a replica send {format_bytes(sent)} of parameters and gradients a step, which "
        f"adds {', '.join(added)}."
    )


def timed_figures(timed: TimedStep, networks: Sequence[Network]) -> dict[str, Any]:
    """Return the content of `show_timed`, for JSON."""
    timelines = [(network, timed.simulate(network)) for network in networks]
    return {
        "schedule": repr(timed.schedule),
        "num_stages": timed.profile.num_stages,
        "num_microbatches": timed.num_microbatches,
        "num_replicas": timed.num_replicas,
        "samples": timed.samples,
        "source": timed.profile.source,
        "sharded_bytes": timed.sharded.sent_bytes(timed.num_replicas, timed.num_microbatches) if timed.sharded else 0.0,
        "networks": [
            {
                "network": repr(network),
                "step_s": timeline.step_s,
                "busy": _busy(timeline),
                "pipeline": summary(timeline),
            }
            for network, timeline in timelines
        ],
    }


def _busy(timeline: Timeline) -> float:
    """Return the mean share of the step in which workers compute."""
    workers = timeline.workers()
    return sum(worker.compute_s for worker in workers) / len(workers) / timeline.step_s if timeline.step_s else 0.0


def _bounds(plan: Forecast, network: Network) -> str:
    """Return the interval of a step in words."""
    bounds = plan.step_bounds_s(network)
    assert bounds is not None, "the profile has several recorded steps"
    return " to ".join(format_seconds(bound) for bound in bounds)


def quiet_step_s(plan: Forecast, network: Network) -> float:
    """Return the seconds of a step with the smallest exchange of replicas: of a step without one, if there is any."""
    return plan.simulate(network, ending=len(plan.endings) - 1).step_s


def show_profile(profile: Profile) -> None:
    """Print the costs of every stage's actions, means over microbatches."""
    out = console()
    table = Table("stage", title="An action, mean over microbatches")
    for name in ("forward", "backward", "update", "encode", "decode", "wire"):
        table.add_column(name, justify="right")
    for stage in both_ends(profile.num_stages):
        if stage is None:
            table.add_row(*["..."] * 7)
            continue
        both = [
            " + ".join(write(float(costs[0, stage, op].mean())) for op in (0, 1))
            for write, costs in (
                (format_seconds, profile.encode_s),
                (format_seconds, profile.decode_s),
                (format_bytes, profile.wire_bytes),
            )
        ]
        compute = [format_seconds(float(profile.compute_s[0, stage, op].mean())) for op in (0, 1)]
        table.add_row(str(stage), *compute, format_seconds(float(profile.update_s[stage])), *both)
    table.caption = "encode, decode and wire: forward + backward"
    out.print(table)
    show_notes(out, [f"{profile.source[0].upper()}{profile.source[1:]}."])


def _show_memory(out: Console, plan: Forecast) -> None:
    table = Table("worker", "stages", title="Peak memory of a worker, without framework and allocator")
    versions = ["versions"] if any(memory.versions_bytes for memory in plan.memories) else []
    names = ("weights", *versions, "gradients", "optimiser", "activations", "memories", "packets", "total", "verdict")
    for name in names:
        table.add_column(name, justify="right")
    totals = plan.worker_bytes()
    for worker in both_ends(len(totals)):
        if worker is None:
            table.add_row(*["..."] * (2 + len(names)))
            continue
        stages = [stage for stage, owner in enumerate(plan.owner) if owner == worker]
        memories = [plan.memories[stage] for stage in stages]
        parts = (
            sum(m.weights_bytes for m in memories),
            *([sum(m.versions_bytes for m in memories)] if versions else []),
            sum(m.gradients_bytes for m in memories),
            sum(m.optimizer_bytes for m in memories),
            sum(m.activations_bytes + m.waiting_bytes + m.workspace_bytes for m in memories),
            sum(m.residuals_bytes + m.references_bytes for m in memories),
            sum(m.messages_bytes for m in memories),
            totals[worker],
        )
        table.add_row(
            str(worker),
            ", ".join(map(str, stages)),
            *map(format_bytes, parts),
            verdict(totals[worker], plan.capacity_bytes),
        )
    out.print(table)


def verdict(needed: int, capacity: int | None) -> str:
    """Return whether a stage fits into its device's memory, in words.

    >>> verdict(75 * 10**9, 80 * 10**9), verdict(96 * 10**9, 80 * 10**9), verdict(1, None)
    ('fits 80 GB', 'too much for 80 GB', 'no device named')
    """
    if capacity is None:
        return "no device named"
    return f"fits {format_bytes(capacity)}" if needed <= capacity else f"too much for {format_bytes(capacity)}"


def _show_links(out: Console, plan: Forecast) -> None:
    """Print the costs of a message at each boundary; equal boundaries share a row."""
    table = Table("boundaries", title="A message")
    table.add_column("codec", overflow="fold")
    for name in ("dense", "wire", "factor", "first visit", "encode", "decode"):
        table.add_column(name, justify="right")
    alike: dict[tuple[Any, ...], list[int]] = {}
    for link in plan.links:
        alike.setdefault((link.replica, *link[2:]), []).append(link.boundary)
    for (replica, direction, tensor, codec, dense, first, wire, encode_s, decode_s, *_), boundaries in alike.items():
        span = f"{boundaries[0]}" if len(boundaries) == 1 else f"{boundaries[0]} to {boundaries[-1]}"
        table.add_row(
            ", ".join(filter(None, (f"{span} {direction}", tensor, "" if replica is None else f"replica {replica}"))),
            codec,
            format_bytes(dense),
            format_bytes(wire),
            f"{dense / wire:.2f}x" if wire else "-",
            format_bytes(first),
            format_seconds(encode_s),
            format_seconds(decode_s),
        )
    if plan.links:
        out.print(table)


def forecast_figures(plan: Forecast, networks: Sequence[Network]) -> dict[str, Any]:
    """Return the content of `show_forecast`, for JSON."""
    rows = []
    for network in networks:
        timeline = plan.simulate(network)
        first_s = plan.step_s(network, first=True) if plan.first_steps else None
        times = {"network": repr(network), "step_s": plan.step_s(network), "first_step_s": first_s}
        if bounds := plan.step_bounds_s(network):
            times |= {"step_low_s": bounds[0], "step_high_s": bounds[1]}
        if len(plan.endings) > 1:
            times |= {"quiet_step_s": quiet_step_s(plan, network), "exchange_step_s": plan.ending_s(network, 0)}
        rows.append(times | {"run_s": plan.run_s(network), "pipeline": summary(timeline)})
    memories = [
        {"stage": memory.stage, "total_bytes": memory.total_bytes, "explained": memory.explain()}
        for memory in plan.memories
    ]
    return {
        "name": plan.config.name,
        "schedule": repr(plan.schedule),
        "num_stages": plan.num_stages,
        "num_microbatches": plan.config.num_microbatches,
        "num_replicas": plan.num_replicas,
        "cuts": [
            {**choice.cut._asdict(), "other": choice.other._asdict() if choice.other else None}
            for choice in plan.cut_choices
        ],
        "flops_forward": list(plan.flops_forward),
        "memories": memories,
        "worker_bytes": plan.worker_bytes(),
        "capacity_bytes": plan.capacity_bytes,
        "links": [link._asdict() for link in plan.links],
        "steps": plan.num_steps,
        "first_steps": plan.first_steps,
        "notes": list(plan.notes),
        "networks": rows,
    }
