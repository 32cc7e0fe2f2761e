"""Search settings on this machine, on its Ray cluster, or as a job of another cluster."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import ending_on_signals, fail, leave
from raysim.cli.options import Dashboard, JsonFile, StudyTransport, write_json
from raysim.storage.files import os_sentence

if TYPE_CHECKING:
    from raysim.sweeps.runner import Sweep
    from raysim.sweeps.submit import Cluster
    from raysim.training.events import Interruption

Study = Annotated[str, typer.Argument(help="A study's name (see `raysim studies`), or a .toml or .py file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its base.")]
Trials = Annotated[int | None, typer.Option(help="Configurations trained at most, instead of the study's.")]
Seeds = Annotated[int | None, typer.Option(help="Seeds of each, from 0 on, instead of the study's.")]
Race = Annotated[
    bool,
    typer.Option(
        "--race", help="Train dense and settings in parts, and a setting only as long as it may be the answer."
    ),
]
Budget = Annotated[
    str | None, typer.Option(help="What a race may spend: 90min or 3h of the sweep, '2 GPU hours', or money, '40 EUR'.")
]
Price = Annotated[
    float | None, typer.Option(min=0, help="Of all machines of the sweep together, for a budget in money.")
]
Screen = Annotated[
    bool | None,
    typer.Option(
        "--screen/--no-screen",
        help="Drop settings that break trained weights at once (default: in a race, or with several seeds).",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the study in --out.")]


def sweep(
    study: Study,
    overrides: Overrides = None,
    trials: Trials = None,
    seeds: Seeds = None,
    jobs: Annotated[
        int | None, typer.Option(help="Trials at once (default: as many as have a CPU, and memory, each).")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The study's own folder, or a bucket's URI (default: results/<name>/<time>).")
    ] = None,
    confirm: Annotated[
        int | None,
        typer.Option(
            help="Held-out seeds on which the chosen settings are trained and judged, instead of the study's."
        ),
    ] = None,
    race: Race = False,
    budget: Budget = None,
    price_per_hour: Price = None,
    screen: Screen = None,
    resume: Resume = False,
    address: Annotated[str | None, typer.Option(help="A running cluster, host:port or auto.")] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds to wait for resources on a cluster with other users (default: 0 at the start)."
        ),
    ] = None,
    transport: StudyTransport = None,
    dashboard: Dashboard = False,
    json_file: JsonFile = None,
) -> None:
    """Search the settings of a model by real training, and print the best ones.

    For example: raysim sweep quickstart --out results/first-sweep
    """
    from raysim.training.events import Phases, to_stderr

    with ending_on_signals() as ending, ExitStack() as stack, Phases(to_stderr) as phases:
        from raysim.engine.connection import listen_on_loopback
        from raysim.plugins import trusting
        from raysim.sweeps.study_file import read_study
        from raysim.training.start import check_least_memory

        limits: dict[str, Any] = {"trials": trials, "seeds": seeds, "jobs": jobs, "confirm": confirm}
        limits |= {"budget": budget, "price_per_hour": price_per_hour, "transport": transport}
        checked = read_study(study, overrides or [], **limits, race=race, screen=screen)
        stack.enter_context(trusting(*checked.modules))  # the user named them in the study
        listen_on_loopback(address)
        if not (address or os.environ.get("RAY_ADDRESS")):  # a cluster's nodes have their own memory
            check_least_memory("ray")
        phases.enter("the import of torch and Ray")
        from raysim.sweeps.runner import Sweep

        started = Sweep(checked, out=out, resume=resume, address=address, dashboard=dashboard, wait_s=wait)
        phases.enter(None)
        resources = {"address": address, "wait": wait, "out": started.store.out}
        words = arguments(
            "sweep", study, overrides, **limits, **resources, race=race, **_screening(screen), resume=True
        )
        run_sweep(started, shlex.join(["raysim", *words]), ending)
        if json_file is not None:
            from raysim.sweeps.verdicts import sweep_figures

            write_json(sweep_figures(started), json_file)


def _screening(screen: bool | None) -> dict[str, bool]:
    """Return the option that says whether to screen, for `arguments`; none by default."""
    return {} if screen is None else {"screen" if screen else "no_screen": True}


def arguments(command: str, subject: str, overrides: list[str] | None, **options: object) -> list[str]:
    """Return the arguments of a command with these options; those that are None or False are left out."""
    words = [command, subject, *(overrides or [])]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words


def run_sweep(sweep: Sweep, again: str, ending: Interruption, show: Callable[[Sweep], None] | None = None) -> None:
    """Run a sweep and its confirmation; `again` is the command that resumes it, `show` replaces the usual printer of results."""
    from raysim.analysis import AnalysisError
    from raysim.records import RecordsError
    from raysim.storage.places import PlaceError
    from raysim.sweeps.confirm import confirming
    from raysim.sweeps.progress import show_sweep
    from raysim.sweeps.runner import SweepError
    from raysim.sweeps.verdicts import show_confirmation, show_power, show_result

    def on_lost(loss: str) -> None:
        ending.signal = ending.signal or sweep.halt.signal  # a running sweep handles signals itself
        once = ", once a cluster is up" if sweep.address else ""
        leave(loss, f"To continue{once}: {again}", ending)

    sweep.on_lost = on_lost
    try:
        show_sweep(sweep)
        (show or show_result)(sweep)
        if (ended := [row for row in sweep.rows if row.ended]) and all(row.status == "failed" for row in ended):
            fail(f"all {len(ended)} trials failed, the first of them: {ended[0].error}", 1)
        if sweep.study.confirm:
            confirmation = confirming(sweep)
            if confirmation is not None:
                confirmation.on_lost = on_lost
                show_power(sweep, confirmation)
                show_sweep(confirmation)
            show_confirmation(confirmation)
    except KeyboardInterrupt as error:
        ending.signal = ending.signal or next(iter(error.args), None)  # a running sweep handles signals itself
        fail(
            f"interrupted. To continue: {again}" if sweep.begun else "interrupted before anything began.",
            ending.exit_code,
        )
    except OSError as error:
        fail(f"the sweep failed: {os_sentence(error)} When that is fixed, resume: {again}", 1)
    except (SweepError, AnalysisError, PlaceError, RecordsError) as error:  # such as a bucket that no longer answers
        fail(f"{str(error).rstrip('.')}. To continue: {again}", 1)


def submit(
    study: Study,
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(help="A bucket's URI, or an absolute path that every node sees.")] = ...,  # type: ignore[assignment]
    cluster: Annotated[str | None, typer.Option(metavar="FILE", help="The cluster, by the file of `ray up`.")] = None,
    address: Annotated[str | None, typer.Option(metavar="URL", help="The cluster, by its dashboard's URL.")] = None,
    fetch: Annotated[Path | None, typer.Option(help="A new folder to copy the results to at the end.")] = None,
    files: Annotated[
        Path | None,
        typer.Option(help="A folder to send along, with the modules of your own (default: that of the study's file)."),
    ] = None,
    trials: Trials = None,
    seeds: Seeds = None,
    jobs: Annotated[int | None, typer.Option(help="Trials at once.")] = None,
    confirm: Annotated[int | None, typer.Option(help="Held-out seeds that judge the choice.")] = None,
    wait: Annotated[float | None, typer.Option(min=0, help="Seconds to wait for resources on the cluster.")] = None,
    race: Race = False,
    budget: Budget = None,
    price_per_hour: Price = None,
    screen: Screen = None,
    resume: Resume = False,
) -> None:
    """Run a sweep as a job of a Ray cluster, and print its output. Ctrl-C leaves the job running.

    For example: raysim submit quickstart --cluster cluster.yaml --out s3://my-bucket/quickstart --fetch results/quickstart
    """
    from raysim.sweeps.submit import Cluster

    files, study = _sent_files(study, files)
    limits: dict[str, Any] = {"trials": trials, "seeds": seeds, "jobs": jobs, "confirm": confirm}
    limits |= {"wait": wait, "out": out, "budget": budget, "price_per_hour": price_per_hour}
    words = arguments(
        "sweep", study, overrides, **limits, address="auto", race=race, **_screening(screen), resume=resume
    )
    run_job(words, Cluster.named(cluster, address), out, files=files, fetch=fetch)


def run_job(words: list[str], cluster: Cluster, out: str, *, files: Path | None, fetch: Path | None = None) -> None:
    """Run `raysim` with `words` as a job of a cluster, see `raysim.sweeps.submit.submit`; exit if it fails."""
    from raysim.sweeps.submit import JobError
    from raysim.sweeps.submit import submit as send

    try:
        code = send(words, cluster, out, files=files, fetch=fetch)
    except KeyboardInterrupt as interruption:
        fail(" ".join(getattr(interruption, "__notes__", ["interrupted before a job was sent."])), 130)
    except JobError as error:
        fail(f"{error}.", 1)
    if code:
        raise typer.Exit(code)


def _sent_files(study: str, files: Path | None) -> tuple[Path | None, str]:
    """Return the folder to send, if any, and the study's name or path in the job; raises ConfigError."""
    from raysim.config import ConfigError
    from raysim.sweeps.study_file import study_names, unknown_study

    path = Path(study)
    if path.suffix not in (".toml", ".py"):
        if study not in study_names():
            raise unknown_study(study)
        return files, study
    if not path.is_file():
        raise ConfigError(f"The study {study!r} cannot be read: there is no such file.")
    files = files or path.parent
    if not path.resolve().is_relative_to(files.resolve()):
        raise ConfigError(f"`--files` {files} must hold the study's file, but {study} lies elsewhere.")
    return files, str(path.resolve().relative_to(files.resolve()))
