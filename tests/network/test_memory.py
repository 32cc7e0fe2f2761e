"""Peak memory of stages: the sums, the counts that come from the schedule, and the refusal with its arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.network.memory import (
    Needs,
    StageMemory,
    Worst,
    check_memory,
    packets_in_flight,
    worst_moment,
)
from raysim.schedules.actions import dependency, peak_in_flight, topological_order
from raysim.schedules.families import ZBH1, GPipe, Interleaved1F1B, OneFOneB, Schedule
from raysim.units import format_bytes

GB = 10**9


def test_total_is_the_sum_of_the_parts() -> None:
    memory = StageMemory(
        1,
        weights_bytes=1,
        gradients_bytes=10,
        optimizer_bytes=100,
        saved_bytes=1000,
        in_flight=3,
        packet_bytes=10_000,
        packets=2,
        residuals_bytes=100_000,
        references_bytes=1_000_000,
        workspace_bytes=10_000_000,
        kept_bytes=50_000_000,
        waiting=2,
    )
    assert memory.total_bytes == 111_123_111
    assert memory.waiting_bytes == 100_000_000
    assert memory.activations_bytes == 3000
    assert memory.messages_bytes == 20_000


def test_explain_shows_the_arithmetic() -> None:
    memory = StageMemory(
        2,
        weights_bytes=33_600_000,
        optimizer_bytes=67_200_000,
        saved_bytes=10**6,
        in_flight=4,
        packets=1,
        packet_bytes=500,
    )
    assert memory.explain() == (
        "stage 2: 33.6 MB weights + 67.2 MB optimiser + 4 x 1 MB activations in flight + 500 B packets in flight = 105 MB"
    )
    assert StageMemory(0).explain() == "stage 0: nothing = 0 B"


@pytest.mark.parametrize("value", [-1, 1.5, True, "8"])
def test_wrong_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^`weights_bytes` must be an integer of at least 0, but got "):
        StageMemory(0, weights_bytes=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), OneFOneB(extra_warmup=2)], ids=repr)
def test_counts_in_flight(schedule: Schedule) -> None:
    for p in range(1, 7):
        for m in range(1, 9):
            extra = {"GPipe": m, "1F1B": 0, "1F1B(extra_warmup=2)": 2}[repr(schedule)]
            assert [peak_in_flight(row) for row in schedule.rows(p, m)] == [min(m, p - s + extra) for s in range(p)]


def test_worker_memory_is_peak_over_its_stages() -> None:
    """Never more than the sum of their peaks, and never less than at any one moment, whatever a microbatch weighs."""
    for p, v in ((1, 3), (2, 2), (3, 2), (2, 4)):
        schedule, stages = Interleaved1F1B(v), p * v
        rows = schedule.rows(stages, 2 * p)
        saved = [3 + 7 * s % 5 for s in range(stages)]
        held = worst_moment(rows, [Needs(size) for size in saved])
        peaks = [peak_in_flight(schedule.row(stage, stages, 2 * p)) for stage in range(stages)]
        for row in rows:
            mine = {action.stage for action in row}
            priced = sum(held[s].in_flight * saved[s] + held[s].workspace for s in mine)
            assert all(held[s].in_flight <= peaks[s] for s in mine)
            now, most = dict.fromkeys(mine, 0), 0
            for action in row:
                now[action.stage] += 1 if action.op == "F" else -1
                most = max(most, sum(now[s] * saved[s] for s in mine))
            assert priced == most


def test_zero_bubble_memory_includes_pending_weight_gradients() -> None:
    for p in range(1, 6):
        for m in range(1, 9):
            held = worst_moment(ZBH1().rows(p, m), [Needs(5, 2)] * p)
            assert [stage.in_flight for stage in held] == [min(m, p)] * p
            assert [stage.waiting for stage in held] == [min(s + 1, m) for s in range(p)]


def test_the_peak_of_an_action_counts_beside_the_other_microbatches() -> None:
    """Gradients are there after a step's first backward: before that, their place is free for temporary tensors."""
    rows = GPipe().rows(1, 3)
    peaks = Needs(10, forward=11, backward=14, first=20, gradients=5)
    assert worst_moment(rows, [peaks]) == [Worst(3, 0, 5)]  # 20 + 20 before the gradients' 5
    assert worst_moment(rows, [peaks._replace(first=14, gradients=8)]) == [Worst(2, 0, 6)]
    assert worst_moment(rows, [peaks._replace(update=50)]) == [Worst(0, 0, 50)]


@given(
    st.sampled_from([GPipe(), OneFOneB(), OneFOneB(extra_warmup=2), ZBH1()]),
    st.integers(2, 6),
    st.integers(1, 9),
    st.randoms(),
)
def test_packets_never_exceed_their_bound(schedule: Schedule, p: int, m: int, random: object) -> None:
    """Run the rows in a random order that respects them: no stage has more packets waiting than the bound says."""
    rows = schedule.rows(p, m)
    bound = packets_in_flight([peak_in_flight([action for action in row if action.op != "W"]) for row in rows])
    topological_order(rows, p)
    heads, done, waiting = [0] * p, set(), [0] * p
    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        ready = []
        for s in range(p):
            if heads[s] < len(rows[s]):
                packet = dependency(rows[s][heads[s]], p)
                if packet is None or packet in done:
                    ready.append(s)
        s = random.choice(ready)  # type: ignore[attr-defined]
        action = rows[s][heads[s]]
        heads[s] += 1
        done.add(action)
        packet = dependency(action, p)
        if packet is not None:
            waiting[packet.stage] -= 1
        if any(
            dependency(row[i], p) == action for i_row, row in enumerate(rows) for i in range(heads[i_row], len(row))
        ):
            waiting[s] += 1
        assert waiting[s] <= bound[s]


def test_aqsgd_memory_on_cifar10_is_refused_with_arithmetic() -> None:
    cuts = (64 * 32 * 32, 128 * 16 * 16, 256 * 8 * 8)
    copies = [4 * 50_000 * values for values in cuts]
    assert sum(copies) == 22_937_600_000
    stages = [StageMemory(s, weights_bytes=11_000_000, references_bytes=copy) for s, copy in enumerate(copies)]
    with pytest.raises(ValueError) as caught:
        check_memory(stages, 16 * GB)
    assert str(caught.value) == (
        "The stages must fit in 16 GB, but need 23 GB: "
        "stage 0: 11 MB weights + 13.1 GB reference copies = 13.1 GB; "
        "stage 1: 11 MB weights + 6.55 GB reference copies = 6.56 GB; "
        "stage 2: 11 MB weights + 3.28 GB reference copies = 3.29 GB. "
        "Bound the samples kept with AQSGD's `capacity`, or keep them in bfloat16."
    )
    check_memory(stages, 24 * GB)
    check_memory(stages, 16 * GB, nodes=["a", "b", "b"])


def test_each_node_is_held_to_its_own_memory() -> None:
    stages = [StageMemory(s, weights_bytes=6 * GB) for s in range(3)]
    check_memory(stages, {"big": 12 * GB, "small": 6 * GB}, ["big", "big", "small"])
    with pytest.raises(
        ValueError, match=r"^The stages of node small must fit in 6 GB, but need 12 GB: stage 1: .*; stage 2: "
    ):
        check_memory(stages, {"big": 12 * GB, "small": 6 * GB}, ["big", "small", "small"])
    with pytest.raises(ValueError, match=r"^`nodes` must name one node for each of 3 stages, but got 1\.$"):
        check_memory(stages, GB, ["big"])


@given(st.integers(0, 10**18))
def test_sizes_are_written_with_three_digits(size: int) -> None:
    number, unit = format_bytes(size).split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, "EB": 1e18}[unit]
    assert abs(float(number) * scale - size) <= 0.0051 * size
    assert float(number) < 1000
