"""Commands on recorded runs and studies: report and pack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysim.cli.exits import fail
from raysim.cli.options import (
    Compute,
    ComputeProfile,
    JsonFile,
    Networks,
    StudyTransport,
    Trust,
    check_runs,
    check_writable,
    is_screen,
    parse_networks,
    write_json,
)
from raysim.cli.terminal import echo
from raysim.units import plural

ReportOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="The page; with --format md a folder (default: report.html or report, in DIR or, for a bucket, here).",
    ),
]
Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="A folder, or a bucket's URI, with runs or studies at any depth.")
]


def report(
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A run, a study, or a folder of either at any depth; or a bucket's URI."),
    ],
    out: ReportOut = None,
    form: Annotated[
        str, typer.Option("--format", help="html: one page. md: Markdown, PNG figures, and their data as CSV.")
    ] = "html",
    network: Networks = None,
    only: Annotated[
        bool, typer.Option("--only", help="Leave out the presets that stand beside the networks given.")
    ] = False,
    profile: ComputeProfile = None,
    compute: Compute = "auto",
    transport: StudyTransport = None,
    trust: Trust = None,
    at: Annotated[
        float | None,
        typer.Option("--at", help="Carry harms to a model of this many parameters (1.3e9), from three sizes or more."),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens", help="With --at: its tokens, by default in proportion.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option("--stages", help="With --at: its stages, by default as trained.")
    ] = None,
    trained: Annotated[bool, typer.Option("--trained", help="With --at: it starts from trained weights.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Write the report of runs and studies: one page that needs nothing but a browser.

    Given networks come before the presets in the page's menu.
    For example: raysim report results -o report.html
    """
    if at is None and (tokens is not None or stages is not None or trained):
        fail("`--tokens`, `--stages` and `--trained` describe the model of `--at`: add `--at 1.3e9`.", 2)
    for option, value, known in (("--format", form, ("html", "md")), ("--compute", compute, ("auto", "cpu", "wall"))):
        if value not in known:
            fail(f"`{option}` must be {' or '.join(known)}, but got {value!r}.", 2)
    if only and not network:
        fail("`--only` must go with one `--network` or more.", 2)
    given = parse_networks(network) if network else []
    own = [repr(each) for each in given]
    if not is_screen(folder):
        check_runs(folder, "no folder there has a run.parquet")
    target = _report_target(folder, out, form)
    from raysim.analysis.comparison.carry import Asked
    from raysim.analysis.report import NETWORKS, compose, write_report
    from raysim.cli.terminal import console

    unlike = next((repr(each) for each in given if given[own.index(repr(each))] != each), None)
    if unlike is not None:
        fail(f"`--network`: two networks are called {unlike}. Give one of them another `name`, or its file another.", 2)
    networks = [*given, *(() if only else (preset for preset in NETWORKS if preset not in own))] if given else None
    with console().status(f"reading {folder}"):
        first = own[0] if own else None
        asked = None if at is None else Asked(at, tokens, stages, trained)
        page = compose(
            folder, networks, first=first, compute=compute, profile=profile, transport=transport, asked=asked
        )
        write_report(page, target, form)
    for problem in page.problems:
        echo(f"- {problem}")
    echo(f"Report of {page.subtitle[:-1]}: {target if form == 'html' else target / 'report.md'}")
    shown = own or [page.network]
    for sentence in (*page.carried, *page.decisions(shown)):
        echo(sentence)
    if json_file is not None:
        answers = [{"network": network, "answer": text} for network in shown for text in page.decisions([network])]
        path = str(target if form == "html" else target / "report.md")
        recommended = {network: page.recommended(network) for network in page.networks}
        figures = {"report": path, "networks": list(page.networks), "problems": list(page.problems)}
        write_json(figures | {"answers": answers, "carried": list(page.carried), "recommended": recommended}, json_file)


def _report_target(folder: str, out: Path | None, form: str) -> Path:
    """Return the page or folder to write; fails if it cannot be written."""
    from raysim.storage.places import in_bucket, local_path

    parent = Path() if in_bucket(folder) else local_path(folder)
    target = out or parent / ("report.html" if form == "html" else "report")
    if out is None and target.is_symlink():
        fail(f"{target} is a link, which the report would follow: give `--out`.", 2)
    if form == "html":
        check_writable("--out", target)
    elif target.exists() and not target.is_dir():
        fail(f"`--out` must be a folder with --format md, but {target} is a file.", 2)
    return target


def pack(
    folder: Folder,
    target: Annotated[str, typer.Argument(metavar="PACK", help="Folder to write, new or empty.")],
    json_file: JsonFile = None,
) -> None:
    """Pack the finished and diverged runs of a folder into one file per table, to send, commit, or read quickly from a bucket.

    Reports, findings and replays read a pack as they read the folder. Checkpoints and logs stay behind.

    For example: raysim pack results/study study-packed
    """
    check_runs(folder, "no folder there has a run.parquet")
    from raysim.analysis import pack as write_pack

    packed = write_pack(folder, target)
    for problem in packed.problems:
        echo(f"- {problem}")
    studies = f" and {packed.studies} {'study' if packed.studies == 1 else 'studies'}" if packed.studies else ""
    left = f" Runs that are not over were left out: {packed.left_out}." if packed.left_out else ""
    echo(f"{target} holds {plural(packed.runs, 'run')}{studies}, in {packed.size / 1e6:.2f} MB.{left}")
    if json_file is not None:
        write_json({"pack": target} | packed._asdict(), json_file)
