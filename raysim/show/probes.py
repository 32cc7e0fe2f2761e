"""Candidates of a probe on networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from raysim.analysis.data.studies import over
from raysim.network.memory import format_bytes
from raysim.show.replays import plain_row, speedup_words
from raysim.show.terminal import console, format_seconds, is_missing, show_notes

if TYPE_CHECKING:
    import pandas as pd

    from raysim.analysis import Replay

FIDELITIES = {
    "forward": "fidelity forward",
    "backward": "fidelity backward",
    "replica_gradient": "fidelity average",
}


def show_probe(folder: str, candidates: Sequence[Replay], figures: dict[str, Any]) -> None:
    """Print the `probe_figures` of a probe's candidates: a table for each network, then the limits of a probe."""
    out, first = console(), candidates[0]
    counts = {"stages": first.num_stages, "replicas": first.num_replicas}
    shape = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count > 1)
    calls = f"{first.num_microbatches} microbatch{'' if first.num_microbatches == 1 else 'es'}"
    out.print(
        f"{folder}: {shape} of {first.row.get('model')}, {calls}, {first.row.get('schedule')}\n"
        f"{figures['cost']}\nBelow, the mean of the sampled steps, simulated\n{first.costs.method}\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    rows = figures["candidates"]
    known = [name for name in FIDELITIES if any(not is_missing(row[f"{name}_fidelity"]) for row in rows)]
    for network in dict.fromkeys(row["network"] for row in rows):
        table = Table(
            "candidate", title=f"A step on {network} {over(first.transport.name)} (compute: {first.costs.source})"
        )
        for name in ("bytes", "factor", *(FIDELITIES[name] for name in known), "step", "90 % interval", "speed-up"):
            table.add_column(name, justify="right")
        for row in (one for one in rows if one["network"] == network):
            table.add_row(
                escape(row["candidate"]),
                format_bytes(row["bytes"]),
                f"{row['factor']:.1f}x",
                *(f"{row[f'{name}_fidelity']:.4f}" for name in known),
                format_seconds(row["step_s"]),
                f"{format_seconds(row['step_low_s'])} to {format_seconds(row['step_high_s'])}",
                "1" if row["candidate"] == rows[0]["candidate"] else speedup_words(row),
            )
        out.print(table)
    show_notes(out, first.notes)
    out.print(f"\n{figures['limit']}", highlight=False, markup=False, soft_wrap=True)
    for command in figures["commands"]:
        out.print(command, highlight=False, markup=False, soft_wrap=True)


def probe_figures(
    candidates: Mapping[str, Replay], frame: pd.DataFrame, cost: str, limit: str, commands: Sequence[str]
) -> dict[str, Any]:
    """Return the prices and errors of a probe's candidates by name, dense first.

    `frame` has their rows in turn, for each network.
    """
    rows = frame.to_dict("records")
    count = len(rows) // len(candidates)
    found, named = [], list(candidates.items())
    for place, row in enumerate(rows):
        (name, one), dense = named[place // count], rows[place % count]
        sent, dense_sent = (each["wire_bytes"] + each["replica_bytes"] for each in (row, dense))
        means = one.recording.links.groupby("direction", observed=True)["fidelity"].mean()
        facts = {"candidate": name, "bytes": sent, "factor": dense_sent / sent}
        errors = {f"{kind}_fidelity": None if is_missing(means.get(kind)) else means[kind] for kind in FIDELITIES}
        found.append(facts | errors | plain_row(row))
    return {"candidates": found, "cost": cost, "limit": limit, "commands": list(commands)}
