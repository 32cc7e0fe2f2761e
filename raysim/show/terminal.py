"""Parts shared by tables: the console, workers, notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from raysim.units import format_seconds

MOST_ROWS = 16  # workers of one network; of more, the first and the last are shown

PARTS = {
    "compute_s": "compute",
    "codec_s": "codec",
    "overhead_s": "calls",
    "contention_s": "contention",
    "wait_s": "wire wait",
    "bubble_s": "bubble",
    "collective_s": "collectives",
    "outside_s": "update, driver",
}

CRITICAL = {
    "overhead": "calls",
    "path": "host overhead of packets",
    "queue": "packets queueing",
    "collective": "collectives",
}


def console() -> Console:
    """Return the console of tables, with a fixed width for a file or a pipe."""
    out = Console()
    if not out.is_terminal:
        out.width = 132
    return out


def write_line(out: Console, text: str) -> None:
    """Print a text as it is: without colours, markup or broken lines."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def show_workers(out: Console, networks: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> None:
    """Print the parts of every worker's step, network by network; a row adds up to the step."""
    used = _used([worker for _, workers in networks for worker in workers])
    table = Table("network", "worker", title="Where a worker's time goes")
    for name in used:
        table.add_column(name, justify="right")
    for network, workers in networks:
        for i, worker in enumerate(both_ends(len(workers))):
            label = network if i == 0 else ""
            if worker is None:
                table.add_row(label, *["..."] * (1 + len(used)))
                continue
            row = workers[worker]
            step_s = sum(row[name] for name in PARTS)
            cells = (format_seconds(row[name], of=step_s) for name in PARTS if PARTS[name] in used)
            table.add_row(label, str(row["worker"]), *cells)
        table.add_section()
    out.print(table)


def critical_words(network: str, seconds: Mapping[str, float]) -> str:
    """Return the critical path of a step in a line; "path" and "queue" are a packet's way to its wire."""
    total = sum(seconds.values()) or 1.0
    shares = sorted(((value / total, kind) for kind, value in seconds.items()), reverse=True)
    parts = ", ".join(f"{CRITICAL.get(kind, kind)} {share:.0%}" for share, kind in shares if share >= 0.005)
    return f"{network}: the critical path is {parts or 'empty'}."


def _used(rows: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Return the parts with a column: calls and contention only if there are any."""
    always = ("compute_s", "codec_s", "wait_s", "bubble_s")
    return [text for name, text in PARTS.items() if name in always or any(row[name] for row in rows)]


def both_ends(count: int) -> list[int | None]:
    """Return all indices, or the first and the last ones with None between."""
    if count <= MOST_ROWS:
        return list(range(count))
    half = MOST_ROWS // 2
    return [*range(half), None, *range(count - half, count)]


def by_name(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of a frame with text for keys."""
    return {str(name): value for name, value in row.items()}


def show_notes(out: Console, notes: Iterable[str]) -> None:
    """Print the assumptions and limits of figures, one line each."""
    for note in notes:
        write_line(out, f"- {note}")
