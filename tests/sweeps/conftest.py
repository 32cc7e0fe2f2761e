"""Plans of races by few simulations, each done once."""

import pytest
from races import fresh_races

from raysim.analysis.comparison import race_plan


@pytest.fixture
def few_simulations(monkeypatch):
    monkeypatch.setattr(race_plan, "COUNT", 5)


@pytest.fixture(autouse=True)
def same_simulations(monkeypatch):
    monkeypatch.setattr("raysim.sweeps.race_budget.fresh_races", fresh_races)
