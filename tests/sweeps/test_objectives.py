"""The table of objectives: each has a direction, a figure and a line in the documentation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from studies import write_study

from raysim.analysis.data.folders import StudyFile
from raysim.analysis.runs.estimates import Estimate
from raysim.config import ConfigError
from raysim.quality import MEASURES
from raysim.sweeps.objectives import DIRECTIONS, KNOWN, PRICED, Objective, figures
from raysim.sweeps.study_file import read_study

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
    figure = figures([objective], [SimpleNamespace(row=row)], lambda transport: [(PricedRun(), None)])[objective.name]  # type: ignore[list-item]
    expected = {"wire_bytes": 1000, "step_s": 1.0, "time_to_target_s": 3.0}
    assert figure.value == expected.get(objective.kind, 0.25)
    figure = figures([objective], [SimpleNamespace(row={})], lambda transport: [(PricedRun(), None)])[objective.name]  # type: ignore[list-item]
    assert figure.value == (expected[objective.kind] if objective.kind in PRICED else None)


@pytest.mark.parametrize("name", KNOWN)
def test_every_objective_is_documented(name: str) -> None:
    text = (ROOT / "docs" / "sweeps.md").read_text()
    assert f"`{name}`" in text


def test_a_price_names_its_transport() -> None:
    plain, named = Objective("step_s@1gbps"), Objective("step_s@100mbps+20ms/nccl")
    assert (plain.transport, named.transport, named.kind) == ("ray", "nccl", "step_s")
    assert repr(named.network) == "100mbps+20ms"
    assert plain.over("gloo").name == "step_s@1gbps/gloo"
    assert named.over("gloo") == named
    assert plain.over("ray") == plain
    assert Objective("wire_bytes").over("nccl").name == "wire_bytes"
    asked: list[str] = []

    def replays(transport: str) -> list[tuple[PricedRun, None]]:
        asked.append(transport)
        return [(PricedRun(), None)]

    loss = Objective("loss_on")
    figures([loss, plain, Objective("step_s@100mbps"), named], [SimpleNamespace(row={})], replays)  # type: ignore[arg-type, list-item]
    assert asked == ["ray", "nccl"]  # once each
    with pytest.raises(ConfigError, match=r"`transport` must be one of .*, but got 'ncl'"):
        Objective("step_s@1gbps/ncl")


def test_the_prices_of_a_study_change_their_transport_by_name(tmp_path) -> None:
    constraints = [{"objective": "step_s@1gbps", "at_most": 1.0}]
    path = write_study(
        tmp_path, objectives=["accuracy_on", "step_s@1gbps", "step_s@1gbps/gloo"], constraints=constraints
    )
    study = read_study(path, transport="nccl")
    assert [one.name for one in study.objectives] == ["accuracy_on", "step_s@1gbps/nccl", "step_s@1gbps/gloo"]
    assert study.constraints[0].objective == "step_s@1gbps/nccl"
    study.write(tmp_path)
    file = StudyFile(tmp_path)
    assert (file.network, file.transport, file.qualities) == ("1gbps", "nccl", ["accuracy"])
    assert read_study(tmp_path / "study.toml").as_mapping() == study.as_mapping()
    with pytest.raises(ConfigError, match="`transport` is for prices such as step_s@1gbps, but `objectives` have none"):
        read_study(write_study(tmp_path, objectives=["accuracy_on"]), transport="nccl")
