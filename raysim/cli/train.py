"""Training a recipe, and its model for other libraries."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.cli.exits import ending_on_signals, fail, leave
from raysim.cli.options import Recipe, Trust
from raysim.storage.files import os_sentence

if TYPE_CHECKING:
    from raysim.config import RunConfig
    from raysim.training.run import Training


def train(
    recipe: Recipe,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
    engine: Annotated[str, typer.Option(help="ray: one actor a stage. inline: all in this process.")] = "ray",
    out: Annotated[str | None, typer.Option(help="The run's own folder (default: results/<name>/<run_id>).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    check_repeat: Annotated[
        bool,
        typer.Option("--check-repeat", help="First take a few steps twice, and name the first layer that differs."),
    ] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard, on loopback.")] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for resources on a cluster with other users.")
    ] = 0.0,
) -> None:
    """Train a pipeline with compressed links, and record it as Parquet.

    For example: raysim train digits-cnn forward='TopK(0.1)' backward='Quantize(8)'
    """
    if dashboard and engine != "ray":
        fail(f"`--dashboard` is Ray's and needs `--engine` ray, but got {engine}.", 2)
    from raysim.training.events import Phases, to_stderr

    with ending_on_signals() as ending, Phases(to_stderr) as phases:
        config = _checked_config(recipe, overrides or [], out, engine, resume=resume)
        from raysim.engine.connection import listen_on_loopback

        listen_on_loopback()
        phases.enter("the import of torch")
        from raysim.pipeline.errors import StageError, WorkerLostError
        from raysim.pipeline.state import CheckpointError
        from raysim.show.training import show_training, tables
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
        again = f"To go on: {shlex.join(words)}"
        training.engine.on_stuck = lambda loss: leave(loss, again, ending)
        try:
            show_training(training)
        except KeyboardInterrupt:
            fail(f"interrupted. {again}", ending.exit_code)
        except WorkerLostError as error:
            fail(f"the run failed: {str(error).rstrip('.')}. {again}", 1)
        except (StageError, CheckpointError) as error:
            fail(f"the run failed: {str(error).rstrip('.')}. Its records are in {training.folder}.", 1)
        except OSError as error:  # of its folder, or of the terminal
            if ending.wanted:
                fail(f"interrupted. {again}", ending.exit_code)
            fail(f"the run failed: {os_sentence(error)} Once that is mended, {again[0].lower()}{again[1:]}", 1)
        from raysim.records import Run

        run = Run(training.folder)
        tables(run)
        if run.status == "diverged":
            fail(f"the run diverged: {run.row['error']}.", 1)


def _checked_config(recipe: str, overrides: list[str], out: str | None, engine: str, *, resume: bool) -> RunConfig:
    """Return the run's configuration; raises ConfigError by what can be checked without torch."""
    from raysim.config import ConfigError, read_config
    from raysim.training.start import check_least_memory, check_start

    config = read_config(recipe, overrides)
    check_start(out, engine, resume=resume)
    check_least_memory("inline" if os.environ.get("RAY_ADDRESS") else engine)  # a cluster has its own
    from raysim.workloads.data import bind_data
    from raysim.workloads.model_depths import check_num_stages, num_layers

    try:
        bind_data(config.data.name, config.data.options)
        layers = num_layers(config.model.name, config.model.options)
        if layers is not None and config.cuts is None:
            check_num_stages(config.stages, layers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _check_repeat(training: Training) -> None:
    """Fail if the run's first steps, taken twice, differ."""
    from raysim.training.repeat import STEPS, first_difference

    layer = first_difference(training.config, training.workload.data)
    if layer is not None:
        fail(
            f"the run is not deterministic: {layer} differs when the same steps are taken twice. It could not be resumed "
            "to the same bits. Draw random numbers from torch's generator, which raysim seeds, and keep no state outside "
            "of parameters and buffers.",
            1,
        )
    typer.echo(f"The first {STEPS} steps give the same bits when they are taken twice.", err=True)


def export(
    run: Annotated[str, typer.Argument(help="Folder of a run with `model` = 'hf'.")],
    folder: Annotated[str, typer.Argument(help="Folder to write.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write LoRA's adapter alone, as peft does.")] = False,
    trust: Trust = None,
) -> None:
    """Write the model of a run as transformers' `save_pretrained` does.

    For example: raysim export results/run my-model
    """
    from raysim.training.export import save_pretrained

    save_pretrained(run, folder, adapter=adapter)
    typer.echo(f"{folder} holds the model: `transformers` loads it with `from_pretrained({folder!r})`.")
