"""Tables of seconds and bytes for a person to read: runs replayed on networks, and runs that were never made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from raysim.network.memory import format_bytes
from raysim.network.network import Network

if TYPE_CHECKING:
    import pandas as pd

    from analysis import Finding, Replay, Target
    from raysim.network.profile import Profile
    from raysim.pipeline.forecast import Forecast

MOST_ROWS = 16  # workers of one network: of more, those at both ends are shown

PARTS = {
    "compute_s": "compute",
    "codec_s": "codec",
    "overhead_s": "calls",
    "contention_s": "contention",
    "wait_s": "wire wait",
    "bubble_s": "bubble",
}


CRITICAL = {"overhead": "calls", "path": "host overhead of packets", "queue": "packets queueing"}


def console() -> Console:
    """Return where tables go; a file or a pipe has no width to fit, and gets a fixed one."""
    found = Console()
    if not found.is_terminal:
        found.width = 132
    return found


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits, in the unit that suits it.

    >>> [format_seconds(s) for s in (0.0000123, 0.0456, 0.9996, 12.34, 119.96, 3725, 400_000)]
    ['12.3 us', '45.6 ms', '1.00 s', '12.3 s', '2.00 min', '1.03 h', '4.63 d']
    """
    for limit, unit, size in (
        (1e-3, "us", 1e-6),
        (1.0, "ms", 1e-3),
        (100.0, "s", 1.0),
        (3600.0, "min", 60.0),
        (86400.0, "h", 3600.0),
    ):
        if seconds < limit * 0.9995:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 86400)} d"


def format_bandwidth(bps: float) -> str:
    """Return bits a second with three digits.

    >>> format_bandwidth(1_128_678_908.6), format_bandwidth(8e4)
    ('1.13 Gbit/s', '80.0 kbit/s')
    """
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bps >= 0.9995 * size:
            return f"{_three(bps / size)} {unit}"
    return f"{_three(bps)} bit/s"


def _three(value: float) -> str:
    """Return three digits, without an exponent."""
    if value == 0:
        return "0"
    digits = max(2 - math.floor(math.log10(abs(value) * 1.0005)), 0)
    return f"{value:,.{min(digits, 4)}f}"


def show_replay(
    replay: Replay, networks: Sequence[Network], frame: pd.DataFrame, dense: Replay | None, target: Target | None
) -> None:
    """Print what a recorded run would take: by network, to the target, and by stage."""
    out = console()
    row, rows = replay.row, frame.to_dict("records")
    out.print(
        f"{replay.run.folder}: {row['schedule']}, {replay.num_stages} stages, {replay.num_microbatches} microbatches; "
        f"forward {row['forward']}, backward {row['backward']}; {format_bytes(float(replay.dense_bytes.mean()))} a step sent "
        f"as {format_bytes(float(replay.wire_bytes.mean()))}\n"
        f"Recorded at {format_seconds(replay.recorded_step_s)} a step ({row.get('engine')} engine); below, the mean of "
        f"{len(replay.profiles)} of its {replay.num_steps} steps, simulated\n",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("network", title="A step by network")
    names = ["step", "spread", "of it outside actions", "busiest link", f"{replay.num_steps:,} steps"]
    for name in [*names, *(["dense step", "speed-up", "pays below"] if dense else [])]:
        table.add_column(name, justify="right")
    for one in rows:
        cells = [
            format_seconds(one["step_s"]),
            "one step" if _missing(one["step_sd_s"]) else f"± {format_seconds(one['step_sd_s'])}",
            format_seconds(one["outside_s"]),
            f"{one['busiest_link']:.0%} busy",
            format_seconds(one["run_s"]),
        ]
        if dense:
            cells += [format_seconds(one["dense_step_s"]), f"{one['speedup']:.2f}x", _break_even(one["break_even_bps"])]
        table.add_row(one["network"], *cells)
    out.print(table)
    if target is not None:
        _show_target(out, replay, rows, dense, target)
    splits = [(repr(network), replay.split(network)) for network in networks]
    _show_workers(out, [(name, [_by_name(w) for w in split.workers.to_dict("records")]) for name, split in splits])
    for name, split in splits:
        out.print(_critical(name, split.critical_s), highlight=False, markup=False, soft_wrap=True)
    _show_notes(out, replay.notes)


def _show_target(
    out: Console, replay: Replay, rows: Sequence[Mapping[Any, Any]], dense: Replay | None, target: Target
) -> None:
    table = Table("network", title=f"To {target}, at the first evaluation that reached it (one run, one seed)")
    for name in ("evaluated with", "steps", "time", *(("dense steps", "dense time") if dense else ())):
        table.add_column(name, justify="right")
    for one in rows:
        for mode in ("on", "off"):
            cells = [one["network"] if mode == "on" else "", f"compression {mode}"]
            for prefix, run in (("", replay), ("dense_", dense)):
                if run is None:
                    continue
                steps = one[f"{prefix}steps_to_target_{mode}"]
                if _missing(steps):
                    best = run.best(target.metric, mode)
                    nearest = "" if math.isnan(best) else f", best {best:.4g}"
                    cells += ["-", f"not reached in {run.num_steps} steps{nearest}"]
                else:
                    cells += [f"{steps:,}", format_seconds(one[f"{prefix}time_to_target_{mode}_s"])]
            table.add_row(*cells)
    out.print(table)


def _break_even(bps: object) -> str:
    if bps is None or _missing(bps):
        return "-"
    assert isinstance(bps, float)
    return "always" if math.isinf(bps) else format_bandwidth(bps) if bps else "never"


def show_forecast(plan: Forecast, networks: Sequence[Network]) -> None:
    """Print what a run would take: memory, packets, steps by network, and by stage."""
    out = console()
    config = plan.config
    timelines = {network: plan.simulate(network) for network in networks}
    replicas = f", {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
    out.print(
        f"{config.name}: {plan.schedule!r}, {plan.num_stages} stages on {plan.num_workers} workers{replicas}, "
        f"{config.num_microbatches} microbatches of {config.microbatch_size} samples; "
        f"{sum(plan.flops_forward) * config.num_microbatches:.3g} operations forward a step\n",
        highlight=False,
        soft_wrap=True,
    )
    _show_memory(out, plan)
    _show_links(out, plan)
    table = Table("network", title="A step by network")
    first = ["first visits"] if plan.first_steps else []
    names = ("step", *first, "of it outside actions", "busiest link", "samples/s", f"{plan.num_steps:,} steps")
    for name in names:
        table.add_column(name, justify="right")
    for network, timeline in timelines.items():
        tied_s = plan.tied_s(network)
        step_s = timeline.step_s + tied_s
        busiest = max((wire.utilisation for wire in timeline.wires()), default=0.0)
        table.add_row(
            repr(network),
            format_seconds(step_s),
            *([format_seconds(plan.step_s(network, first=True))] if first else []),
            format_seconds(step_s - timeline.pipeline_s),
            f"{busiest:.0%} busy",
            _three(config.batch_size / step_s),
            format_seconds(plan.run_s(network)),
        )
    out.print(table)
    _show_workers(
        out,
        [
            (repr(network), [_by_name(worker._asdict()) for worker in timeline.workers() if not worker.replica])
            for network, timeline in timelines.items()
        ],
    )
    for network, timeline in timelines.items():
        out.print(_critical(repr(network), timeline.explain()), highlight=False, markup=False, soft_wrap=True)
    _show_notes(out, plan.notes)


def show_profile(profile: Profile) -> None:
    """Print what the actions of every stage cost, means over microbatches."""
    out = console()
    table = Table("stage", title="An action, mean over microbatches")
    for name in ("forward", "backward", "update", "encode", "decode", "wire"):
        table.add_column(name, justify="right")
    for stage in _ends(profile.num_stages):
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
    _show_notes(out, [f"{profile.source[0].upper()}{profile.source[1:]}."])


def _show_memory(out: Console, plan: Forecast) -> None:
    table = Table("worker", "stages", title="Peak memory of a worker, without framework and allocator")
    for name in ("weights", "gradients", "optimiser", "activations", "memories", "packets", "total", "verdict"):
        table.add_column(name, justify="right")
    totals = plan.worker_bytes()
    for worker in _ends(len(totals)):
        if worker is None:
            table.add_row(*["..."] * 10)
            continue
        stages = [stage for stage, owner in enumerate(plan.owner) if owner == worker]
        mine = [plan.memories[stage] for stage in stages]
        parts = (
            sum(m.weights_bytes for m in mine),
            sum(m.gradients_bytes for m in mine),
            sum(m.optimizer_bytes for m in mine),
            sum(m.activations_bytes + m.waiting_bytes + m.workspace_bytes for m in mine),
            sum(m.residuals_bytes + m.references_bytes for m in mine),
            sum(m.messages_bytes for m in mine),
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
    """Return whether it fits, in words.

    >>> verdict(75 * 10**9, 80 * 10**9), verdict(96 * 10**9, 80 * 10**9), verdict(1, None)
    ('fits 80 GB', 'too much for 80 GB', 'no device named')
    """
    if capacity is None:
        return "no device named"
    return f"fits {format_bytes(capacity)}" if needed <= capacity else f"too much for {format_bytes(capacity)}"


def _show_links(out: Console, plan: Forecast) -> None:
    """Print what a message costs, boundaries that are alike in one row."""
    table = Table("boundaries", title="A message")
    table.add_column("codec", overflow="fold")
    for name in ("dense", "wire", "factor", "first visit", "encode", "decode"):
        table.add_column(name, justify="right")
    alike: dict[tuple[Any, ...], list[int]] = {}
    for link in plan.links:
        alike.setdefault((link.direction, *link[2:]), []).append(link.boundary)
    for (direction, codec, dense, first, wire, encode_s, decode_s, *_), boundaries in alike.items():
        span = f"{boundaries[0]}" if len(boundaries) == 1 else f"{boundaries[0]} to {boundaries[-1]}"
        table.add_row(
            f"{span} {direction}",
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


def _show_workers(out: Console, networks: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> None:
    """Print where every worker's seconds went, network by network."""
    used = _used([worker for _, workers in networks for worker in workers])
    table = Table("network", "worker", title="Where a worker's time goes")
    for name in used:
        table.add_column(name, justify="right")
    for network, workers in networks:
        for place, worker in enumerate(_ends(len(workers))):
            label = network if place == 0 else ""
            if worker is None:
                table.add_row(label, *["..."] * (1 + len(used)))
                continue
            one = workers[worker]
            table.add_row(label, str(one["worker"]), *(format_seconds(one[n]) for n in PARTS if PARTS[n] in used))
        table.add_section()
    out.print(table)


def _critical(network: str, seconds: Mapping[str, float]) -> str:
    """Return in a line what the step hangs on; "path" and "queue" are a packet's way to its wire."""
    total = sum(seconds.values()) or 1.0
    shares = sorted(((value / total, kind) for kind, value in seconds.items()), reverse=True)
    parts = ", ".join(f"{CRITICAL.get(kind, kind)} {share:.0%}" for share, kind in shares if share >= 0.005)
    return f"{network}: the critical path is {parts or 'empty'}."


def _show_notes(out: Console, notes: Iterable[str]) -> None:
    for note in notes:
        out.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)


def _used(rows: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Return the parts worth a column: calls and contention only where there are any."""
    always = ("compute_s", "codec_s", "wait_s", "bubble_s")
    return [text for name, text in PARTS.items() if name in always or any(row[name] for row in rows)]


def _ends(count: int) -> list[int | None]:
    """Return places 0, 1, ..., or those at both ends with None between."""
    if count <= MOST_ROWS:
        return list(range(count))
    half = MOST_ROWS // 2
    return [*range(half), None, *range(count - half, count)]


def _by_name(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


def show_findings(found: Sequence[Finding], problems: Iterable[str]) -> None:
    """Print what runs say of the papers' claims: the verdicts, why, and what to run where it is open."""
    out = console()
    for finding in found:
        style = {"supported": "green", "contradicted": "red", "undecided": "yellow"}[finding.verdict]
        out.print(f"[{style}]{finding.verdict:<12}[/] [bold]{finding.claim.text}[/]", highlight=False, soft_wrap=True)
        for line in (finding.context, finding.reason, f"{finding.claim.source}; claim {finding.claim.name!r}"):
            if line:
                out.print(f"             {line}", highlight=False, markup=False, soft_wrap=True)
        if len(finding.comparisons) > 1:
            for one in finding.comparisons:
                out.print(f"             - {one}: {one.verdict}", highlight=False, markup=False, soft_wrap=True)
        for place, command in enumerate(finding.commands):
            lead = "to decide:" if place == 0 else ""
            out.print(f"  {lead:<11}{command}", highlight=False, markup=False, soft_wrap=True)
        out.print()
    counts = {
        verdict: sum(one.verdict == verdict for one in found) for verdict in ("supported", "contradicted", "undecided")
    }
    confidence = f"{100 * found[0].confidence:g} %" if found else ""
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    out.print(
        f"{summary}. Intervals of {confidence} over seeds, paired (Student's t).", highlight=False, soft_wrap=True
    )
    _show_notes(out, problems)


def findings_figures(found: Sequence[Finding], problems: Iterable[str]) -> dict[str, Any]:
    """Return all that `show_findings` prints, for JSON: null where there is no effect or no interval."""
    rows = []
    for one in found:
        comparisons = [
            {
                "part": c.part,
                "text": c.text,
                "verdict": c.verdict,
                "effect": c.effect if c.effects else None,
                "low": c.low if math.isfinite(c.low) else None,
                "high": c.high if math.isfinite(c.high) else None,
                "unit": c.unit,
                "side": c.side,
                "threshold": c.threshold,
                "confidence": c.confidence,
                "effects_by_seed": c.effects,
                "runs": list(c.runs),
            }
            for c in one.comparisons
        ]
        rows.append(
            {
                "claim": one.claim.name,
                "text": one.claim.text,
                "source": one.claim.source,
                "context": one.context,
                "verdict": one.verdict,
                "reason": one.reason,
                "comparisons": comparisons,
                "runs": list(one.runs),
                "commands": list(one.commands),
            }
        )
    return {"findings": rows, "problems": list(problems)}


def replay_figures(
    replay: Replay, networks: Sequence[Network], frame: pd.DataFrame, target: Target | None
) -> dict[str, Any]:
    """Return all that `show_replay` prints, for JSON: null where a target was not reached or no bandwidth breaks even."""
    rows = []
    for row, network in zip(frame.to_dict("records"), networks, strict=True):
        one = {name: None if _missing(value) else value for name, value in _by_name(row).items()}
        if "break_even_bps" in one:
            one["pays_below"] = _break_even(one["break_even_bps"])
            if one["break_even_bps"] is not None and math.isinf(one["break_even_bps"]):
                one["break_even_bps"] = None
        split = replay.split(network)
        rows.append(one | {"workers": split.workers.to_dict("records"), "critical_path_s": split.critical_s})
    return {
        "run": str(replay.run.folder),
        "schedule": replay.row["schedule"],
        "target": None if target is None else str(target),
        "priced_steps": list(replay.profiles),
        "overheads": replay.overheads._asdict(),
        "notes": replay.notes,
        "networks": rows,
    }


def forecast_figures(plan: Forecast, networks: Sequence[Network]) -> dict[str, Any]:
    """Return all that `show_forecast` prints, for JSON."""
    rows = []
    for network in networks:
        timeline = plan.simulate(network)
        tied_s = plan.tied_s(network)
        first_s = plan.step_s(network, first=True) if plan.first_steps else None
        times = {
            "network": repr(network),
            "step_s": timeline.step_s + tied_s,
            "first_step_s": first_s,
            "tied_s": tied_s,
        }
        rows.append(times | {"run_s": plan.run_s(network), "pipeline": timeline.summary()})
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


def _missing(value: object) -> bool:
    """Return whether a cell is empty: None, pandas' NA, or not a number."""
    return value is None or repr(value) in ("<NA>", "nan")
