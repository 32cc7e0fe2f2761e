"""What a person sees of a run: a bar while it goes, and tables at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from raysim.network.memory import format_bytes

if TYPE_CHECKING:
    from raysim.pipeline.training import Training
    from raysim.records import Run


def show_training(training: Training) -> None:
    """Train to the end, with a bar that shows loss and bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        config = training.config
        task = progress.add_task(config.name, total=training.plan.num_steps, note="starting stages")
        wire = dense = 0
        for event in training.events():
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
    links = run.links
    groups = links.groupby(["direction", "boundary", "codec"], dropna=False, sort=False)
    if len(links):
        table = Table("link", "codec", title=f"Sent over {links['step'].nunique()} steps")
        for name in ("packets", "dense", "wire", "factor", "fidelity", "encode s", "decode s"):
            table.add_column(name, justify="right")
        for (direction, boundary, codec), rows in groups:
            sums = rows[["packets", "dense_bytes", "wire_bytes", "encode_s", "decode_s"]].sum()
            fidelity = rows["fidelity"].mean()
            arrow = {"forward": "{0} -> {1}", "backward": "{0} <- {1}"}.get(direction, "tied")
            table.add_row(
                arrow.format(int(boundary), int(boundary) + 1) if direction != "tied" else "tied parameters",
                codec,
                f"{int(sums['packets'])}",
                format_bytes(sums["dense_bytes"]),
                format_bytes(sums["wire_bytes"]),
                f"{sums['dense_bytes'] / sums['wire_bytes']:.2f}x" if sums["wire_bytes"] else "-",
                "-" if fidelity != fidelity else f"{fidelity:.4f}",
                f"{sums['encode_s']:.2f}",
                f"{sums['decode_s']:.2f}",
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
    row = run.row
    restarts = f", {row['restarts']} restarts" if row["restarts"] else ""
    console.print(f"{row['status']} in {row['seconds']:.1f} s{restarts}: {run.folder}", soft_wrap=True, highlight=False)
