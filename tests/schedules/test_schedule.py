"""Laws of schedules as data: what every family must keep, at every size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_variants import SIZES, VARIANTS, ZBV_CSV, Variant

from raysim.schedules.actions import (
    Action,
    Row,
    check_rows,
    dependency,
    peak_in_flight,
    phase,
    rows_from_csv,
    rows_to_csv,
    sends,
    topological_order,
)
from raysim.schedules.arrays import make_table
from raysim.schedules.families import (
    SCHEDULES,
    ZB,
    ZBH1,
    ZBH2,
    ZBV,
    Custom,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    parse_schedule,
)

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)
FAMILIES = [variant.schedule for variant in VARIANTS if variant.sizes == SIZES]
every_family = pytest.mark.parametrize("schedule", FAMILIES, ids=repr)

times, share = st.floats(0.1, 3.0), st.floats(0.0, 1.0)
searched = st.builds(ZB, times, times, times, message=share, memory=st.floats(1.0, 3.0), kept=share)
families = st.one_of(
    st.sampled_from([GPipe(), ZBH1(), ZBH2()]), st.builds(OneFOneB, st.integers(0, 40), st.integers(1, 9))
)


def check_laws(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    """Each action once, on its stage; forwards and backwards in the order of microbatches; an order exists and keeps every need."""
    rows = schedule.rows(num_stages, num_microbatches)
    check_rows(rows)
    owners = schedule.workers(num_stages)
    assert len(owners) == num_stages
    assert set(owners) == set(range(len(rows)))
    for stage, worker in enumerate(owners):
        mine = [action for action in rows[worker] if action.stage == stage]
        assert mine == schedule.row(stage, num_stages, num_microbatches)
        for op in "FB":
            assert [a.microbatch for a in mine if a.op == op] == list(range(num_microbatches))
        position = {action: index for index, action in enumerate(mine)}
        for m in range(num_microbatches):
            forward, backward = position[Action(stage, "F", m)], position[Action(stage, "B", m)]
            assert forward < backward < position.get(Action(stage, "W", m), backward + 1)
    merged = topological_order(rows, num_stages)
    assert Counter(merged) == Counter(action for row in rows for action in row)
    place = {action: index for index, action in enumerate(merged)}
    for row in rows:
        assert [place[action] for action in row] == sorted(place[action] for action in row)
    for action in merged:
        packet = dependency(action, num_stages)
        assert packet is None or place[packet] < place[action]


def test_every_family_has_a_variant() -> None:
    assert {type(variant.schedule) for variant in VARIANTS} == set(SCHEDULES.values())


@variants
def test_every_action_once_and_in_order(variant: Variant) -> None:
    assert variant.sizes
    for num_stages, num_microbatches in variant.sizes:
        check_laws(variant.schedule, num_stages, num_microbatches)


@variants
def test_unsupported_schedule_size_is_refused(variant: Variant) -> None:
    for size in set(SIZES) - set(variant.sizes):
        with pytest.raises(ValueError, match=r"^`num_(stages|microbatches)` must be "):
            variant.schedule.rows(*size)


@given(families, st.integers(1, 20), st.integers(1, 50))
def test_every_action_once_and_in_order_at_any_size(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    check_laws(schedule, num_stages, num_microbatches)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_interleaved_keeps_the_laws(num_workers: int, each: int, turns: int) -> None:
    check_laws(Interleaved1F1B(each), num_workers * each, num_workers * turns)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 30))
def test_v_shaped_schedules_keep_the_laws(num_workers: int, num_microbatches: int) -> None:
    check_laws(ZBV(), 2 * num_workers, num_microbatches)
    check_laws(DualPipeV(), 2 * num_workers, 2 * num_workers + num_microbatches)


def test_interleaved_with_one_stage_a_worker_warms_up_twice_as_deep() -> None:
    for p, m in ((1, 4), (2, 4), (4, 8)):
        assert Interleaved1F1B(1).rows(p, m) == OneFOneB(ahead=2).rows(p, m)


def test_interleaved_sizes_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"^`num_stages` must be a multiple of `stages_per_worker` \(2\), but got 5\.$"
    ):
        Interleaved1F1B(2).rows(5, 4)
    with pytest.raises(
        ValueError, match=r"^`num_microbatches` must be a multiple of the number of workers \(3\) for .*got 4\.$"
    ):
        Interleaved1F1B(2).rows(6, 4)


def test_zero_bubble_memory_equals_first_1f1b_stage() -> None:
    for p, m in SIZES:
        assert [peak_in_flight(row) for row in ZBH1().rows(p, m)] == [min(m, p)] * p
        for s, row in enumerate(ZBH1().rows(p, m)):
            assert [a for a in row if a.op != "W"] == OneFOneB().rows(p, m)[s]


def test_more_memory_gives_smaller_bubble() -> None:
    """Microbatches held at once, in units of a stage of 1F1B: of Qi et al. 2023, table 1, and of DualPipe's repository."""
    for p in range(1, 7):
        m = 4 * p
        assert [peak_in_flight(row) for row in ZBH2().rows(p, m)] == [2 * p - 1] * p
        assert [peak_in_flight(row) for row in ZBV().rows(2 * p, m)] == [2 * p] * p  # of half the layers each
        assert {peak_in_flight(row) for row in DualPipeV().rows(2 * p, m)} == {2 * p + 1}


@settings(max_examples=30)
@given(searched, st.integers(1, 6), st.integers(1, 16))
def test_a_searched_order_keeps_the_laws_within_its_memory(
    schedule: ZB, num_stages: int, num_microbatches: int
) -> None:
    check_laws(schedule, num_stages, num_microbatches)
    for stage in range(num_stages):
        counts = Counter[str]()
        for op in schedule.ops(stage, num_stages, num_microbatches):
            counts[op] += 1
            held = counts["F"] - counts["B"] + schedule.kept * (counts["B"] - counts["W"])
            assert held <= schedule.memory * num_stages + 1e-9


def test_gpipe_row() -> None:
    assert " ".join(map(str, GPipe().row(1, 2, 3))) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_one_f_one_b_rows() -> None:
    rows = [" ".join(map(str, row)) for row in OneFOneB().rows(3, 4)]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("extra", [0, 1, 2, 5, 100])
def test_one_f_one_b_counts(extra: int) -> None:
    schedule = OneFOneB(extra_warmup=extra)
    for p, m in SIZES:
        for s, row in enumerate(schedule.rows(p, m)):
            in_flight = min(p - s + extra, m)
            assert peak_in_flight(row) == in_flight
            # The forwards before the first backward: the warm-up's, and the steady phase's first, where one is left.
            assert [a.op for a in row].index("B") == in_flight
            steady = range(min(p - s - 1 + extra, m), m)
            pairs = row[min(p - s - 1 + extra, m) :][: 2 * len(steady)]
            assert [a.op for a in pairs] == ["F", "B"] * len(steady)
            assert [a.microbatch for a in pairs if a.op == "F"] == list(steady)


def test_ahead_adds_microbatches_per_hop() -> None:
    for p, m in SIZES:
        for n in (1, 2, 3):
            counts = [peak_in_flight(row) for row in OneFOneB(ahead=n).rows(p, m)]
            assert counts == [min((p - 1 - s) * n + 1, m) for s in range(p)]


@pytest.mark.parametrize("extra", [0, 2])
def test_cooldown_messages(extra: int) -> None:
    for p, m in SIZES:
        for s, row in enumerate(OneFOneB(extra_warmup=extra).rows(p, m)):
            cooldown = [a for i, a in enumerate(row) if phase(row, i) == "cooldown"]
            count = min(p - s + extra, m)
            assert cooldown == [Action(s, "B", k) for k in range(m - count, m)]
    # The compressed epilogue of Optimus-CC: 3, 2, 1 messages for four stages, P(P-1)/2 in all where M >= P-1.
    for p in range(2, 7):
        epilogue = [
            sum(phase(row, i) == "cooldown" and sends(a, p) for i, a in enumerate(row)) for row in OneFOneB().rows(p, 8)
        ]
        assert epilogue == [0, *range(p - 1, 0, -1)]
        assert sum(epilogue) == p * (p - 1) // 2


@every_family
def test_phases_come_in_order(schedule: Schedule) -> None:
    for p, m in SIZES:
        for row in schedule.rows(p, m):
            phases = [phase(row, i) for i in range(len(row))]
            assert phases == sorted(phases, key=["warmup", "steady", "cooldown"].index)
            assert phases.count("warmup") == [a.op for a in row].index("B") - 1


def test_gpipe_holds_every_microbatch() -> None:
    for p, m in SIZES:
        assert [peak_in_flight(row) for row in GPipe().rows(p, m)] == [m] * p


def test_no_extra_warmup_is_one_f_one_b_and_a_large_one_is_gpipe() -> None:
    for p, m in SIZES:
        assert OneFOneB(extra_warmup=0).rows(p, m) == OneFOneB().rows(p, m)
        assert OneFOneB(extra_warmup=m).rows(p, m) == GPipe().rows(p, m)


def test_needs_and_sends_agree() -> None:
    for p in range(1, 7):
        actions = [Action(s, op, 0) for s in range(p) for op in "FB"]
        consumed = Counter(packet for a in actions if (packet := dependency(a, p)))
        assert consumed == Counter(a for a in actions if sends(a, p))
        assert sum(consumed.values()) == 2 * (p - 1)


def rows_of(*lines: str) -> list[Row]:
    """Return rows written as text."""
    return [[Action.parse(word) for word in line.split()] for line in lines]


def test_deadlock_is_refused_with_the_action_that_blocks() -> None:
    with pytest.raises(ValueError, match=r"^The schedule deadlocks: 0B0 waits for 1B0; 1F1 waits for 0F1\.$"):
        topological_order(rows_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), 2)


def test_action_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0F0 runs twice\.$"):
        topological_order(rows_of("0F0 0F0 0B0"), 1)


@given(st.integers(0, 10**6), st.sampled_from("FBW"), st.integers(0, 10**6))
def test_action_round_trip(stage: int, op: str, microbatch: int) -> None:
    action = Action(stage, op, microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", "-1F0", "2f0", "2F0.5"])
def test_wrong_action_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^An action is written as '2F0' .*, but got "):
        Action.parse(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"^A schedule must have actions, but got none\.$"),
        (["0F0 0B0 0F0"], r"^Every action must be in a schedule once, but got 0F0 twice\.$"),
        (["0F0 0B0 0F1"], r"^Every action must be in a schedule once, but 0B1 is missing\.$"),
        (["0F0 1F0 0B0", "1B0"], r"^A stage must be on one worker, but got 1B0 on worker 1 and stage 1 on worker 0\.$"),
        (["0F1 0F0 0B0 0B1"], r"^Microbatches must be in order on every stage, but got 0F0 after 0F1\.$"),
        (["0F0 0B0", ""], r"^Every worker must have actions, but worker 1 has none\.$"),
        (["0F0 0F1 0B0 0B1 0W0"], r"^Microbatches must be in order on every stage, but got 0W0 after 0B1\.$"),
        (["0F0 0W0 0B0"], r"^The schedule deadlocks: 0W0 waits for 0B0\.$"),
        (["0F0 0B0", "1B0 1F0"], r"^The schedule deadlocks: 0B0 waits for 1B0; 1B0 waits for 1F0\.$"),
    ],
)
def test_invalid_schedule_rows_are_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(rows_of(*lines))


# Torch's CSV.


@pytest.mark.parametrize("schedule", [*FAMILIES, Interleaved1F1B(2), ZBV(), DualPipeV()], ids=repr)
def test_csv_round_trip(schedule: Schedule, tmp_path: Path) -> None:
    rows = schedule.rows(4, 6)
    assert rows_from_csv(rows_to_csv(rows)) == rows
    path = tmp_path / "rows.csv"
    path.write_text(rows_to_csv(rows))
    custom = Custom(str(path))
    check_laws(custom, 4, 6)
    assert custom.rows(4, 6) == rows
    assert custom.workers(4) == schedule.workers(4)
    with pytest.raises(ValueError, match=r"^`num_stages` must be 4, as in '.*rows\.csv', but got 5\.$"):
        custom.rows(5, 6)
    with pytest.raises(ValueError, match=r"^`num_microbatches` must be 6, as in '.*rows\.csv', but got 8\.$"):
        custom.rows(4, 8)


def test_schedule_csv_round_trips_with_torch() -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    read = torch_schedules._Action.from_str
    for schedule, stages in (
        (OneFOneB(), 4),
        (GPipe(), 4),
        (ZBH1(), 4),
        (ZBH2(), 4),
        (Interleaved1F1B(2), 8),
        (ZBV(), 8),
        (DualPipeV(), 8),
    ):
        lines = rows_to_csv(schedule.rows(stages, 8)).splitlines()
        actions = {rank: [read(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
        torch_schedules._validate_schedule(actions, 4, stages, 8)
        text = "\n".join(",".join(str(action) for action in row) for row in actions.values())
        assert rows_from_csv(text) == schedule.rows(stages, 8)


def csv_of_torch(name: str, p: int, m: int) -> str:
    """Return torch's schedule of p ranks with two stages each."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = object.__new__(getattr(torch_schedules, name))  # without the process group that it would ask for
    made.pp_group_size, made.n_local_stages, made._n_microbatches, made.rank = p, 2, m, 0
    made.number_of_rounds, made.microbatches_per_round, made.num_stages = m // p, p, 2 * p
    order_of = {rank: made._calculate_single_rank_operations(rank) for rank in range(p)}
    return "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in order_of.values())


@pytest.mark.parametrize(
    ("name", "schedule", "fewest"),
    [("ScheduleZBVZeroBubble", ZBV(), lambda p: 1), ("ScheduleDualPipeV", DualPipeV(), lambda p: 2 * p)],
    ids=["ZBV", "DualPipeV"],
)
def test_v_shaped_schedules_are_torchs(name: str, schedule: Schedule, fewest: Callable[[int], int]) -> None:
    for p in range(1, 6):
        for m in range(fewest(p), 3 * p + 4):
            assert rows_from_csv(csv_of_torch(name, p, m)) == schedule.rows(2 * p, m)


@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_torchs_own_schedules_are_valid(name: str, p: int, tmp_path: Path) -> None:
    text = csv_of_torch(name, p, 2 * p)
    path = tmp_path / "rows.csv"
    path.write_text(text)
    custom = Custom(str(path))
    check_laws(custom, 2 * p, 2 * p)
    if (name, p) == ("ScheduleZBVZeroBubble", 2):
        assert text == ZBV_CSV.read_text().rstrip()


def test_a_custom_schedule_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("0F0,0B0\n")
    custom = Custom(str(path))
    path.unlink()
    assert custom.rows(1, 1) == rows_of("0F0 0B0")
    assert Custom.of_rows("elsewhere", rows_of("0F0 0B0")).rows(1, 1) == rows_of("0F0 0B0")


def test_a_file_of_other_rows_is_another_schedule(tmp_path: Path) -> None:
    path, schedules = tmp_path / "rows.csv", []
    for row in ("0F0,0F1,0B0,0B1", "0F0,0B0,0F1,0B1", "0F0,0F1,0B0,0B1"):
        path.write_text(f"{row}\n")
        schedules.append(Custom(str(path)))
    assert schedules[0] == schedules[2] != schedules[1]
    assert hash(schedules[0]) == hash(schedules[2])
    assert [make_table(each, 1, 2).microbatch.tolist() for each in schedules[:2]] == [[0, 1, 0, 1], [0, 0, 1, 1]]


def test_empty_cells_mean_nothing() -> None:
    rows = rows_from_csv("0F0,0F1,,,0B0,,0B1\n\n,1F0,1I0,1W0,1F1,1B1,\n\n")
    assert rows == rows_of("0F0 0F1 0B0 0B1", "1F0 1B0 1W0 1F1 1B1")
    assert rows_to_csv(rows) == "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0SEND_F0,0B0",
            r"^A cell must be a stage, one of F, B, I, W and a microbatch, such as '2F0', but got '0SEND_F0'",
        ),
        ("0F0,0I0", r"^An input's backward must have a W, but got 0I0 alone"),
        ("0F0,0B0,0W0", r"^A whole backward cannot have a W as well, but got 0B0 and 0W0"),
        ("0B0,0F0", r"^The schedule deadlocks: 0B0 waits for 0F0 \(in '.*rows\.csv'\)\.$"),
    ],
)
def test_wrong_csv_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Custom(str(path))


def test_missing_csv_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^The schedule 'none\.csv' cannot be read: No such file or directory"):
        parse_schedule("Custom('none.csv')")


@given(st.one_of(families, searched))
def test_notation_round_trip(schedule: Schedule) -> None:
    again = parse_schedule(repr(schedule))
    assert again == schedule
    assert repr(again) == repr(schedule)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("GPipe", "GPipe"),
        ("GPipe()", "GPipe"),
        ("ZBH1", "ZBH1"),
        ("Interleaved1F1B(2.0)", "Interleaved1F1B(2)"),
        ("1F1B(0)", "1F1B"),
        (" 1F1B(2.0) ", "1F1B(extra_warmup=2)"),
    ],
)
def test_notation_is_canonical(text: str, canonical: str) -> None:
    assert repr(parse_schedule(text)) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, f"^'{text}' is not a schedule: expected a name with arguments")
            for text in ("2F2B", "11F1B", "_1F1B")
        ),
        ("1F1B(1F1B)", r"^`extra_warmup` must be an integer of at least 0, but got 1F1B \(in '1F1B\(1F1B\)'\)\.$"),
        ("1F1B(x=2)", r"^`1F1B` in '1F1B\(x=2\)' takes \(extra_warmup=0.*\): got an unexpected "),
        ("Gpipe", r"^Unknown schedule `Gpipe` in 'Gpipe'\. Did you mean `GPipe`"),
        ("1F1B(extra_warmup=-1)", r"^`extra_warmup` must be an integer of at least 0, but got -1"),
        ("1F1B(ahead=0)", r"^`ahead` must be an integer of at least 1, but got 0"),
        ("1F1B(1.5)", r"^`extra_warmup` must be an integer of at least 0, but got 1\.5"),
        ("ZBH3", r"^Unknown schedule `ZBH3` in 'ZBH3'\. Did you mean `ZBH[12]`\?$"),
        ("GPipe(3)", r"^`GPipe` in 'GPipe\(3\)' takes no arguments"),
    ],
)
def test_wrong_notation_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_schedule(text)
