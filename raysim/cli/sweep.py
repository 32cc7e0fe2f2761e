"""The command that searches settings, and the list of studies."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import Annotated

import typer

from raysim.cli.shared import (
    StudyTransport,
    bad_input_in_one_sentence,
    check_transport,
    ending_on_signals,
    fail,
    leave,
)
from raysim.files import os_sentence


def sweep(
    study: Annotated[str, typer.Argument(help="A study's name (see `raysim studies`), or a .toml or .py file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its base.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Configurations trained at most, instead of the study's.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each, from 0 on, instead of the study's.")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Trials at once (default: as many as have a CPU, and memory, each).")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The study's own folder, or a bucket's URI (default: results/<name>/<time>).")
    ] = None,
    confirm: Annotated[
        int | None,
        typer.Option(
            help="Number of fresh seeds on which the chosen setting is trained and judged, instead of the study's number."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in --out.")] = False,
    address: Annotated[str | None, typer.Option(help="A running cluster, host:port or auto.")] = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds to wait for room on a cluster that others use (default: 0 at the start)."),
    ] = None,
    transport: StudyTransport = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard, on loopback.")] = False,
) -> None:
    """Search the settings of a model by real training, and print the best ones.

    For example: raysim sweep quickstart --out results/first-sweep
    """
    from raysim.training.phases import Phases, to_stderr

    check_transport(transport)
    with bad_input_in_one_sentence(), ending_on_signals() as ending, ExitStack() as stack, Phases(to_stderr) as phases:
        from raysim.engine.access import listen_on_loopback
        from raysim.plugins import trusting
        from raysim.sweeps.study_file import read_study

        chosen = read_study(
            study, overrides or [], trials=trials, seeds=seeds, jobs=jobs, confirm=confirm, transport=transport
        )
        stack.enter_context(trusting(*chosen.modules))  # named by the user, in the study
        listen_on_loopback(address)
        phases.enter("the import of torch and Ray")
        from raysim.analysis import AnalysisError
        from raysim.places import PlaceError
        from raysim.records import RecordsError
        from raysim.sweeps.confirm import confirming
        from raysim.sweeps.progress import show_sweep
        from raysim.sweeps.runner import Sweep, SweepError
        from raysim.sweeps.verdicts import show_confirmation, show_power, show_result

        one = Sweep(chosen, out=out, resume=resume, address=address, dashboard=dashboard, wait_s=wait)
        phases.enter(None)
        options = [
            ("--trials", trials),
            ("--seeds", seeds),
            ("--jobs", jobs),
            ("--confirm", confirm),
            ("--transport", transport),
            ("--address", address),
            ("--wait", wait),
            ("--out", one.store.out),
        ]
        words = [word for option, value in options if value is not None for word in (option, str(value))]
        again = shlex.join(["raysim", "sweep", study, *(overrides or []), *words, "--resume"])

        def on_lost(loss: str) -> None:
            ending.signal = ending.signal or one.halt.signal  # a sweep takes the signals while it runs
            once = ", once a cluster is up" if one.address else ""
            leave(loss, f"To go on{once}: {again}", ending)

        one.on_lost = on_lost
        try:
            show_sweep(one)
            show_result(one)
            if (ended := [row for row in one.rows if row.ended]) and all(row.status == "failed" for row in ended):
                fail(f"all {len(ended)} trials failed, the first of them: {ended[0].error}", 1)
            if chosen.confirm:
                second = confirming(one)
                if second is not None:
                    second.on_lost = on_lost
                    show_power(one, second)
                    show_sweep(second)
                show_confirmation(second)
        except KeyboardInterrupt as error:
            ending.signal = ending.signal or next(iter(error.args), None)  # a sweep takes the signals while it runs
            fail(
                f"interrupted. To go on: {again}" if one.begun else "interrupted before anything began.",
                ending.exit_code,
            )
        except OSError as error:
            fail(f"the sweep failed: {os_sentence(error)} Once that is mended, to go on: {again}", 1)
        except (SweepError, AnalysisError, PlaceError, RecordsError) as error:  # of a bucket that no longer answers
            fail(f"{str(error).rstrip('.')}. To go on: {again}", 1)


def studies() -> None:
    """List the studies of this package, each with a line about its subject."""
    from importlib import resources

    found = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for entry in resources.files("raysim.sweeps").joinpath("studies").iterdir()
        if entry.name.endswith(".toml")
    }
    for name, first in sorted(found.items()):
        typer.echo(f"{name:<{max(map(len, found))}}  {first}")
