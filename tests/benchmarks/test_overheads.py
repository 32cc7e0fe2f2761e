"""Overheads of calls and messages, read back from a simulated run."""

from __future__ import annotations

import numpy as np
import pytest
from raysim_benchmarks.validate.overheads import read_overheads
from timelines import columns_of

from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.recorded import profiles_from_actions
from raysim.network.simulate import simulate
from raysim.schedules.families import ZBH1, GPipe, OneFOneB, Schedule


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), ZBH1()], ids=repr)
@pytest.mark.parametrize("longest_s", [0.1, 0.0002], ids=["long", "shorter-than-a-hop"])
def test_overheads_are_read_back_from_a_run(schedule: Schedule, longest_s: float) -> None:
    random = np.random.default_rng(3)
    shape = (2, 4, 3, 8)
    profile = Profile(
        compute_s=random.uniform(0.5, 1, shape) * longest_s,
        encode_s=random.uniform(0.01, 0.02, shape) * longest_s,
        wire_bytes=random.integers(1000, 100_000, shape).astype(float),
        call_s=0.002,
        message_s=0.003,
        byte_s=1e-7,
    )
    timeline = simulate(schedule, profile, parse_network("free"))
    columns = columns_of(timeline)
    overheads = read_overheads(columns, schedule.rows(4, 8), {0: timeline.pipeline_s + 0.04})
    assert overheads == pytest.approx((0.002, 0.003, 1e-7, 0.04), rel=0.02)
    # The run priced with them is the run.
    again = profiles_from_actions(columns, **overheads._asdict())[0]
    assert simulate(schedule, again, parse_network("free")).step_s == pytest.approx(timeline.step_s + 0.04, rel=0.001)
    alike = read_overheads(columns | {"wire_bytes": np.ones(len(columns["step"]))}, schedule.rows(4, 8))
    assert (alike.byte_s, alike.step_s) == (0.0, 0.0)
