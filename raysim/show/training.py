"""Display of a run in a terminal: a progress bar, and tables at its end."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from raysim.records.run import exceeds_dense, with_replicas
from raysim.training.progress import Pace, header, print_progress, sentence
from raysim.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from raysim.records import Run
    from raysim.training.run import Training


def show_training(training: Training) -> None:
    """Train to the end: with a bar on a terminal, in lines of text elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        _show_bar(training, console)
    else:
        print_progress(training)


def _show_bar(training: Training, console: Console) -> None:
    """Train to the end, with a bar of steps and one of the current evaluation."""
    events = training.events()  # raises before anything is shown
    for line in header(training):
        console.print(line, highlight=False, markup=False)
    note = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # shortened in a narrow terminal
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=6),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}", table_column=note, markup=False),
    )
    pace, wire, dense = Pace(training), 0, 0
    num_samples = training.plan.num_test_samples
    with Progress(*columns, console=console, expand=True) as progress:
        steps = progress.add_task("steps", total=training.plan.end_step, note=f"starting {training.engine.kind}")
        training.phases.say = partial(progress.console.print, highlight=False, markup=False)
        evaluation = progress.add_task("evaluation", total=num_samples, note="", visible=False)
        for event in events:
            row = event.row
            if event.kind == "step":
                step = row["step"] + 1
                pace.add(row)
                wire, dense = wire + row["wire_bytes"], dense + row["dense_bytes"]
                words = f"{pace.left(step)} left, loss {row['loss']:.4f}, {pace.speed()}"
                sent = f"wire {format_bytes(wire)} of {format_bytes(dense)} dense"
                progress.update(steps, completed=step, note=f"{words}, {sent}")
                if (long := pace.warning(step)) is not None:
                    progress.console.print(long, highlight=False, markup=False)
            elif event.kind == "evaluating":
                turn = f"{row['turn'] + 1} of {len(training.evaluator.passes)}, compression {row['mode']}"
                progress.update(evaluation, completed=row["samples"], note=turn, visible=True)
            else:
                progress.update(evaluation, visible=False)
                progress.console.print(sentence(event), highlight=False, markup=False)


def tables(run: Run) -> None:
    """Print the bytes on each link, the last evaluations and the time of the run."""
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width to fit
    links, evals = run.links, run.evals
    if len(links):
        console.print(_links_table(links))
        if (run.row.get("exchange_period") or 1) > 1:
            console.print(exchange_words(links), highlight=False, soft_wrap=True)
        if (sentence := exceeds_dense(links, int(run.row["num_replicas"]))) is not None:
            console.print(sentence, highlight=False, soft_wrap=True)
    if len(evals):
        console.print(_evals_table(run, evals))
    about = run.row
    restarts = f", {about['restarts']} restarts" if about["restarts"] else ""
    parts = (
        f"start {about['start_s']:.1f} s",
        f"{len(run.steps)} steps {run.steps['seconds'].sum():.1f} s",
        f"evaluation {evals['seconds'].sum():.1f} s",
    )
    console.print(
        f"{about['status']} in {about['seconds']:.1f} s ({', '.join(parts)}{restarts}): {run.folder}",
        soft_wrap=True,
        highlight=False,
    )


def _links_table(links: pd.DataFrame) -> Table:
    """Return the bytes, fidelity and codec seconds of each link."""
    table = Table("link", title=f"Sent over {links['step'].nunique()} steps")
    table.add_column("codec", overflow="fold")
    for name in ("dense", "wire", "factor", "fidelity", "encode", "decode"):
        table.add_column(name, justify="right", no_wrap=True)
    keys = ["direction", "boundary", "stage", "tensor", "replicas", "codec"]
    groups = with_replicas(links).groupby(keys, dropna=False, sort=False, as_index=False)
    summed = groups.agg(
        {"dense_bytes": "sum", "wire_bytes": "sum", "fidelity": "mean", "encode_s": "sum", "decode_s": "sum"}
    )
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
    return table


def _evals_table(run: Run, evals: pd.DataFrame) -> Table:
    """Return the last evaluations, with compression on and off."""
    both = (evals["batchnorm"] == "estimated").any()  # statistics of training, and estimated ones
    heads = ("compression", "batchnorm") if both else ("compression",)
    table = Table(*heads, title=f"Evaluated after {evals['step'].max()} steps")
    # perplexity is the exponential of the loss, and unusual outside of language models
    hidden = {"loss", *({"perplexity"} if next(iter(run.measures)) == "accuracy" else ())}
    names = ("loss", *(name for name in run.measures if name not in hidden))
    for name in names:
        table.add_column(name, justify="right")
    for row in evals[evals["step"] == evals["step"].max()].to_dict("records"):
        figures = (f"{row[name]:.4f}" for name in names)
        table.add_row(*(str(row["mode" if head == "compression" else head]) for head in heads), *figures)
    return table


def exchange_words(links: pd.DataFrame) -> str:
    """Return a sentence on exchanges that replicas make only in some steps: bytes of one exchange, of a mean step, and the maximum."""
    sent = links[links["direction"] == "replica_gradient"].groupby("step")["wire_bytes"].sum()
    exchanges = sent[sent > 0]
    words = f"Replicas exchanged something in {len(exchanges)} of {len(sent)} steps"
    if not len(exchanges):
        return f"{words}."
    each, mean, most = (format_bytes(float(size)) for size in (exchanges.mean(), sent.mean(), exchanges.max()))
    return f"{words}: {each} an exchange, {most} at most, {mean} a step in the mean."


def _link(row: dict[Hashable, Any]) -> str:
    """Return the link of a row of `links` in a few words, with the replicas if these differ."""
    if row["direction"] == "tied":
        return f"tied, stage {row['stage']:.0f}"
    if row["direction"] == "replica_gradient":
        return f"replicas of {row['stage']:.0f}"
    arrow = "->" if row["direction"] == "forward" else "<-"
    link = f"{row['boundary']:.0f} {arrow} {row['boundary'] + 1:.0f}"
    return ", ".join(filter(None, (link, row["tensor"], row["replicas"])))
