"""What a person sees of a run: a bar while it goes, and tables at its end."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from raysim.network.memory import format_bytes

if TYPE_CHECKING:
    from raysim.pipeline.training import Training
    from raysim.records import Run


def show_training(training: Training) -> None:
    """Train to the end, with a bar that shows loss and bytes."""
    events = training.events()  # raises before anything is shown
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        config = training.config
        task = progress.add_task(config.name, total=training.plan.num_steps, note="starting stages")
        wire = dense = 0
        for event in events:
            row = event.row
            if event.kind == "step":
                wire += row["wire_bytes"]
                dense += row["dense_bytes"]
                note = f"loss {row['loss']:.4f}  wire {format_bytes(wire)} of {format_bytes(dense)} dense"
                progress.update(task, completed=row["step"] + 1, note=note)
            elif event.kind == "eval" and row["batchnorm"] == "running":
                progress.console.print(
                    f"step {row['step']}: evaluated with compression {row['mode']}: "
                    f"loss {row['loss']:.4f}, accuracy {row['accuracy']:.4f}",
                    highlight=False,
                )
            elif event.kind == "restart":
                progress.console.print(f"step {row['step']}: stages start again ({row['reason']})", highlight=False)


def tables(run: Run) -> None:
    """Print what crossed each link, and the last evaluations."""
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width to fit
    links = run.links
    if len(links):
        table = Table("link", title=f"Sent over {links['step'].nunique()} steps")
        table.add_column("codec", overflow="fold")
        for name in ("dense", "wire", "factor", "fidelity", "encode", "decode"):
            table.add_column(name, justify="right", no_wrap=True)
        summed = links.groupby(
            ["direction", "boundary", "stage", "codec"], dropna=False, sort=False, as_index=False
        ).agg({"dense_bytes": "sum", "wire_bytes": "sum", "fidelity": "mean", "encode_s": "sum", "decode_s": "sum"})
        for row in summed.to_dict("records"):
            table.add_row(
                _link(row),
                row["codec"],
                format_bytes(row["dense_bytes"]),
                format_bytes(row["wire_bytes"]),
                f"{row['dense_bytes'] / row['wire_bytes']:.2f}x" if row["wire_bytes"] else "-",
                "-" if math.isnan(row["fidelity"]) else f"{row['fidelity']:.4f}",
                f"{row['encode_s']:.2f} s",
                f"{row['decode_s']:.2f} s" if row["decode_s"] else "-",
            )
        console.print(table)
    evals = run.evals
    if len(evals):
        table = Table("compression", "batchnorm", title=f"Evaluated after {evals['step'].max()} steps")
        for name in ("loss", "accuracy", "perplexity"):
            table.add_column(name, justify="right")
        for row in evals[evals["step"] == evals["step"].max()].to_dict("records"):
            figures = (f"{row[name]:.4f}" for name in ("loss", "accuracy", "perplexity"))
            table.add_row(str(row["mode"]), str(row["batchnorm"]), *figures)
        console.print(table)
    about = run.row
    restarts = f", {about['restarts']} restarts" if about["restarts"] else ""
    console.print(
        f"{about['status']} in {about['seconds']:.1f} s{restarts}: {run.folder}", soft_wrap=True, highlight=False
    )


def _link(row: dict[Hashable, Any]) -> str:
    """Return what a row of `links` is of, in few words."""
    if row["direction"] == "tied":
        return f"tied, stage {row['stage']:.0f}"
    if row["direction"] == "replica_gradient":
        return f"replicas of {row['stage']:.0f}"
    arrow = "->" if row["direction"] == "forward" else "<-"
    return f"{row['boundary']:.0f} {arrow} {row['boundary'] + 1:.0f}"
