"""Recorded runs priced on networks: laws that hold of any run, on real ones made by the inline engine."""

import dataclasses
import json
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from configurations import SMALL
from pipelines import RUNS, TIED
from raysim_benchmarks.validate.overheads import read_overheads
from report_runs import change_columns, change_row, copy_run
from typer.testing import CliRunner

from raysim import Run, train
from raysim.analysis import Replay, ReplayError, Target, beside, in_company, replay
from raysim.analysis.data.recording import Recording
from raysim.cli import app
from raysim.cli.replay_tables import traffic_words
from raysim.config import make_config
from raysim.network.presets import parse_network
from raysim.network.simulate import simulate, step_seconds
from raysim.network.timeline_views import wire_use
from raysim.network.topology import Network, Placement
from raysim.network.transport import RAY
from raysim.pipeline.groups import TIED_TABLE, chunk_bytes
from raysim.records import write_table
from raysim.units import format_bytes

MBPS = 1e6
ALWAYS, NEVER = Target("accuracy", 0.0), Target("accuracy", 2.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of a compressed and a dense run, and of a GPT with tied parameters."""
    folder = tmp_path_factory.mktemp("runs")
    changes: dict[str, dict[str, Any]] = {
        "sparse": {"forward": "TopK(0.1)", "backward": "Quantize(4)", "steps": 10, "evaluate_every_steps": 4},
        "dense": {"steps": 10, "evaluate_every_steps": 4},
        "tied": {
            "model": {"name": "gpt", "num_blocks": 2, "width": 8, "num_heads": 2, "tied": True},
            "data": {"name": "topics", "length": 8, "train_samples": 64, "test_samples": 20},
        },
        "gpipe": {"schedule": "GPipe", "steps": 4},
        "unprofiled": {"profile_every_steps": 0, "steps": 1},
    }
    for name, change in changes.items():
        train(make_config({**SMALL, **change}), engine="inline", out=folder / name)
    return folder


@pytest.fixture(scope="module")
def pair(runs):
    return in_company([runs / "sparse", runs / "dense"])


@pytest.fixture(scope="module")
def sparse(pair):
    return pair[0]


@pytest.fixture(scope="module")
def dense(pair):
    return pair[1]


def test_bytes_equal_recorded_bytes(runs, sparse):
    run = Run(runs / "sparse")
    links = run.links
    priced = links[links["step"].isin(sparse.profiles)]
    assert sparse.wire_bytes.tolist() == priced.groupby("step")["wire_bytes"].sum().tolist()
    assert sparse.dense_bytes.tolist() == priced.groupby("step")["dense_bytes"].sum().tolist()
    for timeline in sparse.timelines(parse_network("100mbps")):
        wires = {(wire.source, wire.target): wire.wire_bytes for wire in wire_use(timeline)}
        step = int(timeline.profile.source.split()[-1])
        for row in links[links["step"] == step].to_dict("records"):
            ends = (row["boundary"], row["boundary"] + 1)
            moved = row["wire_bytes"] + row["packets"] * RAY.bands[0].beside_bytes
            assert wires[ends if row["direction"] == "forward" else ends[::-1]] == moved
    row = replay(sparse, "1gbps").iloc[0]
    assert row["wire_bytes"] == priced["wire_bytes"].sum() / len(sparse.profiles)
    assert row["run_s"] == row["steps"] * row["step_s"]


@pytest.mark.parametrize("name", ["zero-bubble", "custom", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_every_schedule_is_replayed(small, tmp_path, name):
    """As it was recorded: rows, costs and bytes, of which those between two stages of one worker cross no wire."""
    changes = dict(RUNS[name])
    if name == "custom":
        file = tmp_path / "rows.csv"
        shutil.copy(changes["schedule"].split("'")[1], file)
        changes["schedule"] = f"Custom('{file}')"
    run = train(small(**changes), engine="inline", out=tmp_path / "run")
    if name == "custom":
        file.unlink()
    found = Replay(run)
    rows = make_config({**SMALL, **RUNS[name]}).executed_schedule.rows(found.num_stages, 4)
    assert found.rows == rows
    assert found.num_workers == len(rows) == (3 if name == "zero-bubble" else 2)
    links, owner = run.links, {action.stage: worker for worker, row in enumerate(rows) for action in row}
    updates_s, stages = run.steps["update_s"], list(map(owner.get, range(found.num_stages)))
    for profile in found.profiles.values():  # of the worker that took longest, whichever stages it has
        assert updates_s.min() <= np.bincount(stages, profile.update_s).max() <= updates_s.max() * (1 + 1e-9)
    for step, timeline in zip(found.profiles, found.timelines(parse_network("100mbps")), strict=True):
        here = links[links["step"] == step]
        crossing = here[[owner[b] != owner[b + 1] for b in here["boundary"]]]
        moved = crossing["wire_bytes"].sum() + RAY.bands[0].beside_bytes * crossing["packets"].sum()
        assert sum(wire.wire_bytes for wire in wire_use(timeline)) == moved
        profile = found.profiles[step]
        spent = pd.Series((profile.decode_s + profile.compute_s + profile.encode_s)[0].sum(axis=(1, 2)))
        busy = spent.groupby(spent.index.map(owner)).sum()
        assert [w.compute_s + w.codec_s for w in timeline.workers()] == pytest.approx(busy.tolist())
        assert timeline.pipeline_s >= busy.max()
    seconds = found.step_seconds([parse_network(text) for text in ("8mbps", "100mbps", "free")]).mean(axis=1)
    assert (np.diff(seconds) <= 0).all()
    assert CliRunner().invoke(app, ["replay", str(run.folder), "--network", "1gbps"]).exit_code == 0


def test_a_faster_network_is_never_slower(sparse):
    networks = [Network(mbps * MBPS, 0.001) for mbps in np.geomspace(0.1, 1e5, 40)]
    seconds = sparse.step_seconds(networks)
    assert (np.diff(seconds, axis=0) <= 1e-12).all()
    latencies = sparse.step_seconds([Network(100 * MBPS, s) for s in (0.0, 0.001, 0.01, 0.1)])
    assert (np.diff(latencies, axis=0) > 0).all()


def test_a_price_does_not_depend_on_what_was_asked_before(sparse):
    networks = [Network(mbps * MBPS, 0.001) for mbps in (1, 10, 100)]
    one_by_one = [sparse.step_seconds([network])[0] for network in networks[::-1]]
    again = Replay(sparse.recording, costs=sparse.costs)
    np.testing.assert_array_equal(again.step_seconds([*networks, *networks]), [*one_by_one[::-1]] * 2)


def test_infinite_bandwidth_leaves_compute_time(runs):
    sparse = Replay(runs / "sparse", transport="bare")
    free = sparse.shares(parse_network("free"))
    assert free.workers["wait_bytes_s"].max() == pytest.approx(0, abs=1e-12)
    assert free.utilisation == 0
    busy = free.workers[["compute_s", "codec_s", "overhead_s"]].sum(axis=1)
    for (step, profile), timeline in zip(sparse.profiles.items(), sparse.timelines(parse_network("free")), strict=True):
        work = (profile.compute_s + profile.decode_s + profile.encode_s)[0].sum(axis=(1, 2))
        worker = timeline.workers()
        assert [w.compute_s + w.codec_s for w in worker] == pytest.approx(work.tolist()), step
    assert free.pipeline_s >= busy.max()


def test_worker_time_parts_add_up(sparse):
    for network in ("free", "8mbps", "100mbps+20ms", "worldwide"):
        shares = sparse.shares(parse_network(network))
        parts = shares.workers.drop(columns=["worker", "stages"]).sum(axis=1)
        mean = sparse.step_seconds([parse_network(network)]).mean()
        assert parts.tolist() == pytest.approx([mean] * sparse.num_workers)
        assert sum(shares.critical_s.values()) == pytest.approx(mean)


def test_bytes_and_latency_add_up_to_what_a_network_adds(sparse):
    networks = [parse_network(text) for text in ("free+20ms", "100mbps", "100mbps+20ms")]
    latency, size, both = sparse.wire_seconds(networks)
    assert latency.bytes_s == size.latency_s == 0
    assert both.bytes_s == size.bytes_s
    free_s, *steps_s = sparse.step_seconds([parse_network("free"), *networks]).mean(axis=1)
    assert [sum(wire) for wire in (latency, size, both)] == pytest.approx([step_s - free_s for step_s in steps_s])
    frame = replay(sparse, networks)
    assert frame["step_latency_s"].tolist() == [latency.latency_s, 0.0, both.latency_s]


def test_twice_the_bandwidth_halves_the_time_on_the_wire(sparse):
    seconds = []
    for mbps in (10, 20):
        timelines = sparse.timelines(Network(mbps * MBPS))
        seconds.append([sum(wire.busy_s for wire in wire_use(timeline)) for timeline in timelines])
    assert seconds[0] == pytest.approx([2 * s for s in seconds[1]])
    slow, slower = sparse.step_seconds([Network(2e3), Network(1e3)]).mean(axis=1)
    assert slower / slow == pytest.approx(2, rel=0.01)  # where the wire is all


@pytest.mark.slow
def test_two_networks_or_runs_at_once_equal_one_by_one(sparse, dense):
    names = ["8mbps", "100mbps/port"]
    together = replay([sparse, dense], names, target=ALWAYS)
    alone = pd.concat([replay(run, name, target=ALWAYS) for run in (sparse, dense) for name in names])
    pd.testing.assert_frame_equal(together, alone.reset_index(drop=True))
    fast = replay([sparse, dense], names, target=ALWAYS, split=False)
    pd.testing.assert_frame_equal(fast, together[fast.columns])


def test_replay_is_independent_of_query(runs, sparse):
    alone = Replay(runs / "sparse")
    frames = [replay(run, "8mbps") for run in (alone, runs / "sparse", str(runs / "sparse"), Run(runs / "sparse"))]
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0])
    pd.testing.assert_frame_equal(replay(alone, Network(8 * MBPS, name="8mbps")), frames[0])
    (mine, company) = (frames[0].iloc[0], replay(sparse, "8mbps").iloc[0])
    assert (mine["compute"], company["compute"]) == ("recorded in this run alone", "pooled over 2 runs")
    unpriced = ["steps", "wire_bytes", "dense_bytes", "recorded_step_s"]
    assert mine[unpriced].equals(company[unpriced])  # in company the price differs, and nothing else


def test_time_to_target_is_steps_times_step_time(runs, sparse):
    evals = Run(runs / "sparse").evals
    level = float(evals[evals["mode"] == "on"].sort_values("step")["loss"].iloc[1])
    target = Target("loss", level)
    first = {
        mode: int(rows[rows["loss"] <= level]["step"].min())
        for mode, rows in evals.groupby("mode")
        if (rows["loss"] <= level).any()
    }
    row = replay(sparse, "8mbps", target=target).iloc[0]
    for mode in ("on", "off"):
        if mode in first:
            assert row[f"steps_to_target_{mode}"] == first[mode]
            assert row[f"time_to_target_{mode}_s"] == first[mode] * row["step_s"]
        else:
            assert row[f"steps_to_target_{mode}"] is pd.NA
    assert replay(sparse, "8mbps", target=ALWAYS).iloc[0]["steps_to_target_on"] == 4  # the first evaluation


def test_a_branch_counts_its_own_steps_to_a_target(tmp_path):
    train(make_config({**SMALL, "steps": 4}), engine="inline", out=tmp_path / "parent")
    changes = {"start": f"{tmp_path / 'parent'}@4", "steps": 2, "evaluate_every_steps": 1}
    train(make_config({**SMALL, **changes}), engine="inline", out=tmp_path / "branch")
    row = replay(tmp_path / "branch", "8mbps", target=ALWAYS).iloc[0]
    assert Run(tmp_path / "branch").evals["step"].min() == 5
    assert (row["steps_to_target_on"], row["time_to_target_on_s"]) == (1, row["step_s"])


def test_unreached_target_is_missing_and_reported(runs, sparse):
    row = replay(sparse, "8mbps", target="accuracy=2").iloc[0]
    assert row["steps_to_target_on"] is pd.NA
    assert row["time_to_target_on_s"] is pd.NA
    done = CliRunner().invoke(app, ["replay", str(runs / "sparse"), "--network", "8mbps", "--target", "accuracy=2"])
    assert done.exit_code == 0, done.output
    assert "not reached in 10 steps, best 0." in done.output
    assert "nan" not in done.output.lower()


def test_targets_are_parsed(runs):
    assert Target.parse("loss=0.5") == ("loss", 0.5, None)
    assert str(Target.parse("dice >= 0.5")) == "dice >= 0.5"
    values = pd.Series([0.4, 0.5, 0.6])
    assert Target("loss", 0.5).reached(values).tolist() == [True, True, False]
    assert Target("accuracy", 0.5).reached(values).tolist() == [False, True, True]
    for text in ("0.9", "loss", "loss=", "loss=x", "loss=nan", "speed=1"):
        with pytest.raises(ReplayError, match="`target` must be"):
            Target.parse(text)


def test_codec_is_faster_below_break_even_bandwidth(sparse, dense):
    network = parse_network("100mbps+1ms")
    even, low, high = sparse.break_even_bps(dense, network)
    assert 0 < low <= even <= high
    means = sparse.mean_profile, dense.mean_profile
    for bandwidth, sign in ((even / 1.01, -1), (even * 1.01, 1)):
        mine, theirs = (simulate(sparse.schedule, p, Network(bandwidth, 0.001)).step_s for p in means)
        assert np.sign(mine - theirs) in (sign, 0)
    for bandwidth, verdict in ((low / 1.5, "faster"), (even, "not distinguishable"), (high * 1.5, "slower")):
        (speedup,) = sparse.speedup(dense, [Network(bandwidth, 0.001)])
        assert speedup.verdict == verdict
    row = replay(sparse, "1mbps", against=dense).iloc[0]
    assert row["speedup"] == row["dense_step_s"] / row["step_s"] > 1.5
    assert row["verdict"] == "faster"
    assert replay(sparse, "worldwide", against=dense).iloc[0]["break_even_bps"] is pd.NA


def test_comparison_with_another_job_is_refused(runs, sparse):
    with pytest.raises(ReplayError, match=r"`schedule` of the run in .*gpipe must be '1F1B', as of the run that it is"):
        replay(runs / "sparse", "8mbps", against=runs / "gpipe")
    with pytest.raises(ReplayError, match="must be priced together, with the same compute"):
        replay(sparse, "8mbps", against=runs / "dense")


def test_tied_gradients_are_exchanged_at_the_end(runs):
    run = Replay(runs / "tied")
    each = 2 * chunk_bytes("sum", 256 * 8, 2, TIED_TABLE)[0]
    assert run.recording.collective_bytes("tied") == 2 * each
    for name in ("free", "8mbps+20ms", "8mbps/half"):
        network = parse_network(name)
        ways = 2 if network.sharing == "half" else 1
        without = [
            simulate(run.schedule, dataclasses.replace(p, transfers=p.transfers[:0]), network)
            for p in run.profiles.values()
        ]
        chunk = each / 2 + RAY.bands[0].beside_bytes
        round_s = RAY.bands[0].trips * float(network.latencies_s(0, 1)) + ways * 8 * chunk / network.bandwidth_bps  # type: ignore[operator]
        seconds = 2 * round_s
        assert run.step_seconds([network])[0].tolist() == pytest.approx([one.step_s + seconds for one in without])
        assert run.shares(network).workers["collective_s"].tolist() == pytest.approx([seconds] * run.num_workers)
    row = replay(run, "8mbps").iloc[0]
    links = Run(runs / "tied").links
    here = links[links["step"] == 3]
    assert row["tied_bytes"] + row["wire_bytes"] == here["wire_bytes"].sum()


def test_steps_that_warm_up_are_left_out(runs, sparse):
    assert sorted(Run(runs / "sparse").actions["step"].unique()) == [1, 2, 3, 5, 7, 9]
    assert list(sparse.profiles) == [2, 3, 5, 7, 9]
    assert list(Recording(runs / "sparse", max_steps=2).profiles) == [2, 9]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"steps": 1}, [0]),
        ({"steps": 2}, [1]),
        ({"steps": 4}, [2, 3]),
        ({"steps": 6, "forward": "TopK(0.1)", "compress_from": 3}, [5]),
        ({"steps": 2, "forward": "TopK(0.1)", "compress_from": 1}, [1]),
    ],
)
def test_run_shorter_than_the_profiled_period_is_priced(tmp_path, keys, steps):
    run = train(make_config({**SMALL, **keys, "profile_every_steps": 100}), engine="inline", out=tmp_path / "run")
    assert Replay(run.folder).recording.step_numbers.tolist() == steps


def test_compute_is_timed_by_cpu_clock(runs):
    auto, cpu, wall = (Replay(runs / "sparse", compute=clock) for clock in ("auto", "cpu", "wall"))
    for step, profile in cpu.profiles.items():
        assert (profile.compute_s <= wall.profiles[step].compute_s).all()
        np.testing.assert_array_equal(profile.compute_s, auto.profiles[step].compute_s)
    assert "CPU seconds" in cpu.costs.method
    assert "seconds as they passed" in wall.costs.method


def test_the_seconds_of_a_transport_are_its_own_whatever_was_recorded(runs, tmp_path):
    free = [parse_network("free")]
    costs = RAY.host
    of_ray = Replay(runs / "sparse")
    assert tuple(of_ray.overheads.values()) == (
        costs.call_s,
        costs.message_s,
        costs.byte_s,
        costs.step_s + 3 * costs.worker_s,
    )
    bare = Replay(runs / "sparse", transport="bare")
    assert not any(bare.overheads.values())
    assert (bare.step_seconds(free) < of_ray.step_seconds(free)).all()
    copy_run(runs / "sparse", tmp_path / "ray", engine="ray")
    change_columns(tmp_path / "ray" / "steps.parquet", seconds=lambda s: 9 * s)  # beside other work
    np.testing.assert_array_equal(Replay(tmp_path / "ray").step_seconds(free), of_ray.step_seconds(free))


def test_update_is_priced_by_recorded_seconds(runs, tmp_path):
    recorded = Run(runs / "sparse").steps.set_index("step")["update_s"]
    assert (recorded > 0).all()
    for profile in Replay(runs / "sparse").profiles.values():
        assert recorded.min() <= profile.update_s.max() <= recorded.max()
    old = tmp_path / "old"  # records of a version without these seconds
    shutil.copytree(runs / "sparse", old)
    write_table(pq.read_table(old / "steps.parquet").drop_columns(["update_s"]), old / "steps.parquet")
    seconds = Run(old).steps["seconds"]
    assert all(0 < profile.update_s.max() < seconds.max() for profile in Replay(old).profiles.values())
    copy_run(old, tmp_path / "old-ray", engine="ray")
    unknown = Replay(tmp_path / "old-ray")
    assert not any(profile.update_s.any() for profile in unknown.profiles.values())
    assert any("The optimiser's update is not in the price" in note for note in unknown.notes)


def test_a_recording_of_a_simulated_run_gives_its_steps_back(runs, tmp_path):
    """What Ray would have recorded on a free network, by the simulator: the waits are found again, and the seconds."""
    shutil.copytree(runs / "sparse", tmp_path / "ray")
    steps, actions = (pq.read_table(tmp_path / "ray" / f"{name}.parquet") for name in ("steps", "actions"))
    given: dict[str, Any] = {
        "call_s": 1e-3,
        "message_s": 5e-5,
        "step_s": 5e-3,
    }  # half an action is more than a hop, or it counts as call
    bare = Recording(runs / "sparse")
    frame, seconds = actions.to_pandas(), steps.to_pandas()
    for step, profile in bare.profiles.items():
        timeline = simulate(bare.schedule, dataclasses.replace(profile, **given), parse_network("free"))
        for i in frame.index[frame["step"] == step]:
            place = (0, frame.at[i, "stage"], "FB".index(frame.at[i, "op"]), frame.at[i, "microbatch"])
            frame.at[i, "start_s"], frame.at[i, "end_s"] = timeline.start_s[place] + 7, timeline.end_s[place] + 7
        seconds.loc[seconds["step"] == step, "seconds"] = timeline.step_s
    for name, table, schema in (("steps", seconds, steps.schema), ("actions", frame, actions.schema)):
        write_table(pa.Table.from_pandas(table, schema), tmp_path / "ray" / f"{name}.parquet")
    change_row(tmp_path / "ray", engine="ray")
    again = Recording(tmp_path / "ray")
    columns = {str(name): values.to_numpy() for name, values in again.run.actions.items()}
    columns = {name: values[np.isin(columns["step"], list(bare.profiles))] for name, values in columns.items()}
    durations = dict(zip(again.steps["step"], again.steps["seconds"], strict=True))
    waits = read_overheads(columns, again.rows, durations)
    for name, value in given.items():
        assert getattr(waits, name) == pytest.approx(value, rel=0.02), name
    recorded = seconds[seconds["step"].isin(bare.profiles)]["seconds"]
    costs = [dataclasses.replace(profile, **waits._asdict()) for profile in bare.profiles.values()]
    free = step_seconds(bare.schedule, costs, [parse_network("free")])[0]
    assert free.tolist() == pytest.approx(recorded.tolist(), rel=0.02)
    inline = Replay(runs / "sparse").profiles
    for step, profile in Replay(
        tmp_path / "ray"
    ).profiles.items():  # the engine changes nothing about the price of a packet
        np.testing.assert_array_equal(profile.moved_bytes, inline[step].moved_bytes)
        np.testing.assert_array_equal(profile.trips, inline[step].trips)


def test_records_of_packets_by_way_of_the_driver_still_load(runs, tmp_path):
    """Version 1 of the records, in which actions had a column more."""
    copy_run(runs / "sparse", tmp_path / "old", engine="ray", schema_version=1)
    actions = pq.read_table(tmp_path / "old" / "actions.parquet")
    write_table(actions.append_column("inlined", pa.array([True] * len(actions))), tmp_path / "old" / "actions.parquet")
    old, new = Replay(tmp_path / "old"), Replay(runs / "sparse")
    np.testing.assert_array_equal(old.wire_bytes, new.wire_bytes)


def test_workers_are_spread_over_the_hosts_of_the_network(sparse):
    assert sparse.placement(parse_network("worldwide")) == Placement((0, 21, 42))
    assert sparse.placement(parse_network("8mbps")) == Placement((0, 1, 2))


def test_the_command_prints_and_writes(runs, tmp_path):
    done = CliRunner().invoke(
        app,
        [
            *["replay", str(runs / "sparse"), "--against", str(runs / "dense"), "--target", "accuracy=0"],
            *["--network", "8mbps", "--network", "worldwide"],
            *["--json", str(tmp_path / "r.json"), "--trace", str(tmp_path / "t.json")],
        ],
    )
    assert done.exit_code == 0, done.output
    for text in (
        "8mbps",
        "worldwide",
        *("90 %", "interval"),  # headers of several words are wrapped
        "speed-up",
        *("pays", "below"),
        "compression off",
        "bubble",
        "critical path is",
    ):
        assert text in done.output
    figures = json.loads((tmp_path / "r.json").read_text())
    row = replay(beside([runs / "sparse", runs / "dense"])[0], "8mbps", target="accuracy=0").iloc[0]
    first = figures["networks"][0]
    assert first["step_s"] == row["step_s"]
    assert first["time_to_target_on_s"] == row["time_to_target_on_s"]
    assert len(first["workers"]) == 3
    assert figures["networks"][1]["pays_below"] == "-"
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event.get("cat") == "action" for event in trace) == 2 * 3 * 4


@pytest.mark.slow
def test_the_command_imports_neither_torch_nor_ray(runs):
    code = f"""
import sys
sys.argv = ["raysim", "replay", {str(runs / "sparse")!r}, "--network", "8mbps", "--target", "loss=0"]
from raysim.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
assert not {{"torch", "ray"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{runs}/none", "--network", "8mbps"], "There is no folder {runs}/none."),
        (["{empty}", "--network", "8mbps"], "There is no run in {empty}: it has no run.parquet."),
        (
            ["{runs}", "--network", "8mbps"],
            "`RUN_DIR` must be one run, but {runs} holds 8 runs: {runs}/broken, {runs}/dense, ",
        ),
        (["{runs}/sparse"], "`--network` must be given once or more, as in --network 100mbps."),
        (["{runs}/sparse", "--network", "fast"], "`--network`: A network is a preset, text such as '100mbps+20ms'"),
        (["{runs}/sparse", "--network", "no.csv"], "`--network`: The network file 'no.csv' cannot be read"),
        (["{runs}/unprofiled", "--network", "8mbps"], "has no profiled actions to be priced: train it with"),
        (
            ["{runs}/sparse", "--network", "8mbps", "--target", "0.9"],
            "`target` must be a measure and a number, as in 'accuracy=0.9' (loss=, perplexity=, accuracy=",
        ),
        (
            ["{runs}/noevals", "--network", "8mbps", "--target", "loss=1"],
            "noevals has no evaluations to find loss <= 1 in",
        ),
        (["{runs}/broken", "--network", "8mbps"], "The table 'actions' of {runs}/broken cannot be read"),
        (["{runs}/halved", "--network", "8mbps"], "must hold every action once, but got"),
        (["{runs}/sparse", "--network", "8mbps", "--against", "{runs}/none"], "There is no run in {runs}/none"),
        (["{runs}/sparse", "--network", "8mbps", "--against", "{runs}/gpipe"], "`schedule` of the run in {runs}/gpipe"),
        (
            ["{runs}/sparse", "--network", "8mbps", "--json", "/nowhere/x"],
            "`--json` must be a file that can be written",
        ),
        (["{runs}/sparse", "--network", "8mbps", "--trace", "{runs}"], "`--trace` must be a file that can be written"),
        (
            ["{runs}/sparse", "--network", "8mbps", "--compute", "gpu"],
            "`compute` must be one of auto, cpu, wall, but got 'gpu'.",
        ),
    ],
)
def test_bad_input_is_one_sentence(runs, tmp_path, arguments, sentence):
    for name in ("noevals", "broken", "halved"):
        if not (runs / name).is_dir():
            shutil.copytree(runs / "sparse", runs / name)
            evals, actions = (runs / name / f"{table}.parquet" for table in ("evals", "actions"))
            if name == "noevals":
                write_table(pq.read_table(evals).slice(0, 0), evals)
            elif name == "broken":
                actions.write_bytes(b"PAR1")
            else:
                write_table(pq.read_table(actions).slice(7), actions)
                write_table(pq.read_table(actions).slice(30), actions)
    done = CliRunner().invoke(app, ["replay", *(text.format(runs=runs, empty=tmp_path) for text in arguments)])
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("raysim: ")
    assert sentence.format(runs=runs, empty=tmp_path) in lines[0]


def test_the_header_has_the_bytes_of_the_tied_embedding(small, tmp_path):
    run = train(small(**TIED, forward="TopK(0.1)"), engine="inline", out=tmp_path / "run")
    one = Replay(run)
    tied = one.recording.collective_bytes("tied")
    assert tied > 0
    words = traffic_words(one)
    assert f"Tied embedding: {format_bytes(tied)}, uncompressed." in words
    assert ("untie it" in words) == (tied > one.wire_bytes.mean() + one.recording.collective_bytes("replica_gradient"))


def test_a_range_of_bandwidths_shows_where_two_settings_cross(runs):
    command = ["replay", f"{runs}/sparse", "--against", f"{runs}/dense", "--company", str(runs)]
    done = CliRunner().invoke(app, [*command, "--bandwidths", "100kbps..10mbps+1ms"])
    assert done.exit_code == 0, done.output
    rows = [line for line in done.output.splitlines() if "#" in line]
    assert [row.split()[1] for row in rows] == [
        f"{rate}+1ms" for rate in ("100kbps", "200kbps", "500kbps", "1mbps", "2mbps", "5mbps", "10mbps")
    ]
    lengths = [row.count("#") for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert "Against the dense run it is faster" in " ".join(done.output.split())


@pytest.mark.parametrize("text", ["10mbps", "1gbps..10mbps", "10mbps..free", "fast..10mbps", "1mbps..2mbps..3mbps"])
def test_invalid_range_is_refused(runs, text):
    done = CliRunner().invoke(app, ["replay", f"{runs}/sparse", "--bandwidths", text])
    assert done.exit_code == 2
    assert "A range of bandwidths must look like 10mbps..10gbps" in " ".join(done.output.split())
