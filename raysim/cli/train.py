"""Training a recipe, and the list of recipes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.cli.shared import Recipe, bad_input_in_one_sentence, ending_on_signals, fail, os_sentence

if TYPE_CHECKING:
    from raysim.training.ending import Ending


def train(
    recipe: Recipe,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
    engine: Annotated[str, typer.Option(help="ray: one actor a stage. inline: all in this process.")] = "ray",
    out: Annotated[str | None, typer.Option(help="The run's own folder (default: results/<name>/<run_id>).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
) -> None:
    """Train a pipeline with compressed links, and leave Parquet behind.

    For example: raysim train digits-cnn forward='TopK(0.1)' backward='Quantize(8)'
    """
    with bad_input_in_one_sentence(), ending_on_signals() as ending:
        _train(recipe, overrides or [], engine, out, resume, ending)


def _train(recipe: str, overrides: list[str], engine: str, out: str | None, resume: bool, ending: Ending) -> None:
    from raysim.config import ConfigError, read_config
    from raysim.training.start import check_start
    from raysim.workloads.data import bind_data

    config = read_config(recipe, overrides)
    check_start(out, engine, resume=resume)
    try:
        bind_data(config.data.name, config.data.options)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    # torch from here on
    from raysim.pipeline.errors import StageError, WorkerLostError
    from raysim.pipeline.state import CheckpointError
    from raysim.show.training import show_training, tables
    from raysim.training.run import Training

    training = Training(config, out=out, engine=engine, resume=resume, ending=ending)
    words = ["raysim", "train", recipe, *overrides, "--engine", engine, "--out", str(training.folder), "--resume"]
    again = f"To go on: {shlex.join(words)}"
    try:
        show_training(training)
    except KeyboardInterrupt:
        fail(f"interrupted. {again}", ending.exit_code)
    except WorkerLostError as error:
        fail(f"the run failed: {error}. {again}", 1)
    except (StageError, CheckpointError) as error:
        fail(f"the run failed: {error}. Its records are in {training.folder}.", 1)
    except OSError as error:  # of its folder, or of the terminal
        if ending.wanted:
            fail(f"interrupted. {again}", ending.exit_code)
        fail(f"the run failed: {os_sentence(error)} Once that is mended, {again[0].lower()}{again[1:]}", 1)
    from raysim.records import Run

    run = Run(training.folder)
    tables(run)
    if run.status == "diverged":
        fail(f"the run diverged: {run.row['error']}.", 1)


def recipes() -> None:
    """List the recipes, each with a line on what it trains."""
    from importlib import resources

    from raysim.config import recipe_names

    names = recipe_names()
    for name in names:
        first = resources.files("raysim.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:<{max(map(len, names))}}  {first.lstrip('# ')}")
