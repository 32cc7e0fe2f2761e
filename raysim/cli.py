"""The command line. Every command imports what it needs itself, so that `raysim --help` imports neither torch nor Ray."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    pass

app = typer.Typer(
    help="Which compression of pipeline-parallel training is safe for your model, and how much faster is it on your network?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure raysim on this machine, as ratios of two things timed in turn.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; bad input is one sentence and exit code 2, without a traceback."""
    app()


@contextmanager
def _bad_input_in_one_sentence() -> Iterator[None]:
    from raysim.config import ConfigError

    try:
        yield
    except ConfigError as error:
        _fail(str(error), 2)


def _fail(sentence: str, code: int) -> NoReturn:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(f"raysim: {sentence}", markup=False)
    raise typer.Exit(code)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `raysim recipes`), or a .toml file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
    engine: Annotated[str, typer.Option(help="ray: one actor a stage. inline: all in this process.")] = "ray",
    out: Annotated[Path | None, typer.Option(help="The run's own folder [default: results/<name>/<run_id>].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
) -> None:
    """Train a pipeline with compressed links, and leave Parquet behind.

    For example: raysim train digits-cnn forward='TopK(0.1)' backward='Quantize(8)'
    """
    with _bad_input_in_one_sentence():
        from raysim.config import read_config
        from raysim.pipeline.faults import StageError, WorkerLostError
        from raysim.pipeline.training import Training
        from raysim.progress import show_training, tables

        training = Training(read_config(recipe, overrides or []), out=out, engine=engine, resume=resume)
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            show_training(training)
        except KeyboardInterrupt:
            _fail(
                f"interrupted. To go on: raysim train {recipe} {' '.join(overrides or [])} --out {training.folder} --resume",
                130,
            )
        except (StageError, WorkerLostError) as error:
            _fail(f"the run failed: {error}. Its records are in {training.folder}.", 1)
        from raysim.records import Run

        run = Run(training.folder)
        tables(run)
        if run.status == "diverged":
            _fail(f"the run diverged: {run.row['error']}.", 1)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


@app.command()
def recipes() -> None:
    """List the recipes, each with its first line."""
    from importlib import resources

    from raysim.config import recipe_names

    names = recipe_names()
    for name in names:
        first = resources.files("raysim.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:<{max(map(len, names))}}  {first.lstrip('# ')}")


@bench.command("pipeline")
def bench_pipeline(
    stages: Annotated[list[int] | None, typer.Option(help="Numbers of stages [default: 2 and 4].")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of runs.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """The same GPT under torch.distributed.pipelining over gloo and under raysim's Ray engine, in turn."""
    from raysim.bench.pipeline import bench_pipeline as measure

    result = measure(stages or [2, 4], pairs=pairs, steps=steps)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
