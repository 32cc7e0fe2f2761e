"""One job, one compute: laws of prices that runs share, and of their intervals."""

import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from configurations import SMALL
from report_runs import change_columns, change_row, copy_run
from typer.testing import CliRunner

from raysim import analysis, train
from raysim.analysis import Replay, ReplayError, in_company, load, replay
from raysim.analysis.data.settings import titles
from raysim.analysis.runs.estimates import RESAMPLES, Estimate
from raysim.cli import app
from raysim.config import make_config
from raysim.forecast.compute import record_profile
from raysim.network.presets import parse_network
from raysim.records import Run

NETWORKS = ("1mbps", "100mbps", "free")
SETTINGS = {
    "dense": {},
    "q8": {"forward": "Quantize(8)", "backward": "Quantize(8)"},
    "topk": {"forward": "TopK(0.1)", "backward": "Quantize(4)"},
    "feedback": {"forward": "ErrorFeedback(TopK(0.3))", "backward": "TopK(0.3)"},
}
CONFIG = {**SMALL, "steps": 12, "evaluate_every_steps": 12, "profile_every_steps": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of a run of each setting, and of a second dense one of another seed."""
    folder = tmp_path_factory.mktemp("costs")
    for name, changes in SETTINGS.items():
        train(make_config({**CONFIG, **changes}), engine="inline", out=folder / name)
    train(make_config({**CONFIG, "seed": 7}), engine="inline", out=folder / "dense-7")
    return folder


@pytest.fixture(scope="module")
def priced(runs):
    return company(runs)


def networks():
    return [parse_network(name) for name in NETWORKS]


def company(folder, names=(*SETTINGS, "dense-7"), **options):
    return dict(zip(names, in_company([folder / name for name in names], **options), strict=True))


def stretched(source, target, factor, codec_factor=None):
    """Copy a run as a machine `factor` times as slow, in codecs `codec_factor` times, would have recorded it."""
    shutil.copytree(source, target)
    codecs = dict.fromkeys(("decode_s", "encode_s"), codec_factor or factor)
    actions = dict.fromkeys(("compute_wall_s", "compute_cpu_s", "start_s", "end_s"), factor) | codecs
    for table, factors in {"actions": actions, "steps": {"seconds": factor}}.items():
        changes = {name: lambda values, times=times: times * values for name, times in factors.items()}
        change_columns(target / f"{table}.parquet", **changes)
    return target


def test_runs_of_one_job_share_compute_and_codecs_and_differ_in_bytes(runs, priced):
    assert len({one.costs for one in priced.values()}) == 1
    for one in priced.values():
        np.testing.assert_array_equal(one.mean_profile.compute_s, priced["dense"].mean_profile.compute_s)
        assert one.overheads == priced["dense"].overheads
        assert one.costs.source == "pooled over 5 runs"
    alone = Replay(runs / "q8")
    assert alone.costs.source == "recorded in this run alone"
    np.testing.assert_array_equal(alone.wire_bytes, priced["q8"].wire_bytes)


def test_two_dense_runs_of_a_job_have_one_price(priced):
    one, other = (priced[name].step_seconds(networks()) for name in ("dense", "dense-7"))
    assert (one == one[:, :1]).all()
    np.testing.assert_array_equal(one[:, 0], other[:, 0])
    assert [tuple(each) for each in priced["dense-7"].speedup(priced["dense"], networks())] == [(1, 1, 1)] * 3


def test_no_setting_beats_dense_on_free_network(runs, priced):
    free = [parse_network("free")]
    every = priced | {f"{name}, bare": one for name, one in company(runs, transport="bare").items()}
    for name, one in every.items():
        (speedup,) = one.speedup(every["dense, bare" if "bare" in name else "dense"], free)
        assert speedup.verdict != "faster", name


def test_speedup_is_dense_step_over_step(runs):
    results = load(runs)
    frame = replay(results, NETWORKS, against="dense")
    assert len(frame) == 5 * 3
    np.testing.assert_array_equal(frame["speedup"], frame["dense_step_s"] / frame["step_s"])
    dense = frame[frame["run"] == "dense"].set_index("network")["step_s"]
    np.testing.assert_array_equal(frame["dense_step_s"], dense[frame["network"]])
    assert ((frame["step_low_s"] < frame["step_s"]) & (frame["step_s"] < frame["step_high_s"])).all()
    others = frame[~frame["run"].str.startswith("dense")]
    assert (others["speedup_low"] < others["speedup_high"]).all()
    assert frame["compute"].unique().tolist() == ["pooled over 5 runs"]
    even = analysis.settings(results, networks=NETWORKS[0]).dropna(subset="step_s")
    assert sorted(even["speedup"]) == pytest.approx(sorted(others.loc[others["network"] == NETWORKS[0], "speedup"]))


def test_result_is_independent_of_run_order(runs):
    names = list(SETTINGS)
    orders = names, names[::-1], [names[2], names[0], names[3], names[1]]
    first, *others = (company(runs, order) for order in orders)
    for name in names:
        steps = first[name].resampled_seconds(networks())
        for prices in others:
            np.testing.assert_array_equal(prices[name].resampled_seconds(networks()), steps)


@pytest.mark.parametrize(
    "loaded",
    [
        ("topk", "feedback", "dense"),
        *(pytest.param(names, marks=pytest.mark.slow) for names in (("dense", "dense-7"), ("q8",))),
    ],
)
def test_runs_recorded_on_a_machine_half_as_fast_move_no_ratio_beyond_its_interval(runs, priced, tmp_path, loaded):
    for name in priced:
        if name in loaded:
            stretched(runs / name, tmp_path / name, 2.0)
        else:
            shutil.copytree(runs / name, tmp_path / name)
    busy = company(tmp_path)
    for name in SETTINGS:
        before, after = (of[name].speedup(of["dense"], networks()) for of in (priced, busy))
        for network, one, other in zip(NETWORKS, before, after, strict=True):
            assert abs(other.value - one.value) <= other.high - other.low, (name, network)


@pytest.mark.parametrize(("engine", "covers"), [("ray", True), ("inline", False)])
def test_interval_of_a_run_on_ray_covers_the_price_of_stages_that_share_no_caches(runs, tmp_path, engine, covers):
    stretched(runs / "q8", tmp_path / "q8", 1.35, codec_factor=2.0)
    change_row(tmp_path / "q8", engine=engine)
    for name in ("100mbps", "free"):
        (alone,), (one,) = (
            Replay(folder / "q8", transport="bare").step_s([parse_network(name)]) for folder in (runs, tmp_path)
        )
        assert (one.low <= alone.value <= one.high) == covers


def test_one_run_of_one_profiled_step_has_an_interval_too(runs, small, tmp_path):
    for name, changes in {"dense": {}, "topk": {"forward": "TopK(0.1)"}}.items():
        train(small(**changes, steps=2, profile_every_steps=2), engine="inline", out=tmp_path / name)
    dense, one = in_company([tmp_path / "dense", tmp_path / "topk"])
    assert len(one.profiles) == 1
    for found in (*one.step_s(networks()), *one.speedup(dense, networks())):
        assert found.low <= found.value <= found.high
        assert found.low < found.high
    assert one.resampled_seconds(networks()).shape == (3, RESAMPLES)


def test_runs_of_different_jobs_are_not_compared(runs, tmp_path):
    copy_run(runs / "dense", tmp_path / "dense")
    copy_run(runs / "topk", tmp_path / "topk")
    change_row(tmp_path / "topk", threads_per_stage=2)
    with pytest.raises(ReplayError, match="must be priced together, with the same compute"):
        replay(tmp_path / "topk", "free", against=tmp_path / "dense")
    frame = replay(load(tmp_path), "free", against="dense")
    assert frame["compute"].tolist() == ["recorded in this run alone"] * 2
    assert frame["speedup"].notna().tolist() == [True, False]
    words = titles(Run(tmp_path / name).row for name in ("dense", "topk"))
    assert sorted(words.values()) == ["cnn on digits, threads_per_stage=1", "cnn on digits, threads_per_stage=2"]


def test_profile_replaces_recorded_compute(runs, tmp_path):
    file = tmp_path / "here.json"
    record_profile(make_config(CONFIG), num_steps=2).save(file)
    quiet = in_company([runs / "dense", runs / "q8"], profile=file)
    assert quiet[0].costs.source == f"profile {file}"
    recorded = in_company([runs / "dense", runs / "q8"])
    assert not np.allclose(quiet[0].mean_profile.compute_s, recorded[0].mean_profile.compute_s)
    np.testing.assert_array_equal(quiet[1].mean_profile.encode_s, recorded[1].mean_profile.encode_s)
    frame = replay([runs / "dense", runs / "q8"], "free", profile=file)
    assert frame["compute"].unique().tolist() == [f"profile {file}"]
    record_profile(make_config({**CONFIG, "dtype": "bfloat16"}), num_steps=1).save(tmp_path / "other.json")
    with pytest.raises(
        ReplayError, match=r"^`profile` must have activations of [\d,]+ bytes at boundary 0, but has [\d,]+: "
    ):
        in_company([runs / "q8"], profile=tmp_path / "other.json")
    done = CliRunner().invoke(app, ["replay", str(runs / "q8"), "--network", "free", "--profile", str(tmp_path / "no")])
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr


def test_work_outside_passes_is_a_separate_kind(runs, tmp_path):
    train(make_config({**CONFIG, "forward": "ACGC(0.1)"}), engine="inline", out=tmp_path / "acgc")
    works = Run(tmp_path / "acgc").actions.fillna({"work": "none"}).groupby("stage")["work"].agg(set).to_dict()
    assert works == {0: {"none"}, 1: {"sensitivity"}, 2: {"sensitivity"}}
    assert Run(runs / "dense").row["device_kind"] == ("cuda" if torch.cuda.is_available() else "cpu")
    acgc, dense = in_company([tmp_path / "acgc", runs / "dense"])
    mine, plain = (one.mean_profile.compute_s[0, :, 1, 0] for one in (acgc, dense))
    assert mine[0] == plain[0]
    assert (mine[1:] != plain[1:]).all()


def test_estimate_bounds_decide_wording():
    assert Estimate(2.0, 1.5, 2.5).at(4.0) == (4.0, 3.0, 5.0)
    assert [Estimate(1.0, *ends).verdict for ends in ((1.01, 1.2), (0.8, 0.99), (0.9, 1.1), (1.0, 1.0))] == [
        "faster",
        "slower",
        "not distinguishable",
        "not distinguishable",
    ]


@pytest.mark.slow
def test_busy_machine_keeps_ratios_within_interval(tmp_path):
    """Real ones: processes that burn every core while dense is recorded, and none while the others are."""
    config = {**CONFIG, "steps": 60, "evaluate_every_steps": 60, "profile_every_steps": 3}

    def record(folder, burning):
        for name, changes in SETTINGS.items():
            load_ = [sys.executable, "-c", "while True: pass"]
            burners = [subprocess.Popen(load_) for _ in range(4)] if name in burning else []
            try:
                train(make_config({**config, **changes}), engine="inline", out=folder / name)
            finally:
                for burner in burners:
                    burner.kill()
                    burner.wait()
        return company(folder, tuple(SETTINGS))

    quiet, busy = record(tmp_path / "quiet", ()), record(tmp_path / "busy", ("dense",))
    rows = []
    for name in SETTINGS:
        before, after = (of[name].speedup(of["dense"], networks()) for of in (quiet, busy))
        for network, one, other in zip(NETWORKS, before, after, strict=True):
            held = abs(other.value - one.value) <= other.high - other.low
            rows.append({"setting": name, "network": network, "quiet": one, "busy": other, "held": held})
    assert pd.DataFrame(rows)["held"].all(), pd.DataFrame(rows).to_string()


def test_load_in_every_second_step_moves_no_price_beyond_its_interval(runs, tmp_path):
    """Load lengthens all that a step records: caches its CPU seconds by a quarter, other processes its wall-clock seconds threefold."""
    factors = dict.fromkeys(("decode_s", "compute_wall_s", "encode_s"), 3.0) | {"compute_cpu_s": 1.25}
    noise = np.random.default_rng(0)
    for name in SETTINGS:
        actions = Run(runs / name).actions
        loaded = actions["step"].isin(actions["step"].unique()[::2])
        of_kind = actions.groupby(
            ["stage", "op", "microbatch", "work"], dropna=False
        )  # the tests' machine has a load of its own
        steady = {of: of_kind[of].transform("median") * noise.lognormal(0.0, 0.03, len(actions)) for of in factors}
        for folder in ("quiet", "busy"):
            shutil.copytree(runs / name, tmp_path / folder / name)
            slower = {of: np.where(loaded & (folder == "busy"), factor, 1.0) for of, factor in factors.items()}
            changes = {of: lambda _, seconds=steady[of] * slower[of]: seconds for of in factors}
            change_columns(tmp_path / folder / name / "actions.parquet", **changes)
        prices = [Replay(tmp_path / folder / name).step_s(networks()) for folder in ("quiet", "busy")]
        for network, quiet, busy in zip(NETWORKS, *prices, strict=True):
            assert quiet.value <= busy.value <= quiet.high, (name, network)
            assert busy.low <= quiet.value, (name, network)
