"""Money and churn of steps, for `--costs`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from raysim.cli.terminal import table_of, write_line
from raysim.network.costs import Expected, FleetCosts
from raysim.units import format_seconds


def show_costs(out: Console, costs: FleetCosts, steps: Sequence[tuple[str, Expected]]) -> None:
    """Print the expected step by network, its causes, and the money of 1,000 steps."""
    rows = [{"network": network, **cost_cells(costs, expected)} for network, expected in steps]
    out.print(table_of(rows, "A step with churn and money"))
    write_line(out, f"- {costs.words()}")


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


def cost_figures(expected: Expected | None) -> dict[str, Any]:
    """Return an expected step for JSON: null if no step is ever completed; nothing without costs."""
    if expected is None:
        return {}
    figures = {
        name: value if value is None or math.isfinite(value) else None for name, value in expected._asdict().items()
    }
    return {"expected": figures}
