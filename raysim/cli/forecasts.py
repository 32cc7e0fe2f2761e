"""Steps that were never made: forecasts, placements, and the profiles and calibrations behind them."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.cli.exits import fail
from raysim.cli.options import (
    Averaging,
    CostsFile,
    JsonFile,
    Networks,
    Overrides,
    Recipe,
    TraceFile,
    Window,
    check_averaging,
    check_file,
    check_transport,
    complete_recipe,
    parse_costs,
    parse_networks,
    write_json,
    write_trace_file,
)
from raysim.cli.terminal import echo, show_costs
from raysim.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from raysim.forecast.forecast import Forecast
    from raysim.forecast.place import Placed
    from raysim.network.timed_step import TimedStep
    from raysim.network.topology import Network

Priced = Annotated[
    str,
    typer.Argument(
        help="A recipe's name (see `raysim recipes`), its .toml file, a file of timings, or a profile.",
        autocompletion=complete_recipe,
    ),
]

ProfileFile = Annotated[Path | None, typer.Option(help="A file written by `raysim profile`: or --device.")]


def simulate(
    recipe: Priced,
    network: Networks = None,
    window: Window = None,
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(help="A GPU by its datasheet, such as A100: or --profile.")] = None,
    profile: ProfileFile = None,
    efficiency: Annotated[
        float | None, typer.Option(help="With --device: share of its 16-bit peak that training reaches (default: 0.4).")
    ] = None,
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
    networks, fleet = list(dict.fromkeys(parse_networks(network, window))), parse_costs(costs)
    from raysim.cli.forecast_tables import add_wires, forecast_figures, show_forecast, show_timed, timed_figures
    from raysim.network.timed_step import TimedStep
    from raysim.network.timeline_views import trace_events
    from raysim.network.topology import Placement

    step = _predicted(
        recipe,
        overrides or [],
        transport,
        averaging,
        device=device,
        profile=profile,
        codec_speed=codec_speed,
        efficiency=efficiency,
    )
    check_averaging(averaging, step.num_replicas if isinstance(step, TimedStep) else step.config.num_replicas)
    if placement is not None:
        count = step.num_workers if isinstance(step, TimedStep) else step.num_workers * step.config.num_replicas
        try:
            step = replace(step, placement=Placement.parse(placement, count))
        except ValueError as error:
            fail(str(error).replace("`placement`", "`--placement`"), 2)
    if isinstance(step, TimedStep):
        figures = timed_figures(step, networks)
        show_timed(step, figures, networks)
    else:
        figures = forecast_figures(step, networks)
        show_forecast(step, figures)
    if fleet is not None:
        show_costs(fleet, step.expected, networks, figures)
    if trace is not None:
        write_trace_file(trace_events(step.simulate(networks[0])), trace, f"a step on {networks[0]!r}")
    if json_file is not None:
        add_wires(step, networks, figures)
        write_json(figures, json_file)


def _predicted(
    recipe: str,
    overrides: list[str],
    transport: str | None,
    averaging: str | None,
    *,
    device: str | None,
    profile: Path | None = None,
    codec_speed: float | None = None,
    efficiency: float | None = None,
) -> Forecast | TimedStep:
    """Return the step of a file of timings or a profile, or else the forecast of a recipe.

    Errors of the recipe's configuration are reported before torch is imported.
    """
    if efficiency is not None and device is None:
        fail("`--efficiency` is of the GPU of `--device`: measured seconds include it.", 2)
    from raysim.forecast.timings import read_timings

    timed = read_timings(recipe, overrides)
    if timed is not None:
        for option, value in {"--device": device, "--profile": profile, "--codec-speed": codec_speed}.items():
            if value is not None:
                fail(f"`{option}` belongs to a recipe, but {recipe} already contains measured seconds.", 2)
        if transport is None and averaging is None:
            return timed
        from raysim.network.transport import calibrated_transport

        return timed.over(calibrated_transport(transport or "bare", averaging))
    from raysim.config import read_config
    from raysim.storage.files import is_file

    read_config(recipe, overrides)
    if device is not None and (is_file(device) or Path(device).suffix == ".json"):
        fail(
            f"`--device` names a GPU, but {device} is a file: --profile {device} takes a file written by `raysim profile`.",
            2,
        )
    from raysim.forecast.compute import EFFICIENCY
    from raysim.forecast.forecast import forecast

    return forecast(
        recipe,
        *overrides,
        device=device,
        profile=profile,
        efficiency=EFFICIENCY if efficiency is None else efficiency,
        codec_bytes_per_s=codec_speed,
        transport=transport or "ray",
        averaging=averaging,
    )


def place(
    recipe: Priced,
    network: Networks = None,
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(help="A GPU by its datasheet, such as A100: or --profile.")] = None,
    profile: ProfileFile = None,
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
    from raysim.forecast.place import place as search
    from raysim.network.timed_step import TimedStep

    step = _predicted(recipe, overrides or [], transport, averaging, device=device, profile=profile)
    if not isinstance(step, TimedStep):
        step = step.timed()
    check_averaging(averaging, step.num_replicas)
    placed = [search(step, each, most=tries) for each in networks]
    for each, found in zip(networks, placed, strict=True):
        show_placed(each, found)
    rows = [{"network": repr(each), **vars(found)} for each, found in zip(networks, placed, strict=True)]
    write_json({"networks": rows}, json_file)


def show_placed(network: Network, placed: Placed) -> None:
    """Print the best placement, its gain, and the largest possible gap to the optimum."""
    from raysim.network.prices import times

    gain = placed.listed_s / placed.step_s
    than = f"{times(gain)} times as fast as" if gain > 1 else "no faster than"
    echo(
        f"{network!r}: a step takes {format_seconds(placed.step_s)}, {than} on the hosts in order "
        f"({format_seconds(placed.listed_s)}).",
    )
    tried = f"{plural(placed.tried, 'placement')} priced"
    if placed.exact:
        echo(f"None is faster: {tried}, which are all.")
    else:
        gap = placed.step_s / placed.bound_s - 1
        echo(
            f"{tried}, of more. None is faster than {format_seconds(placed.bound_s)}, the step if every link were the best: the gap is "
            f"at most {gap:.0%}.",
        )
    echo(f"For `raysim simulate`: --placement {','.join(map(str, placed.hosts))}")


def profile(
    recipe: Recipe,
    out: Annotated[
        Path, typer.Option("--out", callback=check_file, help="The profile's file, for `raysim simulate --profile`.")
    ],
    overrides: Overrides = None,
    steps: Annotated[
        int, typer.Option(help="Recorded steps; as many again and two more are run without recording.")
    ] = 5,
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
    figures = profile_figures(measured)
    show_profile(figures)
    measured.save(out)
    echo(f"Profile: {out}")
    write_json({"profile": str(out)} | figures, json_file)


def calibrate(json_file: JsonFile = None) -> None:
    """Measure Ray's overhead on this machine; `replay`, `report` and `sweep` then use it in prices.

    Run it while the machine is idle. With RAY_ADDRESS it measures a node of that cluster.
    """
    from raysim.engine.calibrate import calibrate_ray
    from raysim.network.transport import save_calibration
    from raysim.pipeline.errors import WorkerLostError

    load = os.getloadavg()[0]
    try:
        costs, hops = calibrate_ray()
        path = save_calibration("ray", costs)
    except (WorkerLostError, OSError) as error:
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
    write_json({"file": str(path), "load": load, "hops": [hop._asdict() for hop in hops]} | asdict(costs), json_file)
