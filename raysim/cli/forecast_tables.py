"""Tables of forecasts and profiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from raysim.cli.terminal import (
    console,
    first_and_last,
    show_notes,
    show_shares,
    size_cells,
    step_cells,
    table_of,
    wire_cells,
    write_line,
)
from raysim.network.collectives import EXCHANGES
from raysim.network.prices import wire_seconds
from raysim.network.timeline_views import busiest_share, summary, wire_use
from raysim.network.topology import Network
from raysim.pipeline.groups import ring_bytes
from raysim.pipeline.link import DIRECTIONS
from raysim.units import apart, format_bytes, format_seconds, plural, three_digits
from raysim.workloads.partition import cut_lines

if TYPE_CHECKING:
    from raysim.forecast.forecast import Forecast
    from raysim.forecast.link_costs import LinkCost
    from raysim.network.profile import Profile
    from raysim.network.sharding import Sharded
    from raysim.network.timed_step import TimedStep


def show_forecast(plan: Forecast, figures: Mapping[str, Any]) -> None:
    """Print the `forecast_figures` of a run: memory, packets, and steps by network and by stage."""
    out = console()
    config = plan.config
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
    rows = [{**row["pipeline"], **row} for row in figures["networks"]]
    cells = [
        step
        | {"samples/s": three_digits(config.batch_size / row["step_s"])}
        | {f"{plan.num_steps:,} steps": format_seconds(row["run_s"])}
        for row, step in zip(rows, step_cells(rows), strict=True)
    ]
    out.print(table_of(cells, f"A step by network (compute: {plan.steady.source})"))
    show_shares(out, rows, plan.num_workers)
    show_notes(out, plan.notes)


def _step_rows(plan: Forecast | TimedStep, networks: Sequence[Network]) -> list[dict[str, Any]]:
    """Return a step on each network: its seconds, those due to bytes and latency, the load of machines, and its parts."""
    wires = wire_seconds(lambda chosen: np.array([plan.step_s(network) for network in chosen]), networks)
    rows = []
    for network, wire in zip(networks, wires, strict=True):
        timeline = plan.simulate(network)
        row = {"network": repr(network), "step_s": plan.step_s(network)}
        row |= {f"step_{name}": value for name, value in wire._asdict().items()}
        busy = timeline.mean_s("compute_s") / timeline.step_s if timeline.step_s else 0.0
        rows.append(row | {"busy": busy, "busiest_link": busiest_share(timeline), "pipeline": summary(timeline)})
    return rows


def add_wires(plan: Forecast | TimedStep, networks: Sequence[Network], figures: Mapping[str, Any]) -> None:
    """Add the load of each pair of hosts to the figures of `plan`; an average joins all pairs of replicas."""
    for network, row in zip(networks, figures["networks"], strict=True):
        row["pipeline"]["wires"] = [wire._asdict() for wire in wire_use(plan.simulate(network))]


def show_timed(timed: TimedStep, figures: Mapping[str, Any], networks: Sequence[Network]) -> None:
    """Print the `timed_figures` of a step with hand-written timings: its seconds by network and by worker."""
    out = console()
    rows = [{**row, **row["pipeline"]} for row in figures["networks"]]
    for row in rows:
        rate = f", {three_digits(timed.samples / row['step_s'])} samples a second" if timed.samples else ""
        write_line(out, f"A step takes {format_seconds(row['step_s'])} on {row['network']}{rate}.")
    microbatches = f"{timed.num_microbatches} microbatch{'' if timed.num_microbatches == 1 else 'es'}"
    replicas = f", {timed.num_replicas} replicas" if timed.num_replicas > 1 else ""
    if replicas and timed.sharded is None and not (timed.profile.gradient_bytes.any() or len(timed.profile.transfers)):
        replicas += " that average nothing, without `gradient_bytes`"
    if timed.averaging_delay:
        replicas += (
            f", averages under the next {'step' if timed.averaging_delay == 1 else f'{timed.averaging_delay} steps'}"
        )
    write_line(
        out,
        f"{timed.schedule!r}, {plural(timed.profile.num_stages, 'stage')}, {microbatches}{replicas}; "
        f"{timed.profile.source or 'timings by hand'}.",
    )
    if timed.sharded is not None:
        steps_s = {network: row["step_s"] for network, row in zip(networks, rows, strict=True)}
        write_line(out, sharding_words(timed, timed.sharded, steps_s))
    write_line(out, "")
    parts = {"pipeline": "pipeline_s", "collectives": "collective_s", "update and rest": "outside_s"}
    table = []
    for row, wire in zip(rows, wire_cells(figures["networks"]), strict=True):
        cells = {"network": row["network"], "step": format_seconds(row["step_s"]), **wire}
        cells |= {name: format_seconds(row[part], of=row["step_s"]) for name, part in parts.items()}
        cells |= {"GPUs busy": f"{row['busy']:.0%}", "bubble": f"{row['bubble']:.0%}"}
        if timed.sharded is None:  # shards are not counted in it
            cells["busiest link"] = f"{row['busiest_link']:.0%} busy"
        table.append(cells)
    out.print(table_of(table, "A step by network"))
    show_shares(out, rows, timed.num_workers // timed.num_replicas)


def sharding_words(timed: TimedStep, sharded: Sharded, steps_s: Mapping[Network, float]) -> str:
    """Return a sentence on the bytes that sharding sends in a step, and the seconds they add on each network."""
    whole = replace(timed, sharded=None)
    added = [
        f"{format_seconds(step_s - whole.simulate(network).step_s)} on {network!r}"
        for network, step_s in steps_s.items()
    ]
    sent = sharded.sent_bytes(timed.num_replicas, timed.num_microbatches)
    return (
        f"{sharded.sharding!r}: the workers of a replica send {format_bytes(sent)} of parameters and gradients a step, which "
        f"adds {', '.join(added)}."
    )


def timed_figures(timed: TimedStep, networks: Sequence[Network]) -> dict[str, Any]:
    """Return a step with timings on networks, for JSON and `show_timed`."""
    return {
        "schedule": repr(timed.schedule),
        "num_stages": timed.profile.num_stages,
        "num_microbatches": timed.num_microbatches,
        "num_replicas": timed.num_replicas,
        "averaging_delay": timed.averaging_delay,
        "samples": timed.samples,
        "source": timed.profile.source,
        "sharded_bytes": timed.sharded.sent_bytes(timed.num_replicas, timed.num_microbatches) if timed.sharded else 0.0,
        "networks": _step_rows(timed, networks),
    }


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
            "exchange": sum(m.exchange_bytes for m in memories),
            "packets": sum(m.messages_bytes for m in memories),
            "total": total,
        }
        for part, held in (("versions", "versions_bytes"), ("exchange", "exchange_bytes")):
            if not any(getattr(memory, held) for memory in plan.memories):
                del parts[part]
        row = {"worker": str(worker), "stages": ", ".join(map(str, stages))}
        row |= {name: format_bytes(size) for name, size in parts.items()}
        row["total"], _ = apart(format_bytes, total, plan.capacity_bytes or 0)
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
        rows.append({"boundaries": where, "codec": link.codec, **size_cells(link.dense_bytes, link.wire_bytes)})
        seconds = {"encode": format_seconds(link.encode_s), "decode": format_seconds(link.decode_s)}
        rows[-1] |= {"first visit": format_bytes(link.first_bytes)} | seconds
    sums = plan.endings[0][1].transfers
    sums = sums[(sums["direction"] == EXCHANGES[1]) & (sums["source_replica"] == 0)]
    for stages, shape in plan.tied:
        own = sums[sums["stage"] == stages[0]]
        sent = max((int(own["wire_bytes"][own["source_stage"] == stage].sum()) for stage in stages), default=0)
        where = f"tied sum of stages {', '.join(map(str, stages))}"
        sizes = size_cells(ring_bytes(math.prod(shape), len(stages)), sent)
        rows.append({"boundaries": where, "codec": repr(plan.config.tied_gradient), **sizes})
        rows[-1] |= dict.fromkeys(("first visit", "encode", "decode"), "-")
    return table_of(rows, "A message", text=["boundaries"], fold=["codec"])


def forecast_figures(plan: Forecast, networks: Sequence[Network]) -> dict[str, Any]:
    """Return the forecast of a run on networks, for JSON and `show_forecast`."""
    rows = _step_rows(plan, networks)
    for network, row in zip(networks, rows, strict=True):
        row["first_step_s"] = plan.step_s(network, first=True) if plan.first_steps else None
        if bounds := plan.step_bounds_s(network):
            row |= {"step_low_s": bounds[0], "step_high_s": bounds[1]}
        if len(plan.endings) > 1:
            row["quiet_step_s"] = plan.simulate(network, ending=len(plan.endings) - 1).step_s
            row["exchange_step_s"] = float(plan.timed().seconds([network])[0, 0])
        row["run_s"] = plan.run_s(network)
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
