"""The command line. Every command imports what it needs itself, so that `raysim --help` imports neither torch nor Ray."""

from __future__ import annotations

import typer

from raysim.cli import bench, conclude, price, sweep, train

app = typer.Typer(
    help="Which compression of pipeline-parallel training is safe for your model, and how much faster is it on your network?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    train.train,
    sweep.sweep,
    sweep.studies,
    price.replay,
    conclude.findings,
    price.simulate,
    price.profile,
    conclude.report,
    train.recipes,
    train.keys,
    price.validate,
):
    app.command()(command)

benches = typer.Typer(
    help="Measure raysim on this machine, as ratios of two things timed in turn.", no_args_is_help=True
)
app.add_typer(benches, name="bench")
for name, command in (
    ("pipeline", bench.bench_pipeline),
    ("links", bench.bench_links),
    ("backward", bench.bench_backward),
    ("simulate", bench.bench_simulate),
    ("sweep", bench.bench_sweep),
    ("codecs", bench.bench_codecs),
):
    benches.command(name)(command)


def main() -> None:
    """Run the command line; bad input is one sentence and exit code 2, without a traceback."""
    app()
