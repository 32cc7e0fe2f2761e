"""Step times on networks, for recorded runs and for forecasts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.costs import CostsFile, cost_figures, parse_costs, replayed, show_costs
from raysim.cli.exits import fail
from raysim.cli.options import (
    Averaging,
    Compute,
    ComputeProfile,
    Efficiency,
    JsonFile,
    Networks,
    Overrides,
    Recipe,
    TraceFile,
    Transport,
    Trust,
    Window,
    check_file,
    check_runs,
    check_transport,
    complete_recipe,
    parse_networks,
    write_json,
    write_trace_file,
)
from raysim.cli.terminal import echo

if TYPE_CHECKING:
    from raysim.forecast.forecast import Forecast
    from raysim.forecast.timings import TimedStep
    from raysim.network.costs import Expected, FleetCosts
    from raysim.network.topology import Network, Placement
    from raysim.storage.places import Place

Priced = Annotated[
    str,
    typer.Argument(
        help="A recipe's name (see `raysim recipes`), its .toml file, a file of timings, or a profile.",
        autocompletion=complete_recipe,
    ),
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
    dense = others[0] if others else None
    frame = price(priced, networks, against=dense, target=wanted)
    show_replay(priced, networks, frame, dense, wanted)
    if fleet is not None:
        show_costs(fleet, partial(replayed, priced), networks)
    if curve:
        show_curve(curve, price(priced, curve, against=dense), transport)
    if trace is not None:
        step, events = priced.trace(networks[0])
        write_trace_file(events, trace, f"step {step} on {networks[0]!r}")
    if json_file is not None:
        figures = replay_figures(priced, networks, frame, wanted)
        write_json(_with_costs(figures, fleet, partial(replayed, priced), networks), json_file)


def _with_costs(
    figures: dict[str, Any],
    fleet: FleetCosts | None,
    expected: Callable[[FleetCosts, Network], Expected],
    networks: list[Network],
) -> dict[str, Any]:
    """Return figures for JSON with the expected step on each network, if costs are given."""
    if fleet is not None:
        for row, network in zip(figures["networks"], networks, strict=True):
            row |= cost_figures(expected(fleet, network))
    return figures


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
    from raysim.analysis.data.folders import find
    from raysim.analysis.data.settings import is_probe
    from raysim.cli.terminal import counted
    from raysim.records import RecordsError, Run
    from raysim.records.packs import open_folder

    root = open_folder(folder)
    if not root.is_dir() or (root / "run.parquet").is_file():
        return []
    contents = find([root])
    paths = list(contents.runs.values())
    try:
        if paths and all(is_probe(Run(path).row) for path in paths):
            return sorted(paths, key=lambda path: int(path.name.partition("-")[0]))
    except (RecordsError, ValueError):
        pass  # an unreadable run is no candidate
    if paths:
        studies = f"{'the study' if len(contents.studies) == 1 else 'the studies'} {', '.join(contents.studies)}"
        runs = f"{counted(len(paths), 'run')}{f' of {studies}' if contents.studies else ''}"
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
    if json_file is not None:
        write_json(figures, json_file)


def simulate(
    recipe: Priced,
    network: Networks = None,
    window: Window = None,
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(help="A GPU by its datasheet, such as A100: or --profile.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A file of `raysim profile`: or --device.")] = None,
    efficiency: Efficiency = 0.4,
    codec_speed: Annotated[
        float | None,
        typer.Option(
            help="Dense bytes a second that codecs go over. By default of the device's datasheet; with --profile codecs are timed here."
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            callback=check_transport,
            help="The transport of packets: ray, nccl, gloo or bare (default: ray; bare of timings).",
        ),
    ] = None,
    averaging: Averaging = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="Hosts of all workers, replica by replica, such as 0,3,1,2: `raysim place` finds the fastest."
        ),
    ] = None,
    costs: CostsFile = None,
    trace: TraceFile = None,
    json_file: JsonFile = None,
) -> None:
    """Forecast a run on networks without training.

    For example: raysim simulate gpt2-wikitext2 num_microbatches=8 schedule=ZBH1 --device A100 --network 1gbps+20ms
    """
    networks, fleet = parse_networks(network, window), parse_costs(costs)
    from raysim.cli.forecast_tables import forecast_figures, show_forecast, show_timed, timed_figures
    from raysim.forecast.timings import read_timings
    from raysim.network.timeline_views import trace_events
    from raysim.network.transport import calibrated_transport

    timed = read_timings(recipe, overrides or [])
    if timed is None:
        plan = _forecast(
            recipe,
            overrides or [],
            device,
            profile=profile,
            efficiency=efficiency,
            codec_bytes_per_s=codec_speed,
            transport=transport or "ray",
            averaging=averaging,
        )
        plan = replace(plan, placement=_placement(placement, plan.timed()))
        show_forecast(plan, networks)
    else:
        for option, value in {"--device": device, "--profile": profile, "--codec-speed": codec_speed}.items():
            if value is not None:
                fail(f"`{option}` belongs to a recipe, but {recipe} already contains measured seconds.", 2)
        if transport is not None or averaging is not None:
            timed = timed.over(calibrated_transport(transport or "bare", averaging))
        timed = replace(timed, placement=_placement(placement, timed))
        show_timed(timed, networks)
    if fleet is not None:
        show_costs(fleet, (timed or plan).expected, networks)
    if trace is not None:
        timeline = (timed or plan).simulate(networks[0])
        write_trace_file(trace_events(timeline), trace, f"a step on {networks[0]!r}")
    if json_file is not None:
        figures = timed_figures(timed, networks) if timed else forecast_figures(plan, networks)
        write_json(_with_costs(figures, fleet, (timed or plan).expected, networks), json_file)


def _placement(text: str | None, step: TimedStep) -> Placement | None:
    """Return the placement of `--placement`."""
    from raysim.network.topology import Placement

    try:
        return None if text is None else Placement.parse(text, step.num_workers)
    except ValueError as error:
        fail(str(error).replace("`placement`", "`--placement`"), 2)


def place(
    recipe: Priced,
    network: Networks = None,
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(help="A GPU by its datasheet, such as A100, of a recipe.")] = None,
    transport: Annotated[
        str | None, typer.Option(callback=check_transport, help="As of `raysim simulate`, which takes the placement.")
    ] = None,
    averaging: Averaging = None,
    tries: Annotated[int, typer.Option(min=1, help="Most placements to price if there are too many for all.")] = 2000,
    json_file: JsonFile = None,
) -> None:
    """Find the hosts of a network on which a step is fastest: which stage of which replica goes where.

    For example: raysim place timings.toml --network office.csv
    """
    networks = parse_networks(network)
    from raysim.cli.forecast_tables import show_placed
    from raysim.forecast.place import place as search
    from raysim.forecast.timings import read_timings
    from raysim.network.transport import calibrated_transport

    step = read_timings(recipe, overrides or [])
    if step is None:
        plan = _forecast(recipe, overrides or [], device, transport=transport or "ray", averaging=averaging)
        step = plan.timed()
    elif device is not None:
        fail(f"`--device` belongs to a recipe, but {recipe} already contains measured seconds.", 2)
    elif transport is not None or averaging is not None:
        step = step.over(calibrated_transport(transport or "bare", averaging))
    placed = [search(step, each, most=tries) for each in networks]
    for each, found in zip(networks, placed, strict=True):
        show_placed(each, found)
    if json_file is not None:
        rows = [{"network": repr(each), **vars(found)} for each, found in zip(networks, placed, strict=True)]
        write_json({"networks": rows}, json_file)


def _forecast(recipe: str, overrides: list[str], device: str | None, **options: Any) -> Forecast:
    """Return the forecast of a recipe; errors of its configuration are reported before torch is imported."""
    from raysim.config import read_config
    from raysim.storage.files import is_file

    read_config(recipe, overrides)
    if device is not None and (is_file(device) or Path(device).suffix == ".json"):
        fail(f"`--device` names a GPU, but {device} is a file: --profile {device} takes a file of `raysim profile`.", 2)
    from raysim.forecast.forecast import forecast

    return forecast(recipe, *overrides, device=device, **options)


def profile(
    recipe: Recipe,
    out: Annotated[
        Path, typer.Option("--out", callback=check_file, help="The profile's file, for `raysim simulate --profile`.")
    ],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Recorded steps; as many and two more are run beside.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure the seconds of forwards and backwards on this machine, by a few steps in this process.

    For example: raysim profile topics-gpt --out topics.json
    """
    from raysim.cli.forecast_tables import profile_figures, show_profile
    from raysim.config import read_config
    from raysim.forecast.compute import record_profile
    from raysim.pipeline.errors import DivergedError, StageError

    try:
        measured = record_profile(read_config(recipe, overrides or []), num_steps=steps)
    except (DivergedError, StageError) as error:
        fail(f"the run failed: {error}.", 1)
    show_profile(measured)
    measured.save(out)
    echo(f"Profile: {out}")
    if json_file is not None:
        write_json({"profile": str(out)} | profile_figures(measured), json_file)


def calibrate(json_file: JsonFile = None) -> None:
    """Measure Ray's overhead on this machine; `replay`, `report` and `sweep` then use it in prices.

    Run it while the machine is idle. With RAY_ADDRESS it measures a node of that cluster.
    """
    from raysim.engine.calibrate import calibrate_ray
    from raysim.network.transport import save_calibration
    from raysim.pipeline.errors import WorkerLostError
    from raysim.units import format_bytes, format_seconds

    load = os.getloadavg()[0]
    try:
        costs, hops = calibrate_ray()
        path = save_calibration("ray", costs)
    except (WorkerLostError, OSError, ValueError) as error:
        fail(str(error), 1)
    for hop in hops:
        echo(
            f"A message of {format_bytes(hop.size)}: {format_seconds(hop.hop_s)} from worker to worker, "
            f"{format_seconds(hop.cpu_s)} of CPU in their processes."
        )
    driver = f"{format_seconds(costs.step_s)} and {format_seconds(costs.worker_s)} for each worker"
    echo(f"A step: {driver}. ({costs.source[0].upper()}{costs.source[1:]}.)")
    if load > (os.cpu_count() or 1) / 2:
        echo(f"Other work was running (load {load:.1f}): calibrate again when the machine is idle.")
    echo(f"Kept in {path}, in place of raysim's own figures; delete it to price with those again.")
    if json_file is not None:
        write_json(
            {"file": str(path), "load": load, "hops": [hop._asdict() for hop in hops]} | asdict(costs), json_file
        )
