"""Two processes over one folder in some orders, and operations on files that fail: all of them are in the campaign."""

import pytest
from folder_orders import BROKEN_OFF, HELD, Plan, answers, harms

FEW = [
    Plan("nothing", "train", "resume", 8),  # the second is there before the first has a row
    Plan("broken", "resume", "resume", 3),  # the first has looked, and the second ends the run
    Plan("broken", "resume", "resume", 60),
    Plan("unmerged", "load", "resume", 24),  # tables that the first has listed are gone
    Plan("nothing", "train", None, 100, "kill"),
    Plan("broken", "resume", None, 60, "EIO"),
]


@pytest.mark.slow
def test_nothing_is_lost_in_a_few_orders(tmp_path):
    verdicts = answers(FEW, tmp_path)
    assert harms(FEW, verdicts) == []
    assert all(verdict.met for verdict in verdicts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plans", [HELD, BROKEN_OFF], ids=["held", "broken-off"])
def test_nothing_is_lost_at_every_thirtieth_operation(tmp_path, plans):
    plans = plans[7::30]
    assert harms(plans, answers(plans, tmp_path)) == []
