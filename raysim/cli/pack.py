"""Writing many runs into a few files."""

from __future__ import annotations

from typing import Annotated

import typer

from raysim.cli.shared import check_runs, fail


def pack(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="A folder, or a bucket's URI, with runs or studies at any depth.")
    ],
    target: Annotated[str, typer.Argument(metavar="PACK", help="Folder to write, new or empty.")],
) -> None:
    """Write the finished and diverged runs of a folder, one file for each table: to send, to commit, to read fast from a bucket.

    Reports, findings and replays read a pack as they read the folder. Checkpoints and logs stay behind.

    For example: raysim pack results/study study-packed
    """
    check_runs(folder, "no folder there has a run.parquet")
    from raysim.analysis import AnalysisError
    from raysim.analysis import pack as write_pack

    try:
        packed = write_pack(folder, target)
    except AnalysisError as error:
        fail(str(error), 2)
    for problem in packed.problems:
        typer.echo(f"- {problem}")
    runs = "1 run" if packed.runs == 1 else f"{packed.runs} runs"
    studies = f" and {packed.studies} {'study' if packed.studies == 1 else 'studies'}" if packed.studies else ""
    left = f" Runs that are not over were left out: {packed.left_out}." if packed.left_out else ""
    typer.echo(f"{target} holds {runs}{studies}, in {packed.size / 1e6:.2f} MB.{left}")
