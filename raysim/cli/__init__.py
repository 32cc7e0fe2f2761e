"""The command line. Every command imports what it needs itself, so that `raysim --help` imports neither torch nor Ray."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from raysim.cli import bench, conclude, lists, price, sweep, train, validate
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
    train.train,
    sweep.sweep,
    lists.studies,
    sweep.submit,
    price.replay,
    conclude.findings,
    price.simulate,
    price.profile,
    price.calibrate,
    conclude.report,
    lists.recipes,
    train.export,
    conclude.pack,
    lists.keys,
    validate.validate,
):
    app.command()(command)

benches = typer.Typer(
    help="Measure raysim on this machine, as ratios of two things timed in turn.",
    no_args_is_help=True,
    context_settings=HELP,
)
app.add_typer(benches, name="bench")
for name, command in (
    ("pipeline", bench.bench_pipeline),
    ("hops", bench.bench_hops),
    ("links", bench.bench_links),
    ("ddp", bench.bench_ddp),
    ("backward", bench.bench_backward),
    ("plain", bench.bench_plain),
    ("adapter", bench.bench_adapter),
    ("probe", bench.bench_probe),
    ("simulate", bench.bench_simulate),
    ("sweep", bench.bench_sweep),
    ("nodes", bench.bench_nodes),
    ("codecs", bench.bench_codecs),
):
    benches.command(name)(command)


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
    """Take the options that stand before any command."""


def main() -> None:
    """Run the command line; bad input is one sentence and exit code 2, without a traceback."""
    try:
        app()
    finally:
        # The exit code is decided, and Python takes a while to end.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
