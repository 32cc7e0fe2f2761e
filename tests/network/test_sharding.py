"""Laws of sharded replicas: bytes by their closed form, steps between compute and wire, and gathers that never help by waiting."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raysim.forecast.timings import Timings
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.sharding import FSDP, RESHARDS, Sharded, Units, chain_s, parse_sharding
from raysim.network.timed_step import TimedStep
from raysim.network.topology import FREE, Network
from raysim.schedules import Action, Custom, GPipe
from raysim.schedules.arrays import make_table

SECONDS = st.floats(0, 10)
SHARDED = {
    "num_stages": 1,
    "num_replicas": 4,
    "num_microbatches": 3,
    "forward_s": 1.0,
    "backward_s": 2.0,
    "units": 5,
    "parameter_bytes": 1e9,
    "gradient_bytes": 2e9,
    "sharding": "FSDP(4)",
}


def event_s(compute: list[float], gathers: list[float], scatters: list[float], prefetch: int) -> float:
    """Return the seconds of an action by events: a wire that serves requests in the order of their issue."""
    count = len(compute)
    queue: list[tuple[float, int, str, int]] = []  # by the moment of issue, then by the program's order
    order = iter(range(10**6))
    gathered: dict[int, float] = {}
    wire = done = 0.0
    issued = 0

    def issue(moment: float, what: str, unit: int) -> None:
        heapq.heappush(queue, (moment, next(order), what, unit))

    def serve() -> None:
        nonlocal wire
        while queue:
            moment, _, what, unit = heapq.heappop(queue)
            wire = max(wire, moment) + (gathers if what == "gather" else scatters)[unit]
            if what == "gather":
                gathered[unit] = wire

    while issued < min(prefetch, count):
        issue(0.0, "gather", issued)
        issued += 1
    for unit in range(count):
        if prefetch == 0:
            issue(done, "gather", unit)
        serve()
        start = max(done, gathered[unit])
        if prefetch and issued < count:
            issue(start, "gather", issued)
            issued += 1
        done = start + compute[unit]
        issue(done, "scatter", unit)
    serve()
    return max(done, wire)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=8), st.integers(0, 4))
def test_action_time_is_sum_of_events_and_at_least_compute_and_wire(
    units: list[tuple[float, float, float]], prefetch: int
) -> None:
    compute, gathers, scatters = (np.array(each) for each in zip(*units, strict=True))
    quiet = np.zeros(len(units))
    found = float(chain_s(compute, gathers, scatters, quiet, prefetch))
    assert found == pytest.approx(event_s(compute.tolist(), gathers.tolist(), scatters.tolist(), prefetch))
    assert found >= max(compute.sum(), gathers.sum() + scatters.sum()) - 1e-9
    assert float(chain_s(compute, gathers, scatters, quiet, prefetch + 1)) <= found + 1e-9
    assert float(chain_s(compute, None, scatters, quiet, prefetch)) <= found + 1e-9
    gathered = event_s(compute.tolist(), gathers.tolist(), quiet.tolist(), prefetch)
    assert float(chain_s(compute, gathers, None, quiet, prefetch)) == pytest.approx(gathered)
    assert float(chain_s(compute, None, None, quiet, prefetch)) == pytest.approx(compute.sum())
    assert float(chain_s(compute, gathers, scatters, quiet + 1, prefetch)) >= found


@pytest.mark.parametrize("reshard_after", RESHARDS)
@pytest.mark.parametrize(("shards", "replicas"), [(4, 4), (2, 4), (1, 4), (3, 6), (1, 1)])
def test_sharded_bytes_have_closed_form_and_bound_step(reshard_after: str, shards: int, replicas: int) -> None:
    """On a network so slow that compute does not count, a step takes the seconds of its bytes, whatever the units."""
    gathers, scatters = FSDP(shards, reshard_after).counts(3)
    groups = replicas // shards
    inside, across = (shards - 1) / shards, 2 * (groups - 1) / groups / shards
    expected = gathers * 1e9 * inside + scatters * 2e9 * (inside + across)
    given = SHARDED | {"sharding": f"FSDP({shards}, reshard_after={reshard_after!r})", "num_replicas": replicas}
    step = Timings.model_validate(given).step()
    assert step.sharded is not None
    assert step.sharded.sent_bytes(replicas, 3) == pytest.approx(expected)
    wire_s = 8 * expected / 1e6
    assert step.simulate(Network(1e6)).step_s == pytest.approx(wire_s, abs=9.1)  # 9 s of compute
    assert step.simulate(Network(1e6)).step_s >= wire_s - 1e-6


@pytest.mark.parametrize("sharding", ["FSDP(4)", "FSDP(2, 'backward')", "FSDP(4, reshard_after='step', prefetch=3)"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1", "Interleaved1F1B(2)"])
def test_sharded_step_tends_to_unsharded_with_bandwidth(schedule: str, sharding: str) -> None:
    given = SHARDED | {"num_stages": 4, "num_microbatches": 4, "schedule": schedule, "sharding": sharding}
    given |= {"weight_share": 0.4} if schedule == "ZBH1" else {}
    step = Timings.model_validate(given).step()
    alone = replace(step, sharded=None).simulate(FREE)
    seconds = [step.simulate(Network(bps)).step_s for bps in np.geomspace(1e8, 1e17, 10)]
    assert all(fast <= slow + 1e-9 for slow, fast in pairwise(seconds))
    assert seconds[-1] == pytest.approx(alone.step_s, rel=1e-5)
    assert min(seconds) >= alone.step_s - 1e-9
    assert step.simulate(FREE).step_s == alone.step_s


def test_gradients_are_scattered_in_the_last_backward_even_if_only_others_are_split() -> None:
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1W0", "1F1", "1B1"]]
    schedule = Custom.of_rows("rows.csv", [[*map(Action.parse, row)] for row in rows])
    profile = Profile.uniform(num_stages=2, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    units = tuple(Units.even(1, gather_bytes=0.0, scatter_bytes=size) for size in (0.0, 4e6))
    sharded = Sharded(FSDP(2, reshard_after="step"), units)
    step = TimedStep([(1.0, profile)], schedule, num_microbatches=2, num_replicas=2, sharded=sharded)
    assert step.step_s(FREE) == 11.0
    assert step.step_s(Network(8e6)) == pytest.approx(13.0)  # 2 s before stage 1 sends its last gradient


def test_a_single_shard_is_the_dense_step() -> None:
    step = Timings.model_validate(SHARDED | {"sharding": "FSDP(1)", "num_replicas": 1}).step()
    slow = step.simulate(Network(1e3))
    assert slow.step_s == 9.0
    assert not slow.profile.shard_s.any()


def test_keeping_parameters_longer_saves_time() -> None:
    seconds = [
        Timings.model_validate(SHARDED | {"sharding": f"FSDP(4, reshard_after={each!r})"})
        .step()
        .simulate(Network(2e10))
        for each in RESHARDS
    ]
    assert seconds[0].step_s > seconds[1].step_s > seconds[2].step_s > 9.0


def test_waiting_is_not_counted_as_compute() -> None:
    timeline = Timings.model_validate(SHARDED).step().simulate(Network(1e10))
    for worker in timeline.workers():
        assert worker.compute_s == pytest.approx(9.0)
        assert sum(worker[2:]) == pytest.approx(timeline.step_s)
    path = timeline.explain()
    assert path["compute"] == pytest.approx(9.0)
    assert path["shards"] == pytest.approx(timeline.step_s - 9.0)
    assert timeline.profile.shard_s.sum() * 3 == pytest.approx(timeline.step_s - 9.0)


def test_gathers_within_a_host_are_free() -> None:
    """Two hosts of two replicas: HSDP sends what the sum over hosts takes, each host's two rings by one port."""
    pair = parse_network("8gbps/port")
    hosts = Network(((8e9, 8e9), (8e9, 8e9)), sharing="port")
    assert hosts.num_hosts == 2
    given = SHARDED | {"sharding": "FSDP(2)", "units": 1, "num_microbatches": 1}
    local = Timings.model_validate(given).step().simulate(hosts).step_s
    assert local == pytest.approx(3.0 + 2 * 2 * (2e9 / 2 / 2) / 1e9)  # two rounds, two rings, half a shard each
    apart = Timings.model_validate(given).step().simulate(pair).step_s
    gathers_s, scatter_s, sum_s = 2 * 0.5, 1.0, 2 * 0.5
    assert apart == pytest.approx(3.0 + gathers_s + scatter_s + sum_s)


def test_coded_gradients_go_to_owners_and_cost_compute() -> None:
    units = Units((1.0,), (8e6,), (4e6,), (0.25,))
    profile = Profile.uniform(num_stages=1, forward_s=1.0, backward_s=2.0)
    hosts = np.arange(4)[:, None]
    (found,) = Sharded(FSDP(4), (units,), coded=True).profiles(
        profile, make_table(GPipe(), 1, 2), hosts, [Network(8e6)]
    )
    gather, scatter = 0.75 * 8, 3 * 1.0  # packets of 1 MB to three owners, by one port
    assert found.compute_s[0, 0, :, 0] == pytest.approx([gather + 1.0, gather + 2.0 + 0.25 + scatter])
    assert found.shard_s[0, 0, :, 0] == pytest.approx([gather, gather + scatter])


def test_notation() -> None:
    assert parse_sharding("FSDP(8)") == FSDP(8)
    assert repr(parse_sharding("FSDP(4, 'step', prefetch=2)")) == "FSDP(4, reshard_after='step', prefetch=2)"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sharding": "FSDP(3)"}, r"`shards` of FSDP\(3\) must divide the number of replicas \(4\)"),
        ({"sharding": "FSDP(8)"}, r"must divide the number of replicas \(4\)"),
        ({"sharding": "FSDP(4, 'never')"}, "`reshard_after` must be one of forward, backward, step"),
        ({"sharding": "FSDP(0)"}, "`shards` must be an integer of at least 1"),
        ({"sharding": "FSDQ(4)"}, "Did you mean `FSDP`?"),
        ({"sharding": None}, "`parameter_bytes` and `units` apply only to sharded replicas"),
        ({"gradient_bytes": 0.0}, "`sharding` needs `parameter_bytes` to gather and `gradient_bytes`"),
        ({"parameter_bytes": 0.0}, "`sharding` needs `parameter_bytes` to gather and `gradient_bytes`"),
    ],
)
def test_wrong_input_gives_one_sentence_error(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Timings.model_validate(SHARDED | changes)
