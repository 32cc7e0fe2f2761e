"""Advice on a job's network: the answer, the table of bandwidths, and the steps on each network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from raysim.show.terminal import console, show_notes, write_line
from raysim.units import format_bandwidth, format_bytes, format_seconds, three_digits

if TYPE_CHECKING:
    from raysim.advice.advise import Advice, Row
    from raysim.advice.bandwidth import Needed


def show_advice(advice: Advice) -> None:
    """Print the answer, then the bandwidth for each utilisation, the steps on each network, and the assumptions."""
    from raysim.advice.answer import answer, assumptions, percent
    from raysim.advice.bandwidth import LEVELS

    out = console()
    for sentence in answer(advice):
        write_line(out, sentence)
    write_line(out, "")
    if advice.dense.needed:
        latency = advice.networks[0].latency_s if advice.networks else 0.0
        assert isinstance(latency, float)
        wait = f", latency {format_seconds(latency)}" if latency else ", without latency"
        table = _table(f"Bandwidth for a utilisation{wait}")
        for level in LEVELS:
            table.add_column(f"{level:.0%}", justify="right")
        for name in ("memory", "known"):
            table.add_column(name, justify="right")
        for row, layout in _with_layouts(advice):
            table.add_row(layout, str(row.way), *map(_bandwidth, row.needed), _memory(advice, row), row.known)
        out.print(table)
    for place, network in enumerate(advice.networks):
        table = _table(f"A step on {network!r}")
        for name in ("step", "samples/s", "utilisation", "GPUs busy", "latency", "mostly"):
            table.add_column(name, justify="right", no_wrap=True)
        for row, layout in _with_layouts(advice):
            on = row.networks[place]
            table.add_row(
                layout,
                str(row.way),
                format_seconds(on.step_s),
                three_digits(on.samples_per_s),
                f"{percent(on.utilisation)} ({percent(on.low)} to {percent(on.high)})",
                percent(on.busy),
                percent(on.parts.latency / on.step_s),
                f"{on.limit} {getattr(on.parts, on.limit) / on.step_s:.0%}",
            )
        out.print(table)
    show_notes(out, assumptions(advice))


def _table(title: str) -> Table:
    """Return a table of ways, whose names are folded if the terminal is narrow, never cut."""
    table = Table(title=title)
    for name in ("layout", "setting"):
        table.add_column(name, overflow="fold")
    return table


def _with_layouts(advice: Advice) -> list[tuple[Row, str]]:
    """Return the rows with the layout's name on the first of each."""
    rows, last = [], None
    for row in advice.rows:
        rows.append((row, "" if row.way.layout == last else str(row.way.layout)))
        last = row.way.layout
    return rows


def _bandwidth(level: Needed) -> str:
    return "none" if math.isinf(level.bps) else format_bandwidth(level.bps).replace("bit/s", "")


def _memory(advice: Advice, row: Row) -> str:
    return f"{format_bytes(row.memory_bytes)}{'' if row.fits else ' too large'}"


def advice_figures(advice: Advice) -> dict[str, Any]:
    """Return the content of `show_advice`, for JSON; a bandwidth is null if none is enough."""
    from raysim.advice.answer import answer, assumptions
    from raysim.advice.bandwidth import LEVELS

    return {
        "answer": answer(advice),
        "model": advice.job.model.name,
        "parameters": advice.job.model.num_parameters,
        "devices": repr(advice.job.fleet),
        "batch": advice.job.batch,
        "rows": [
            {
                "workers": row.way.layout.workers,
                "replicas": row.way.layout.replicas,
                "sharding": None if row.way.layout.sharding is None else repr(row.way.layout.sharding),
                "setting": str(row.way),
                "memory_bytes": row.memory_bytes,
                "fits": row.fits,
                "known": row.known,
                "bandwidths": [
                    {"utilisation": level}
                    | {name: None if math.isinf(value) else value for name, value in found._asdict().items()}
                    for level, found in zip(LEVELS, row.needed, strict=False)
                ],
                "networks": [
                    vars(on) | {"network": repr(on.network), "busy": on.busy, "parts": on.parts._asdict()}
                    for on in row.networks
                ],
            }
            for row in advice.rows
        ],
        "notes": assumptions(advice),
    }
