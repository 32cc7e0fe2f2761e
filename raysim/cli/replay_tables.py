"""Tables of recorded runs and of a probe's candidates, priced on networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from raysim.analysis.data.folders import over
from raysim.analysis.report.words import speedup
from raysim.analysis.runs.estimates import Estimate
from raysim.cli.terminal import (
    console,
    interval_words,
    show_notes,
    show_shares,
    step_cells,
    table_of,
    write_line,
)
from raysim.config.identity import IDENTITY, is_missing
from raysim.network.topology import Network
from raysim.notation import printable
from raysim.units import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from raysim.analysis import Replay, Target


CURVE_WIDTH = 24  # characters of the longest bar
FIDELITIES = {"forward": "fidelity forward", "backward": "fidelity backward", "replica_gradient": "fidelity average"}


def show_replay(
    replay: Replay, networks: Sequence[Network], figures: Mapping[str, Any], dense: Replay | None, target: Target | None
) -> None:
    """Print the `replay_figures` of a recorded run: by network, to the target, and by stage."""
    out = console()
    row, rows = replay.row, figures["networks"]
    folder = printable(str(replay.run.folder))
    write_line(
        out,
        f"{folder}: {row.get('schedule')}, {replay.num_stages} stages, "
        f"{replay.num_microbatches} microbatches; forward {row.get('forward')}, backward {row.get('backward')}\n"
        f"{traffic_words(replay)}\n"
        f"Recorded at {format_seconds(replay.recorded_step_s)} a step ({row.get('engine')} engine); below, the mean of "
        f"{len(replay.profiles)} of its {replay.num_steps} steps, simulated\n{replay.costs.method}\n",
    )
    table = []
    for priced, cells in zip(rows, step_cells(rows), strict=True):
        cells[f"{replay.num_steps:,} steps"] = format_seconds(priced["run_s"])
        if dense:
            cells["dense step"] = format_seconds(priced["dense_step_s"])
            cells["speed-up"] = speedup_words(priced)
            cells["pays below"] = priced["pays_below"]
        table.append(cells)
    out.print(table_of(table, f"A step by network {over(replay.transport.name)} (compute: {replay.costs.source})"))
    if target is not None:
        out.print(_target_table(replay, rows, dense, target))
    for network in networks:
        if network.host_names is not None:
            write_line(out, placement_words(replay, network, network.host_names))
    show_shares(out, rows)
    show_notes(out, replay.notes)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def traffic_words(replay: Replay) -> str:
    """Return the bytes of a step by kind, and advice on a tied embedding if it dominates."""
    dense, sent = (float(size.mean()) for size in (replay.dense_bytes, replay.wire_bytes))
    tied, replicas = (replay.recording.collective_bytes(kind) for kind in ("tied", "replica_gradient"))
    words = [f"Boundaries: {format_bytes(dense)} -> {format_bytes(sent)} a step."] if dense else []
    if tied:
        method = replay.recording.row.get("tied_gradient") or IDENTITY
        words.append(
            f"Tied embedding: {format_bytes(tied)}, {'uncompressed' if method == 'Identity' else f'by {method}'}."
        )
    if replicas:
        words.append(f"Replicas: {format_bytes(replicas)}.")
    if tied > sent + replicas:
        fused = ""
        if replay.num_replicas > 1:
            fused = ", or fuse its exchange with that of the replicas by `fused_embedding=true`"
        words.append(
            "The tied embedding is most of the traffic: compress it by `tied_gradient`, or untie it by `model.tied=false` "
            f"(`tie_word_embeddings = false` in `model.config` of `hf`){fused}."
        )
    return " ".join(words) or "Nothing is sent."


def show_curve(networks: Sequence[Network], frame: pd.DataFrame, transport: str) -> None:
    """Print step times against bandwidth for a run and its dense run, and the break-even bandwidth."""
    out, rows = console(), _records(frame)
    dense = "dense_step_s" in frame
    longest = max(priced["step_s"] for priced in rows)
    table = []
    for network, priced in zip(networks, rows, strict=True):
        bar = "#" * max(round(CURVE_WIDTH * priced["step_s"] / longest), 1)
        cells = {"bandwidth": repr(network), "step": format_seconds(priced["step_s"])}
        cells |= {"90 % interval": interval_words(priced), "": bar}
        if dense:
            cells |= {"dense step": format_seconds(priced["dense_step_s"]), "speed-up": speedup_words(priced)}
        table.append(cells)
    out.print(table_of(table, f"A step by bandwidth {over(transport)}", text=["bandwidth", ""]))
    if dense:
        break_even = _break_even(rows[0]["break_even_bps"])
        everywhere = {"never": "slower at every bandwidth", "always": "faster at every bandwidth"}
        words = everywhere.get(break_even, f"faster below {break_even}, where the two cross, and slower above")
        out.print(f"Against the dense run it is {words}.", highlight=False, soft_wrap=True)


def placement_words(replay: Replay, network: Network, names: Sequence[str]) -> str:
    """Return a sentence that lists the stages on each host of a network."""
    hosts, per = replay.placement(network).hosts, len(replay.rows)
    by_host: dict[int, list[str]] = {}
    for worker, host in enumerate(hosts):
        stages = sorted({action.stage for action in replay.rows[worker % per]})
        of = f" of replica {worker // per}" if replay.num_replicas > 1 else ""
        by_host.setdefault(host, []).append(f"{' and '.join(map(str, stages))}{of}")
    words = (f"{', '.join(stages)} on {names[host]}" for host, stages in by_host.items())
    return f"Stages on {network!r}: {'; '.join(words)}"


def _target_table(replay: Replay, rows: Sequence[Mapping[str, Any]], dense: Replay | None, target: Target) -> Table:
    table = []
    for priced in rows:
        for mode in ("on", "off"):
            cells = {"network": priced["network"] if mode == "on" else "", "evaluated with": f"compression {mode}"}
            for prefix, run in (("", replay), ("dense ", dense)):
                if run is None:
                    continue
                column = prefix.replace(" ", "_")
                steps = priced[f"{column}steps_to_target_{mode}"]
                if is_missing(steps):
                    best = run.best(target, mode)
                    nearest = "" if math.isnan(best) else f", best {best:.4g}"
                    reached = ("-", f"not reached in {run.num_steps} steps{nearest}")
                else:
                    reached = (f"{steps:,}", format_seconds(priced[f"{column}time_to_target_{mode}_s"]))
                cells |= zip((f"{prefix}steps", f"{prefix}time"), reached, strict=True)
            table.append(cells)
    over_network = over(replay.transport.name)
    return table_of(table, f"To {target} {over_network}, at the first evaluation that reached it (one run, one seed)")


def speedup_words(row: Mapping[str, Any]) -> str:
    """Return the speed-up of a priced row with its interval, and whether it is distinguishable."""
    return speedup(Estimate(row["speedup"], row["speedup_low"], row["speedup_high"]))


def _paying(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a priced row's break-even bandwidth in words, as a field; empty without one."""
    return {"pays_below": _break_even(row["break_even_bps"])} if "break_even_bps" in row else {}


def _break_even(bps: object) -> str:
    if bps is None or is_missing(bps):
        return "-"
    assert isinstance(bps, float)
    return "always" if math.isinf(bps) else format_bandwidth(bps) if bps else "never"


def replay_figures(
    replay: Replay, networks: Sequence[Network], frame: pd.DataFrame, target: Target | None
) -> dict[str, Any]:
    """Return the prices of a recorded run, for JSON and `show_replay`."""
    rows = []
    for row, network in zip(_records(frame), networks, strict=True):
        shares = replay.shares(network)
        rows.append(row | _paying(row) | {"workers": _records(shares.workers), "critical_path_s": shares.critical_s})
    return {
        "run": str(replay.run.folder),
        "schedule": replay.row["schedule"],
        "target": None if target is None else str(target),
        "priced_steps": list(replay.profiles),
        "overheads": replay.overheads,
        "notes": replay.notes,
        "networks": rows,
    }


def show_probe(folder: str, candidates: Sequence[Replay], figures: dict[str, Any]) -> None:
    """Print the `probe_figures` of a probe's candidates: a table for each network, then the limits of a probe."""
    out, first = console(), candidates[0]
    counts = {"stages": first.num_stages, "replicas": first.num_replicas}
    shape = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count > 1)
    calls = f"{first.num_microbatches} microbatch{'' if first.num_microbatches == 1 else 'es'}"
    write_line(
        out,
        f"{folder}: {shape} of {first.row.get('model')}, {calls}, {first.row.get('schedule')}\n"
        f"{figures['cost']}\nBelow, the mean of the sampled steps, simulated\n{first.costs.method}\n",
    )
    rows = figures["candidates"]
    known = [name for name in FIDELITIES if any(not is_missing(row[f"{name}_fidelity"]) for row in rows)]
    for network in dict.fromkeys(row["network"] for row in rows):
        table = [
            {
                "candidate": row["candidate"],
                "bytes": format_bytes(row["bytes"]),
                "factor": f"{row['factor']:.1f}x",
            }
            | {FIDELITIES[name]: f"{row[f'{name}_fidelity']:.4f}" for name in known}
            | {"step": format_seconds(row["step_s"]), "90 % interval": interval_words(row)}
            | {"speed-up": "1" if row["candidate"] == rows[0]["candidate"] else speedup_words(row)}
            for row in rows
            if row["network"] == network
        ]
        title = f"A step on {network} {over(first.transport.name)} (compute: {first.costs.source})"
        out.print(table_of(table, title, text=["candidate"]))
    show_notes(out, first.notes)
    write_line(out, f"\n{figures['limit']}")
    for command in figures["commands"]:
        write_line(out, command)


def probe_figures(
    candidates: Mapping[str, Replay], frame: pd.DataFrame, cost: str, limit: str, commands: Sequence[str]
) -> dict[str, Any]:
    """Return the prices and errors of a probe's candidates by name, dense first.

    `frame` has one row per network for each candidate in turn.
    """
    rows = _records(frame)
    count = len(rows) // len(candidates)
    candidate_rows, named = [], list(candidates.items())
    for i, row in enumerate(rows):
        (name, candidate), dense = named[i // count], rows[i % count]
        sent, dense_sent = (each["wire_bytes"] + each["replica_bytes"] for each in (row, dense))
        means = candidate.recording.links.groupby("direction", observed=True)["fidelity"].mean()
        facts = {"candidate": name, "bytes": sent, "factor": dense_sent / sent}
        errors = {f"{kind}_fidelity": means.get(kind) for kind in FIDELITIES}
        candidate_rows.append(facts | errors | row | _paying(row))
    return {"candidates": candidate_rows, "cost": cost, "limit": limit, "commands": list(commands)}
