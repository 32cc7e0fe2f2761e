"""Commands on recorded runs and studies: replay, report and pack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import fail
from raysim.cli.options import (
    Averaging,
    Compute,
    ComputeProfile,
    CostsFile,
    JsonFile,
    Networks,
    StudyCompute,
    StudyTransport,
    TraceFile,
    Transport,
    Trust,
    Window,
    check_averaging,
    check_runs,
    check_writable,
    parse_costs,
    parse_networks,
    write_json,
    write_trace_file,
)
from raysim.cli.terminal import echo, show_costs
from raysim.units import plural

if TYPE_CHECKING:
    from raysim.network.topology import Network
    from raysim.storage.places import Place

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


Bandwidths = Annotated[
    str | None,
    typer.Option(help="Also the step over a range such as 10mbps..10gbps, and where it crosses the step of --against."),
]


def replay(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR", help="The folder of a recorded run, or its URI in a bucket; or the folder of a probe."
        ),
    ],
    network: Networks = None,
    window: Window = None,
    against: Annotated[
        str | None, typer.Option(help="The folder or URI of the same run without compression: where does it pay?")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A quality to reach: accuracy=0.9, loss=0.5, r2=0.8; with a metric of your own name>=0.8."),
    ] = None,
    company: Annotated[
        str | None,
        typer.Option(
            help="The folder whose runs of the same job share their compute with it (default: the study or folder it lies in)."
        ),
    ] = None,
    profile: ComputeProfile = None,
    compute: Compute = "auto",
    transport: Transport = "ray",
    averaging: Averaging = None,
    costs: CostsFile = None,
    bandwidths: Bandwidths = None,
    trace: TraceFile = None,
    json_file: JsonFile = None,
    trust: Trust = None,
) -> None:
    """Price a recorded run, or the candidates of a probe, on networks, without training.

    For example: raysim replay results/digits-cnn/RUN --network 100mbps --network worldwide
    """
    curve = _parse_range(bandwidths, window) if bandwidths is not None else []
    networks = parse_networks(network, window) if network or not curve else curve[-1:]
    fleet = parse_costs(costs)
    check_runs(run, "it has no run.parquet")
    from raysim.analysis import Target, beside
    from raysim.analysis import replay as price
    from raysim.cli.replay_tables import replay_figures, show_curve, show_replay

    wanted = Target.parse(target) if target is not None else None
    options: dict[str, Any] = {"compute": compute, "profile": profile, "transport": transport, "averaging": averaging}
    candidates = _candidates(run)
    if candidates:
        alone = {
            "--against": against,
            "--target": target,
            "--bandwidths": bandwidths,
            "--trace": trace,
            "--costs": costs,
        }
        _replay_probe(run, candidates, networks, options, alone, json_file)
        return
    priced, *others = beside([run, *([against] if against is not None else [])], company, **options)
    check_averaging(averaging, priced.num_replicas)
    dense = others[0] if others else None
    frame = price(priced, networks, against=dense, target=wanted)
    figures = replay_figures(priced, networks, frame, wanted)
    show_replay(priced, networks, figures, dense, wanted)
    if fleet is not None:
        show_costs(fleet, priced.expected, networks, figures)
    if curve:
        show_curve(curve, price(priced, curve, against=dense), transport)
    if trace is not None:
        step, events = priced.trace(networks[0])
        write_trace_file(events, trace, f"step {step} on {networks[0]!r}")
    write_json(figures, json_file)


def _parse_range(text: str, window: str | None) -> list[Network]:
    """Return the networks of `--bandwidths`, with the windows of `--window`."""
    from raysim.network.presets import parse_bandwidths

    try:
        networks = parse_bandwidths(text)
    except ValueError as error:
        fail(f"`--bandwidths`: {error}", 2)
    return parse_networks([repr(network) for network in networks], window)


def _candidates(folder: str) -> list[Place]:
    """Return the candidates of a probe in a folder, dense first; none if it is a run. Fails if it holds other runs."""
    from raysim.analysis.data.folders import find_runs
    from raysim.analysis.data.settings import is_probe
    from raysim.records import RecordsError, Run
    from raysim.records.packs import open_folder

    root = open_folder(folder)
    if not root.is_dir() or (root / "run.parquet").is_file():
        return []
    contents = find_runs([root])
    paths = list(contents.runs.values())
    try:
        if paths and all(is_probe(Run(path).row) for path in paths):
            return sorted(paths, key=lambda path: int(path.name.partition("-")[0]))
    except (RecordsError, ValueError):
        pass  # an unreadable run is no candidate
    if paths:
        studies = f"{'the study' if len(contents.studies) == 1 else 'the studies'} {', '.join(contents.studies)}"
        runs = f"{plural(len(paths), 'run')}{f' of {studies}' if contents.studies else ''}"
        some = ", ".join([*map(str, paths[:3]), *(["..."] if len(paths) > 3 else [])])
        fail(f"`RUN_DIR` must be one run, but {folder} holds {runs}: {some}. Give one of them.", 2)
    return []


def _replay_probe(
    folder: str,
    candidates: list[Place],
    networks: list[Network],
    options: dict[str, Any],
    alone: Mapping[str, object],
    json_file: Path | None,
) -> None:
    """Price the candidates of a probe against dense; `alone` are the options for one run only."""
    from raysim.analysis import beside
    from raysim.analysis import replay as price
    from raysim.analysis.data.settings import candidate_name
    from raysim.analysis.report.tables import LIMIT, cost_words, smaller_runs
    from raysim.cli.replay_tables import probe_figures, show_probe

    for option, value in alone.items():
        if value is not None:
            fail(
                f"`{option}` is for one run, but {folder} holds the candidates of a probe: give one of its folders.", 2
            )
    replays = beside(candidates, folder, **options)
    frame = price(replays, networks, against=replays[0], split=False)
    commands = smaller_runs([candidate.row for candidate in replays])
    named = {candidate_name(candidate.row): candidate for candidate in replays}
    figures = probe_figures(named, frame, cost_words(replays[0].row), LIMIT, commands)
    show_probe(folder, replays, figures)
    write_json(figures, json_file)


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
        bool, typer.Option("--only", help="Leave out the presets, and show only the given networks.")
    ] = False,
    profile: ComputeProfile = None,
    compute: StudyCompute = None,
    transport: StudyTransport = None,
    costs: CostsFile = None,
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
        if value is not None and value not in known:
            fail(f"`{option}` must be {' or '.join(known)}, but got {value!r}.", 2)
    if only and not network:
        fail("`--only` needs at least one `--network`.", 2)
    given = parse_networks(network) if network else []
    own, fleet = [repr(each) for each in given], parse_costs(costs)
    from raysim.analysis.data.folders import SCREEN
    from raysim.records.packs import open_folder

    if not (open_folder(folder) / SCREEN).is_file():
        check_runs(folder, "no folder there has a run.parquet")
    target = _report_target(folder, out, form)
    from raysim.analysis.comparison.carry import Asked
    from raysim.analysis.report import NETWORKS, compose, write_report
    from raysim.cli.terminal import console

    unlike = next((repr(each) for each in given if given[own.index(repr(each))] != each), None)
    if unlike is not None:
        fail(f"`--network`: two networks are called {unlike}. Give one of them another `name`, or rename its file.", 2)
    networks = [*given, *(() if only else (preset for preset in NETWORKS if preset not in own))] if given else None
    with console().status(f"reading {folder}"):
        first = own[0] if own else None
        asked = None if at is None else Asked(at, tokens, stages, trained)
        page = compose(
            folder,
            networks,
            first=first,
            compute=compute,
            profile=profile,
            transport=transport,
            asked=asked,
            costs=fleet,
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
    target = local_path(out) if out else parent / ("report.html" if form == "html" else "report")
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
    write_json({"pack": target} | packed._asdict(), json_file)
