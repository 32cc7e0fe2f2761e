"""Output of `raysim validate`: a line for each measurement, and the tables of cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from raysim_benchmarks.validate import count, trips
from raysim_benchmarks.validate.cases import Pipeline
from raysim_benchmarks.validate.measure import validate
from raysim_benchmarks.validate.table import line, sentence, summaries, write


def measure_cases(out: Path, rounds: int, pipelines: Sequence[Pipeline]) -> None:
    """Measure and predict pipelines; print a line for each case and a sentence for each group of cases."""
    cases = []
    for measured in validate(out, pipelines, rounds):
        cases += measured
        for case in measured:
            typer.echo(line(case))
        write(cases, out)
    for summary in summaries(cases):
        typer.echo(sentence(summary))
    typer.echo(f"Every case is in {out / 'cases.md'} and {out / 'cases.parquet'}.")


def count_bytes(out: Path, rounds: int, hosts: list[int] | None, codecs: list[str] | None) -> None:
    """Count the bytes on every cable, and print a line for each."""
    for cable in count.count_bytes(out, hosts or [2, 3, 4], codecs or count.CODECS, rounds):
        typer.echo(str(cable))


def measure_trips(out: Path, rounds: int) -> None:
    """Measure the trips of packets, and print a line for each way."""
    for way in trips.measure_trips(out, rounds):
        ends = f"host {way.source} -> host {way.target}" if way.wire_bytes else "end of a step"
        size = f"{way.wire_bytes} bytes, " if way.wire_bytes else ""
        typer.echo(
            f"{ends}: {size}{1000 * way.latency_s:g} ms: {way.trips:.2f} one-way trips, "
            f"half of the steps {way.low:.2f} to {way.high:.2f}"
        )
