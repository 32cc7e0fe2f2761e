"""Train a recipe, show its progress, and export its model to other libraries."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import ending_on_signals, fail, leave
from raysim.cli.options import Dashboard, JsonFile, Overrides, Recipe, Trust, write_json
from raysim.cli.terminal import echo
from raysim.storage.files import os_sentence
from raysim.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from raysim.config import RunConfig
    from raysim.records import Run
    from raysim.training.events import Interruption
    from raysim.training.run import Training


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    engine: Annotated[str, typer.Option(help="ray: one actor a stage. inline: all in this process.")] = "ray",
    out: Annotated[str | None, typer.Option(help="The run's own folder (default: results/<name>/<run_id>).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    check_repeat: Annotated[
        bool,
        typer.Option("--check-repeat", help="First take a few steps twice, and name the first layer that differs."),
    ] = False,
    dashboard: Dashboard = False,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for resources on a cluster with other users.")
    ] = 0.0,
    json_file: JsonFile = None,
) -> None:
    """Train a pipeline with compressed links, and record it as Parquet.

    For example: raysim train digits-cnn forward='TopK(0.1)' backward='Quantize(8)'
    """
    for option, value in {"--dashboard": dashboard, "--wait": wait}.items():
        if value and engine != "ray":
            fail(f"`{option}` is Ray's and needs `--engine` ray, but got {engine}.", 2)
    from raysim.training.events import Phases, to_stderr

    with ending_on_signals() as ending, Phases(to_stderr) as phases:
        config = _checked_config(recipe, overrides or [], out, engine, resume=resume)
        from raysim.engine.connection import listen_on_loopback

        listen_on_loopback()
        phases.enter("the import of torch")
        from raysim.training.run import Training

        training = Training(
            config,
            out=out,
            engine=engine,
            resume=resume,
            ending=ending,
            wait_s=wait,
            dashboard=dashboard,
            phases=phases,
        )
        if check_repeat:
            _check_repeat(training)
        words = ["raysim", "train", recipe, *(overrides or [])]
        words += ["--engine", engine, "--out", str(training.folder), "--resume"]
        again = f"To continue: {shlex.join(words)}"
        training.engine.on_stuck = lambda loss: leave(loss, again, ending)
        _train(training, again, ending, json_file)


def _train(training: Training, again: str, ending: Interruption, json_file: Path | None) -> None:
    """Train to the end and print the tables; `again` says how to resume."""
    from raysim.pipeline.errors import StageError, WorkerLostError
    from raysim.pipeline.state import CheckpointError
    from raysim.records import Run

    try:
        show_training(training)
    except KeyboardInterrupt:
        fail(f"interrupted. {again}", ending.exit_code)
    except WorkerLostError as error:
        fail(f"the run failed: {str(error).rstrip('.')}. {again}", 1)
    except (StageError, CheckpointError) as error:
        fail(f"the run failed: {str(error).rstrip('.')}. Its records are in {training.folder}.", 1)
    except OSError as error:  # from writing to its folder or to the terminal
        if ending.wanted:
            fail(f"interrupted. {again}", ending.exit_code)
        fail(f"the run failed: {os_sentence(error)} When that is fixed, {again[0].lower()}{again[1:]}", 1)
    run = Run(training.folder)
    show_run(run)
    write_json(run_figures(run), json_file)
    if run.status == "diverged":
        fail(f"the run diverged: {run.row['error']}.", 1)


def _checked_config(recipe: str, overrides: list[str], out: str | None, engine: str, *, resume: bool) -> RunConfig:
    """Return the run's configuration; raises ConfigError if a check that needs no torch fails."""
    from raysim.config import ConfigError, read_config
    from raysim.training.start import check_least_memory, check_start

    config = read_config(recipe, overrides)
    check_start(out, engine, resume=resume)
    check_least_memory("inline" if os.environ.get("RAY_ADDRESS") else engine)  # a cluster has its own memory
    from raysim.workloads.data import bind_data
    from raysim.workloads.options import check_num_stages, num_layers

    try:
        bind_data(config.data.name, config.data.options)
        layers = num_layers(config.model.name, config.model.options)
        if layers is not None and config.cuts is None:
            check_num_stages(config.stages, layers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _check_repeat(training: Training) -> None:
    """Fail if the run's first steps differ when repeated."""
    from raysim.training.repeat import STEPS, first_difference

    layer = first_difference(training.config, training.workload.data)
    if layer is not None:
        fail(
            f"the run is not deterministic: {layer} differs when the same steps run twice. It could not be resumed "
            "to the same bits. Draw random numbers from torch's generator, which raysim seeds, and keep no state outside "
            "of parameters and buffers.",
            1,
        )
    echo(f"The first {STEPS} steps give the same bits when they are taken twice.", err=True)


def export(
    run: Annotated[str, typer.Argument(help="Folder of a run with `model` = 'hf'.")],
    folder: Annotated[str, typer.Argument(help="Folder to write.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write LoRA's adapter alone, as peft does.")] = False,
    trust: Trust = None,
    json_file: JsonFile = None,
) -> None:
    """Write the model of a run as transformers' `save_pretrained` does.

    For example: raysim export results/run my-model
    """
    from raysim.training.export import save_pretrained

    save_pretrained(run, folder, adapter=adapter)
    echo(f"{folder} holds the model: `transformers` loads it with `from_pretrained({folder!r})`.")
    write_json({"run": run, "folder": folder, "adapter": adapter}, json_file)


def show_training(training: Training) -> None:
    """Train to the end, with progress bars on a terminal and lines of text elsewhere."""
    from raysim.console import PlainConsole
    from raysim.training.progress import print_progress

    console = PlainConsole(stderr=True)
    if console.is_terminal:
        _show_bar(training, console)
    else:
        print_progress(training)


def _show_bar(training: Training, console: Console) -> None:
    """Train to the end, with one bar for the steps and one for the current evaluation."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    from raysim.training.progress import Pace, event_sentence, header

    events = training.events()  # raises before anything is shown
    for line in header(training):
        console.print(line)
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
        training.phases.say = partial(progress.console.print)
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
                    progress.console.print(long)
            elif event.kind == "evaluating":
                turn = f"{row['turn'] + 1} of {len(training.evaluator.passes)}, compression {row['mode']}"
                progress.update(evaluation, completed=row["samples"], note=turn, visible=True)
            else:
                progress.update(evaluation, visible=False)
                progress.console.print(event_sentence(event))


def show_run(run: Run) -> None:
    """Print the bytes on each link, the last evaluations and the time of the run."""
    from raysim.cli.terminal import console, write_line
    from raysim.records.run import exceeds_dense

    out = console(width=120)
    links, evals, about = run.links, run.evals, run.row
    if len(links):
        out.print(_links_table(links))
        if (about.get("exchange_period") or 1) > 1:
            write_line(out, exchange_words(links))
        warning = exceeds_dense(links, int(about["num_replicas"]))
        if warning is not None:
            write_line(out, warning)
    if len(evals):
        out.print(_evals_table(run, evals))
    restarts = f", {about['restarts']} restarts" if about["restarts"] else ""
    parts = (
        f"start {about['start_s']:.1f} s",
        f"{len(run.steps)} steps {run.steps['seconds'].sum():.1f} s",
        f"evaluation {evals['seconds'].sum():.1f} s",
    )
    write_line(out, f"{about['status']} in {about['seconds']:.1f} s ({', '.join(parts)}{restarts}): {run.folder}")


def run_figures(run: Run) -> dict[str, Any]:
    """Return the content of `show_run`, for JSON, with the columns of the records."""
    evals = run.evals
    names = ("run_id", "status", "error", "warning", "restarts", "seconds", "start_s")
    return {
        "run": str(run.folder),
        **{name: run.row.get(name) for name in names},
        "steps": len(run.steps),
        "measures": list(run.measures),
        "links": _summed_links(run.links).to_dict("records") if len(run.links) else [],
        "evals": evals[evals["step"] == evals["step"].max()].to_dict("records"),
    }


def _summed_links(links: pd.DataFrame) -> pd.DataFrame:
    """Return bytes and codec seconds of each link over all steps, and its mean fidelity."""
    from raysim.records.run import with_replicas

    keys = ["direction", "boundary", "stage", "tensor", "replicas", "codec"]
    groups = with_replicas(links).groupby(keys, dropna=False, sort=False, as_index=False)
    return groups.agg(
        {"dense_bytes": "sum", "wire_bytes": "sum", "fidelity": "mean", "encode_s": "sum", "decode_s": "sum"}
    )


def _links_table(links: pd.DataFrame) -> Table:
    """Return the bytes, fidelity and codec seconds of each link."""
    from raysim.cli.terminal import size_cells, table_of

    summed = _summed_links(links)
    rows = [
        {
            "link": _link({str(name): value for name, value in row.items()}),
            "codec": row["codec"],
            **size_cells(row["dense_bytes"], row["wire_bytes"]),
            "fidelity": "-" if math.isnan(row["fidelity"]) else f"{row['fidelity']:.4f}",
            "encode": f"{row['encode_s']:.2f} s",
            "decode": f"{row['decode_s']:.2f} s" if row["decode_s"] else "-",
        }
        for row in summed.to_dict("records")
    ]
    title = f"Sent over {links['step'].nunique()} steps"
    return table_of(rows, title, text=["link"], fold=["codec"], no_wrap=True)


def _evals_table(run: Run, evals: pd.DataFrame) -> Table:
    """Return the last evaluations, with compression on and off."""
    from raysim.cli.terminal import table_of

    heads = {"compression": "mode"}
    if (evals["batchnorm"] == "estimated").any():  # with statistics of training, or estimated ones
        heads["batchnorm"] = "batchnorm"
    # perplexity is the exponential of the loss, and unusual outside of language models
    hidden = {"loss", *({"perplexity"} if next(iter(run.measures)) == "accuracy" else ())}
    names = ("loss", *(name for name in run.measures if name not in hidden))
    rows = [
        {head: str(row[column]) for head, column in heads.items()} | {name: f"{row[name]:.4f}" for name in names}
        for row in evals[evals["step"] == evals["step"].max()].to_dict("records")
    ]
    return table_of(rows, f"Evaluated after {evals['step'].max()} steps", text=list(heads))


def exchange_words(links: pd.DataFrame) -> str:
    """Return a sentence on occasional exchanges: their mean and largest bytes, and the mean bytes of a step."""
    sent = links[links["direction"] == "replica_gradient"].groupby("step")["wire_bytes"].sum()
    exchanges = sent[sent > 0]
    words = f"Replicas exchanged something in {len(exchanges)} of {len(sent)} steps"
    if not len(exchanges):
        return f"{words}."
    each, mean, most = (format_bytes(float(size)) for size in (exchanges.mean(), sent.mean(), exchanges.max()))
    return f"{words}: {each} an exchange, {most} at most, {mean} a step in the mean."


def _link(row: Mapping[str, Any]) -> str:
    """Return the link of a row of `links` in a few words, with the replicas if these differ."""
    if row["direction"] == "tied":
        return f"tied, stage {row['stage']:.0f}"
    if row["direction"] == "replica_gradient":
        return f"replicas of {row['stage']:.0f}"
    arrow = "->" if row["direction"] == "forward" else "<-"
    link = f"{row['boundary']:.0f} {arrow} {row['boundary'] + 1:.0f}"
    return ", ".join(filter(None, (link, row["tensor"], row["replicas"])))
