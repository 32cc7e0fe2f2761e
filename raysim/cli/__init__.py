"""The command line. Commands import their own dependencies, so that `raysim --help` imports neither torch nor Ray."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from raysim.cli import advise, decide, forecasts, lists, recorded, screen, sweep, train
from raysim.cli.exits import Commands

HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=Commands,
    help="Which compression of pipeline-parallel training is safe for your model, and how much faster is it on your network?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
for command in (
    decide.decide,
    advise.advise,
    screen.screen,
    train.train,
    sweep.sweep,
    lists.studies,
    sweep.submit,
    recorded.replay,
    forecasts.simulate,
    forecasts.place,
    forecasts.profile,
    forecasts.calibrate,
    recorded.report,
    lists.recipes,
    lists.sites,
    train.export,
    recorded.pack,
    lists.keys,
):
    Commands.own[command.__name__] = command


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"raysim {version('raysim')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read the options given before a command."""


def main() -> None:
    """Run the command line; bad input gives one sentence and exit code 2, without a traceback."""
    try:
        app()
    finally:
        # The exit code is decided: ignore signals during Python's slow exit.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
