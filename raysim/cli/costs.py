"""The option `--costs`: money and churn, in addition to the seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.terminal import console, show_notes, table_of

if TYPE_CHECKING:
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
        rows.append({"network": repr(network), **costs.cells(own)})
    out = console()
    out.print(table_of(rows, "A step with churn and money"))
    show_notes(out, [costs.words()])
