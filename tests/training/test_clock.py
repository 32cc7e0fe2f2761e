"""The simulated clock: it agrees with forecasts and replays, and codecs are paid for by their counted work."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from runs import break_off

from raysim import train
from raysim.analysis import Replay
from raysim.codecs import TopK
from raysim.config import ConfigError
from raysim.engine.inline import InlineEngine
from raysim.forecast.compute import record_profile
from raysim.forecast.forecast import forecast
from raysim.network.presets import DEVICES, parse_network
from raysim.network.profile import COSTS
from raysim.network.simulate import simulate
from raysim.pipeline.prepare import prepare
from raysim.training.feedback import Clock
from raysim.training.run import Training

TWO = {"num_replicas": 2, "num_microbatches": 2, "clock": "100mbps+1ms", "profile": "T4"}
EVEN = {"forward": "TopK(0.3, index='int32')", "backward": "Quantize(8)"}  # packets of one size
GRAVAC = "GraVAC(2, 50, epsilon=0.5, window=1, ewma_alpha=1, min_values=16)"


def reports_of(config, steps=3):
    """Return the plan of a run and the reports of its last of a few steps."""
    engine = InlineEngine(prepare(config))
    engine.start()
    for step in range(steps):
        reports = engine.step(step)
    return engine.plan, reports


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"schedule": "ZBH1", "recompute": True},
        pytest.param({"schedule": "Interleaved1F1B(2)", "num_stages": 4}, marks=pytest.mark.slow),
        {"replica_gradient": "ErrorFeedback(TopK(0.05, index='int32'))"},
        {"num_stages": 1, "forward": "Identity", "backward": "Identity", "num_replicas": 4, "num_microbatches": 1},
    ],
    ids=["dense", "zero-bubble", "interleaved", "topk", "one-stage"],
)
def test_clock_forecast_and_replay_agree(small, tmp_path, changes):
    config = small(**{**TWO, **EVEN, "steps": 4, **changes})
    network = parse_network(config.clock)
    plan, reports = reports_of(config)
    clock = Clock(plan)
    found = clock.step_s(reports, 0.0)
    assert forecast(config, device="T4").step_s(network) == pytest.approx(found, rel=1e-9)
    replay = Replay(train(config, engine="inline", out=tmp_path / "run"))
    frozen = clock.profile(reports)
    shape = (*frozen.compute_s.shape[:3], config.num_microbatches)
    taken: dict[str, Any] = {
        name: np.broadcast_to(getattr(frozen, name), shape) for name in COSTS if not name.endswith("_bytes")
    }
    for profile in replay.profiles.values():
        assert profile.transport == frozen.transport
        same = dataclasses.replace(profile, **taken, method_s=frozen.method_s, update_s=frozen.update_s)
        assert simulate(replay.schedule, same, network).step_s == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("method", [GRAVAC, "ErrorFeedback(TopK(0.05))", "PowerSGD(2, min_values=16)", "Identity"])
def test_codec_time_is_proportional_to_work(small, method):
    config = small(**{**TWO, "forward": "ErrorFeedback(TopK(0.3))", "replica_gradient": method, "clock": "free"})
    plan, reports = reports_of(config)
    slow, fast = (Clock(dataclasses.replace(plan, config=config.changed(codec_speed=s))) for s in (1e6, 1e7))
    assert Clock(plan).codec_speed == DEVICES["T4"].codec_bytes_per_s
    assert str(Clock(plan)) == "free with the compute of T4, codecs at 37.5 GB/s, transport ray"
    costs = [clock.profile(reports) for clock in (slow, fast)]
    for name in ("encode_s", "decode_s", "method_s"):
        np.testing.assert_allclose(getattr(costs[0], name), 10 * getattr(costs[1], name))
    work = {group.stage: group.coded_bytes for report in reports for group in report.groups if not report.replica}
    assert costs[0].method_s.tolist() == [work[stage] / 1e6 for stage in range(plan.num_stages)]
    assert any(work.values()) == (method != "Identity")
    assert costs[0].encode_s[:, :-1, 0].min() > 0 == costs[0].encode_s[:, :, 1].max()
    assert slow.step_s(reports, 0.0) > fast.step_s(reports, 0.0)


def test_probing_two_factors_costs_both(small):
    """Selecting the minimum of a dense gradient, the candidate of what that keeps; then withholding and averaging two packets."""
    config = small(**{**TWO, "num_stages": 1, "replica_gradient": GRAVAC.replace("0.5", "0.001")})
    plan, reports = reports_of(config, steps=1)
    (account,) = reports[0].groups
    values = [p.numel() for p in prepare(config).modules[0].parameters() if p.ndim > 1 and p.numel() >= 16]
    dense, kept = 4 * sum(values), 4 * sum(round(value / 2) for value in values)
    assert account.decisions[0].branch != "dense"
    assert account.coded_bytes == pytest.approx(dense + kept + 3 * dense, rel=0.01)
    assert Clock(plan).profile(reports).method_s[0] == account.coded_bytes / DEVICES["T4"].codec_bytes_per_s


def decisions_of(config, folder, **options):
    decisions = train(config, out=folder, **options).decisions
    assert decisions["throughput"].notna().any()
    return decisions


def test_decisions_repeat_after_a_resumption(small, tmp_path):
    config = small(**{**TWO, "replica_gradient": GRAVAC, "forward": "GraVAC(epsilon=0.5, window=1)"})
    whole = decisions_of(config, tmp_path / "whole", engine="inline")
    break_off(Training(config, out=tmp_path / "broken", engine="inline"), 5)
    assert decisions_of(config, tmp_path / "broken", engine="inline", resume=True).equals(whole)


@pytest.mark.slow
def test_decisions_are_the_same_on_both_engines(ray, small, tmp_path):
    config = small(**{**TWO, "replica_gradient": GRAVAC, "forward": "GraVAC(epsilon=0.5, window=1)"})
    inline, on_ray = (decisions_of(config, tmp_path / engine, engine=engine) for engine in ("inline", "ray"))
    assert inline.equals(on_ray)


def test_a_profile_without_codecs_needs_a_speed(small, tmp_path):
    config = small(**TWO)
    path = str(tmp_path / "here.json")
    dense = record_profile(config, num_steps=1)
    dense.save(path)
    assert dense.codec_bytes_per_s == 0
    changes = {"profile": path, "forward": "TopK(0.1)"}
    with pytest.raises(ConfigError, match=r"^`codec_speed` must be given, since the profile .* without compression"):
        Clock(prepare(config.changed(**changes)).plan)
    assert Clock(prepare(config.changed(**changes | {"codec_speed": 1e9})).plan).codec_speed == 1e9
    packed = record_profile(config.changed(forward=repr(TopK(0.1))), num_steps=1)
    packed.save(path)
    assert Clock(prepare(config.changed(**changes)).plan).codec_speed == packed.codec_bytes_per_s > 0
