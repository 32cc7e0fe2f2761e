"""A race on recorded runs ends as all their seeds do, at a fraction of the cost."""

from pathlib import Path

import pytest
from raysim_findings.race_records import race_on_records

from raysim.analysis import load

KEPT = Path(__file__).parents[2] / "docs" / "findings" / "data"


@pytest.mark.parametrize(
    "name",
    [
        "finetune-activations",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("finetune-replicas", "pictures-links")),
    ],
)
def test_race_keeps_study_verdicts_at_a_third_of_cost(name):
    rows = race_on_records(load(KEPT / name))
    settings = rows[rows["setting"] != "dense"]
    assert set(settings.loc[settings["full"] == "safe", "race"]) <= {"safe", "slower"}
    assert set(settings.loc[settings["full"] == "harmful", "race"]).isdisjoint({"safe"})
    assert (settings.loc[settings["race"] == "harmful", "harm"] > 0.5).all()
    assert rows["runs"].sum() < 0.35 * rows["full_runs"].sum()
    assert (rows["runs"] <= rows["full_runs"]).all()
