"""Compare prices with real links, on hosts made on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from raysim.cli.bench import on_made_hosts
from raysim.cli.exits import fail


def validate(
    rate: Annotated[
        list[str] | None, typer.Option(help="A link, such as 20mbps or 50mbps+20ms (default: the campaign's links).")
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="A codec both ways, or of replicas the method of their gradients.")
    ] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="A schedule (default: 1F1B).")] = None,
    hosts: Annotated[list[int] | None, typer.Option(min=2, max=8, help="Hosts, of all replicas (default: 2).")] = None,
    replicas: Annotated[int, typer.Option(min=1, max=8, help="Replicas, on hosts that meet at a switch.")] = 1,
    recipe: Annotated[str, typer.Option(help="A recipe or a configuration (default: a narrow GPT).")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of every case.")] = 5,
    trips: Annotated[
        bool, typer.Option("--trips", help="Measure how many times a packet pays the latency, instead of cases.")
    ] = False,
    count: Annotated[
        bool,
        typer.Option(
            "--count", help="Compare the bytes on every cable with the bytes in the records, instead of cases."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the cases' runs and of their table.")] = Path("results/validate"),
) -> None:
    """Predictions against real Ray clusters over real shaped links, on hosts made on this machine (Linux, root).

    Without `--rate`, `--codec`, `--schedule`, `--hosts`, `--replicas` and `--recipe` the whole campaign is run, else every
    combination of them. Runs that are in the folder already are not made again, so the same command goes on where one was killed.
    For example: raysim validate --rate 20mbps --rate 50mbps --codec 'TopK(0.1)' --hosts 3
    """
    with on_made_hosts():
        given = {"rate": rate, "schedule": schedule, "replicas": replicas > 1, "recipe": recipe}
        _check_alone(count, trips, given, {"hosts": hosts, "codec": codec})
        if trips:
            _measure_trips(out, rounds)
        elif count:
            _count_bytes(out, rounds, hosts, codec)
        else:
            own = bool(rate or codec or schedule or hosts or replicas > 1 or recipe)
            _measure_cases(out, rounds, (hosts, replicas, codec, schedule, rate, recipe) if own else None)


def _check_alone(count: bool, trips: bool, of_cases: Mapping[str, object], of_count: Mapping[str, object]) -> None:
    """End with one sentence where an option that only cases have, or only cases and `--count`, is given beside another."""
    if count and trips:
        fail("`--count` and `--trips` are measurements of their own: give one of them.", 2)
    chosen = "--count" if count else "--trips"
    for option, value in {**of_cases, **({} if count else of_count)}.items():
        if (count or trips) and value:
            fail(f"`--{option}` is for cases, not for `{chosen}`.", 2)


def _measure_cases(out: Path, rounds: int, own: tuple[Any, ...] | None) -> None:
    """Measure the campaign, or the user's own combinations: hosts, replicas, codecs, schedules, rates and recipe."""
    from raysim.validate.cases import DENSE_LINKS, campaign, pipelines
    from raysim.validate.measure import validate as measure
    from raysim.validate.table import line, sentence, summaries, write

    if own is None:
        chosen = campaign()
    else:
        hosts, replicas, codecs, schedules, rates, recipe = own
        chosen = list(
            pipelines(
                hosts or [max(2, replicas)],
                replicas,
                codecs or ["Identity"],
                schedules or ["1F1B"],
                rates or DENSE_LINKS,
                recipe,
            )
        )
    cases = []
    for found in measure(out, chosen, rounds):
        cases += found
        for case in found:
            typer.echo(line(case))
        write(cases, out)
    for summary in summaries(cases):
        typer.echo(sentence(summary))
    typer.echo(f"Every case is in {out / 'cases.md'} and {out / 'cases.parquet'}.")


def _count_bytes(out: Path, rounds: int, hosts: list[int] | None, codecs: list[str] | None) -> None:
    """Count the bytes on every cable, and print a line for each."""
    from raysim.validate.count import CODECS, count_bytes

    for found in count_bytes(out, hosts or [2, 3, 4], codecs or CODECS, rounds):
        typer.echo(str(found))


def _measure_trips(out: Path, rounds: int) -> None:
    """Measure the trips of packets, and print a line for each way."""
    from raysim.validate.trips import measure_trips

    for found in measure_trips(out, rounds):
        way = f"host {found.source} -> host {found.target}" if found.wire_bytes else "end of a step"
        size = f"{found.wire_bytes} bytes, "
        typer.echo(
            f"{way}: {size if found.wire_bytes else ''}{1000 * found.latency_s:g} ms: {found.trips:.2f} one-way trips, "
            f"half of the steps {found.low:.2f} to {found.high:.2f}"
        )
