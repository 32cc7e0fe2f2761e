"""The option `--costs`: money and churn beside the seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.terminal import console, show_notes, table_of
from raysim.units import format_seconds

if TYPE_CHECKING:
    from raysim.analysis import Replay
    from raysim.network.costs import Expected, FleetCosts
    from raysim.network.topology import Network

CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        help="A .toml file of your own costs: gpu_hour and egress_gb in money; departure_hours, restart_s, checkpoint_s, step_times.",
    ),
]


def parse_costs(file: Path | None) -> FleetCosts | None:
    """Return the costs of `--costs`."""
    from raysim.network.costs import load_costs

    return None if file is None else load_costs(file)


def show_costs(
    costs: FleetCosts,
    expected: Callable[[FleetCosts, Network], Expected],
    networks: Sequence[Network],
    figures: Mapping[str, Any],
) -> None:
    """Print the expected step on each network, its causes, and the money of 1,000 steps; add it to the figures for JSON."""
    rows = []
    for network, row in zip(networks, figures["networks"], strict=True):
        own = expected(costs, network)
        row["expected"] = own._asdict()
        rows.append({"network": repr(network), **cost_cells(costs, own)})
    out = console()
    out.print(table_of(rows, "A step with churn and money"))
    show_notes(out, [costs.words()])


def replayed(replay: Replay, costs: FleetCosts, network: Network) -> Expected:
    """Return the expected step of a recorded run, the mean of its priced steps."""
    from raysim.network.costs import expected_step

    kinds = [(1 / len(replay.profiles), timeline) for timeline in replay.timelines(network)]
    period = len(kinds) / max(1, int(replay.exchanging.sum())) if replay.num_replicas > 1 else 1.0
    return expected_step(costs, float(replay.step_seconds([network]).mean()), kinds, period=period)


def cost_cells(costs: FleetCosts, expected: Expected) -> dict[str, str]:
    """Return the cells of an expected step, its money and its causes; "never" if no step is ever completed."""
    finite = math.isfinite(expected.step_s)
    cells = {"expected step": format_seconds(expected.step_s) if finite else "never"} if costs.churns else {}
    if costs.cost:
        cells["1,000 steps"] = costs.money_text(1000 * expected.money) if finite else "never"
    if costs.step_times is not None:
        cells["by stragglers"] = f"{expected.straggling - 1:+.1%}"
    if costs.departure_hours < math.inf:
        every = expected.checkpoint_every_s
        cells["by departures"] = f"{expected.departures - 1:+.1%}" if finite else "all"
        cells["checkpoint every"] = "joins again" if every is None else format_seconds(every)
    return cells
