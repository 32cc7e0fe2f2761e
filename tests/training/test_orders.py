"""Two processes over one folder, operations on files that fail, and losses of power: a few of each; the campaign tries all."""

import pytest
from folder_orders import POWER, Plan, answers, every_plan, harms

FEW = [
    Plan("nothing", "train", "resume", 8),  # the second is there before the first has a row
    Plan("broken", "resume", "resume", 3),  # the first has looked, and the second ends the run
    Plan("broken", "resume", "resume", 60),
    Plan("unmerged", "load", "resume", 24),  # tables that the first has listed are gone
    Plan("nothing", "train", None, 100, "kill"),
    *(Plan("broken", "resume", None, at, "EIO") for at in range(58, 64)),  # some of them cannot fail
    Plan("broken", "resume", "load", 60, then=20),
]
SHARES = {"held": 400, "held_twice": 4000, "failed": 100, "power": 60}  # of how many plans one is tried


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_loss_under_few_write_orders():
    verdicts = answers(FEW)
    assert harms(FEW, verdicts) == []
    assert all(verdict.met for plan, verdict in zip(FEW, verdicts, strict=True) if plan.mode != "EIO")
    assert any(verdict.met for plan, verdict in zip(FEW, verdicts, strict=True) if plan.mode == "EIO")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_loss_under_sampled_write_orders():
    plans = [plan for name, share in SHARES.items() for plan in getattr(every_plan(), name)[share // 2 :: share]]
    assert harms(plans, answers(plans)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_power_loss_never_damages_a_pack():
    plans = [Plan("whole", "pack", None, at, POWER) for at in range(0, 30, 3)]
    assert harms(plans, answers(plans)) == []
