"""The table of objectives: each has a direction, a figure and a line in the documentation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.pricing.estimates import Estimate
from raysim.quality import MEASURES
from sweeps.objectives import DIRECTIONS, KNOWN, PRICED, Objective, figures

ROOT = Path(__file__).parents[2]


class PricedRun:
    """A run whose step takes a second, and which reaches a target after three of them."""

    def step_s(self, networks):
        return [Estimate(1.0, 0.9, 1.1) for _ in networks]

    def steps_to_target(self, target):
        return {"on": 3, "off": None}


def objective_of(name: str) -> Objective:
    target = "accuracy=0.9" if name.startswith("time_to_target") else None
    return Objective(name.replace("NETWORK", "1gbps"), target=target)


def test_the_table_holds_every_measure_and_every_price() -> None:
    assert {objective_of(name).kind for name in KNOWN} == {*(f"{name}_on" for name in MEASURES), "wire_bytes", *PRICED}


@pytest.mark.parametrize("name", KNOWN)
def test_every_objective_has_a_direction_and_a_figure(name: str) -> None:
    objective = objective_of(name)
    assert objective.direction in DIRECTIONS
    if objective.evaluates:
        assert objective.minimize is not MEASURES[objective.kind.removesuffix("_on")].higher
        assert Objective(f"{objective.kind.removesuffix('_on')}_off").direction == objective.direction
    row = {f"final_{objective.kind}": 0.25, "wire_bytes": 1000}
    figure = figures([objective], [SimpleNamespace(row=row)], [PricedRun()])[objective.name]
    expected = {"wire_bytes": 1000, "step_s": 1.0, "time_to_target_s": 3.0}
    assert figure.value == expected.get(objective.kind, 0.25)
    assert figures([objective], [SimpleNamespace(row={})], [PricedRun()])[objective.name].value == (
        expected[objective.kind] if objective.kind in PRICED else None
    )


@pytest.mark.parametrize("name", KNOWN)
def test_every_objective_is_documented(name: str) -> None:
    text = (ROOT / "docs" / "sweeps.md").read_text()
    assert f"`{name}`" in text
