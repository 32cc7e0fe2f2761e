"""Tables, lines and notes for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from raysim.console import PlainConsole
from raysim.notation import printable
from raysim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from raysim.network.costs import Expected, FleetCosts
    from raysim.network.topology import Network

MOST_ROWS = 16  # workers shown for one network: if there are more, the first and the last

PARTS = {
    "compute_s": "compute",
    "codec_s": "codec",
    "overhead_s": "calls",
    "contention_s": "contention",
    "wait_bytes_s": "wait: bytes",
    "wait_latency_s": "wait: latency",
    "wait_host_s": "wait: transport",
    "shard_s": "shards",
    "bubble_s": "bubble",
    "collective_s": "collectives",
    "outside_s": "update, driver",
}
ALWAYS = ("compute_s", "codec_s", "wait_bytes_s", "wait_latency_s", "bubble_s")
"""Parts that have a column even if they are 0."""

CRITICAL = {
    "overhead": "calls",
    "path": "host overhead of packets",
    "queue": "packets queueing",
    "shards": "gathers and scatters of shards",
    "collective_bytes": "bytes of collectives",
    "collective_latency": "latency of collectives",
}

KINDS = {"first_step_s": "first visits", "quiet_step_s": "without exchange", "exchange_step_s": "with one"}
"""Seconds of some kinds of step, by the column of each."""

R = TypeVar("R")


def console(width: int = 132) -> Console:
    """Return the console for tables, with a fixed width for a file or a pipe."""
    return PlainConsole(width)


def echo(text: str, *, err: bool = False) -> None:
    """Print a line on the output or the error stream."""
    typer.echo(printable(text), err=err)


def write_line(out: Console, text: str) -> None:
    """Print a text unchanged, without colours or wrapping."""
    out.print(text, soft_wrap=True)


def table_of(
    rows: Sequence[Mapping[str, str] | None],
    title: str,
    *,
    text: Sequence[str] = ("network",),
    fold: Sequence[str] = (),
    no_wrap: bool = False,
) -> Table:
    """Return a table of rows, each a mapping of columns to cells; None is a row of dots.

    Columns of `text` are left-aligned; figures are right-aligned, and never wrapped with `no_wrap`. Columns of `fold` wrap in a
    narrow terminal instead of being cut.
    """
    table = Table(title=title)
    names = next(row for row in rows if row is not None)
    for name in names:
        if name in text or name in fold:
            table.add_column(name, overflow="fold" if name in fold else "ellipsis")
        else:
            table.add_column(name, justify="right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(["..."] * len(names) if row is None else row.values()))
    return table


def show_shares(out: Console, steps: Sequence[Mapping[str, Any]], num_workers: int | None = None) -> None:
    """Print the parts that add up to every worker's step, and the critical path, network by network.

    A step has `network`, `workers` and `critical_path_s`. `num_workers`: show only the first ones, such as one replica's.
    """
    workers = [step["workers"][:num_workers] for step in steps]
    used = [name for name in PARTS if name in ALWAYS or any(row[name] for rows in workers for row in rows)]
    table = Table("network", "worker", title="Where a worker's time goes")
    for name in used:
        table.add_column(PARTS[name], justify="right")
    for step, rows in zip(steps, workers, strict=True):
        for i, row in enumerate(first_and_last(rows)):
            cells = ["..."] * (1 + len(used))
            if row is not None:
                step_s = sum(row[name] for name in PARTS)
                cells = [str(row["worker"]), *(format_seconds(row[name], of=step_s) for name in used)]
            table.add_row("" if i else step["network"], *cells)
        table.add_section()
    out.print(table)
    for step in steps:
        write_line(out, critical_words(step["network"], step["critical_path_s"]))


def critical_words(network: str, seconds: Mapping[str, float]) -> str:
    """Return the critical path of a step in a line; "path" and "queue" are delays of a packet before its wire."""
    total = sum(seconds.values()) or 1.0
    shares = sorted(((value / total, kind) for kind, value in seconds.items()), reverse=True)
    parts = ", ".join(f"{CRITICAL.get(kind, kind)} {share:.0%}" for share, kind in shares if share >= 0.005)
    return f"{network}: the critical path is {parts or 'empty'}."


def first_and_last(rows: Sequence[R]) -> list[R | None]:
    """Return all rows, or the first and the last ones with None between."""
    half = MOST_ROWS // 2
    return list(rows) if len(rows) <= MOST_ROWS else [*rows[:half], None, *rows[-half:]]


def wire_cells(rows: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Return the cells for bytes and latency of several steps; latency is left out if there is none.

    A row has `step_s`, `step_bytes_s` and `step_latency_s`.
    """
    shown = {"bytes": "step_bytes_s"} | (
        {"latency": "step_latency_s"} if any(row["step_latency_s"] for row in rows) else {}
    )
    return [{name: format_seconds(row[key], of=row["step_s"]) for name, key in shown.items()} for row in rows]


def step_cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the cells of steps on networks: seconds by cause and the load of the busiest link.

    Intervals, first visits and exchanges of replicas get columns if any row has them; collectives, if they take time.
    """
    known = {name for row in rows for name, value in row.items() if value is not None}
    collects = any(row["collective_s"] for row in rows)
    table = []
    for row, wire in zip(rows, wire_cells(rows), strict=True):
        step_s = row["step_s"]
        cells = {"network": str(row["network"]), "step": format_seconds(step_s)}
        if "step_low_s" in known:
            cells["90 % interval"] = interval_words(row)
        cells |= wire
        cells |= {head: format_seconds(row[name]) for name, head in KINDS.items() if name in known}
        if collects:
            cells["collectives"] = format_seconds(row["collective_s"], of=step_s)
        cells["update, driver"] = format_seconds(row["outside_s"], of=step_s)
        cells["busiest link"] = f"{row['busiest_link']:.0%} busy"
        table.append(cells)
    return table


def interval_words(row: Mapping[str, Any]) -> str:
    """Return the ends of the interval of a step."""
    return f"{format_seconds(row['step_low_s'])} to {format_seconds(row['step_high_s'])}"


def size_cells(dense_bytes: float, wire_bytes: float) -> dict[str, str]:
    """Return the cells of bytes before and after compression."""
    factor = f"{dense_bytes / wire_bytes:.2f}x" if wire_bytes else "-"
    return {"dense": format_bytes(dense_bytes), "wire": format_bytes(wire_bytes), "factor": factor}


def show_notes(out: Console, notes: Iterable[str]) -> None:
    """Print the assumptions and limits of figures, one line each."""
    for note in notes:
        write_line(out, f"- {note}")


def show_costs(
    costs: FleetCosts,
    expected: Callable[[FleetCosts, Network], Expected],
    networks: Sequence[Network],
    figures: Mapping[str, Any],
) -> None:
    """Print the expected step on each network, its causes, and the money of 1,000 steps; add it to the figures for JSON."""
    rows = []
    for network, row in zip(networks, figures["networks"], strict=True):
        own = expected(costs, network)
        row["expected"] = own._asdict()
        rows.append({"network": repr(network), **costs.cells(own)})
    out = console()
    out.print(table_of(rows, "A step with churn and money"))
    show_notes(out, [costs.words()])
