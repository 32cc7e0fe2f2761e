"""Plans of races by few simulations."""

import pytest

from raysim.analysis.comparison import race_plan


@pytest.fixture
def few_simulations(monkeypatch):
    monkeypatch.setattr(race_plan, "COUNT", 5)
