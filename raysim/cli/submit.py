"""Sending a sweep to a cluster as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysim.cli.shared import bad_input_in_one_sentence, fail


def submit(
    study: Annotated[str, typer.Argument(help="A study's name (see `raysim studies`), or a .toml or .py file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its base.")
    ] = None,
    out: Annotated[str, typer.Option(help="A bucket's URI, or an absolute path that every node sees.")] = ...,  # type: ignore[assignment]
    cluster: Annotated[str | None, typer.Option(metavar="FILE", help="The cluster, by the file of `ray up`.")] = None,
    address: Annotated[str | None, typer.Option(metavar="URL", help="The cluster, by its dashboard's URL.")] = None,
    fetch: Annotated[Path | None, typer.Option(help="A new folder to copy the results to at the end.")] = None,
    files: Annotated[
        Path | None,
        typer.Option(help="A folder to send along, with the modules of your own (default: that of the study's file)."),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Configurations trained at most, instead of the study's.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each, from 0 on, instead of the study's.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Trials at once.")] = None,
    confirm: Annotated[int | None, typer.Option(help="Fresh seeds that judge the choice.")] = None,
    wait: Annotated[float | None, typer.Option(min=0, help="Seconds to wait for room on the cluster.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in --out.")] = False,
) -> None:
    """Run a sweep as a job of a Ray cluster, and print its output. Ctrl-C leaves the job to itself.

    For example: raysim submit quickstart --cluster cluster.yaml --out s3://my-bucket/quickstart --fetch results/quickstart
    """
    with bad_input_in_one_sentence():
        from raysim.config import ConfigError
        from raysim.notation import known_words
        from raysim.sweeps.remote_cluster import Cluster
        from raysim.sweeps.study_file import study_names
        from raysim.sweeps.submit import JobError
        from raysim.sweeps.submit import submit as send

        path = Path(study)
        if path.suffix in (".toml", ".py"):
            if not path.is_file():
                raise ConfigError(f"The study {study!r} cannot be read: there is no such file.")
            files = files or path.parent
            if not path.resolve().is_relative_to(files.resolve()):
                raise ConfigError(f"`--files` {files} must hold the study's file, but {study} lies elsewhere.")
            study = str(path.resolve().relative_to(files.resolve()))
        elif study not in study_names():
            known = known_words(study, study_names(), rest="; or give a .toml or .py file")
            raise ConfigError(f"Unknown study {study!r}.{known}")
        values = {
            "--trials": trials,
            "--seeds": seeds,
            "--jobs": jobs,
            "--confirm": confirm,
            "--wait": wait,
            "--out": out,
        }
        options = [word for name, value in values.items() if value is not None for word in (name, str(value))]
        words = ["sweep", study, *(overrides or []), *options, "--address", "auto", *(["--resume"] if resume else [])]
        try:
            code = send(words, Cluster.named(cluster, address), out, files=files, fetch=fetch)
        except KeyboardInterrupt as interruption:
            fail(" ".join(getattr(interruption, "__notes__", ["interrupted before a job was sent."])), 130)
        except JobError as error:
            fail(f"{error}.", 1)
    if code:
        raise typer.Exit(code)
