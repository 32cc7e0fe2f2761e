"""The time and the memory of runs without a flush: forecast, replayed and on a simulated clock."""

from typing import Any

import pytest
from pipelines import ZBV

from raysim.analysis.runs.prices import in_company
from raysim.analysis.runs.step import Replay
from raysim.forecast.forecast import forecast
from raysim.network.presets import parse_network
from raysim.network.simulate import simulate
from raysim.schedules import OneFOneB, PostValidatedSteps, Unflushed
from raysim.training.train import train

NETWORKS = [parse_network(text) for text in ("free", "20mbps", "1gbps+20ms")]


@pytest.mark.parametrize("weights", ["DoubleBuffered", "Stashed", "PipeMare(10)"])
def test_a_forecast_without_a_flush_is_faster_and_needs_the_versions(weights) -> None:
    flushed, found = (forecast("digits-cnn", f"weights={text}", device="T4") for text in ("Synchronous", weights))
    delays = found.config.weight_delays()
    for network in NETWORKS:
        assert found.step_s(network) < flushed.step_s(network)
    for before, after, of_stage in zip(flushed.memories, found.memories, delays, strict=True):
        assert before.versions_bytes == 0
        copies = found.config.weights.num_copies(of_stage)
        assert after.versions_bytes == copies * after.weights_bytes
        assert after.total_bytes - before.total_bytes == after.versions_bytes
    assert any(weights in note for note in found.notes)


def test_the_next_step_hides_the_average_of_replicas_that_no_forward_waits_for() -> None:
    """Two buffers: the longer one of compute and exchange counts; one buffer waits for both."""
    keys = ("num_replicas=2", "num_microbatches=4")
    options: dict[str, Any] = {"device": "T4", "transport": "bare"}
    found = forecast("digits-cnn", "weights=DoubleBuffered", *keys, **options)
    waiting = forecast("digits-cnn", "weights=Stashed(update='step')", *keys, **options)
    assert (found.exchange_delay, waiting.exchange_delay) == (1, 0)
    for network in NETWORKS:
        timeline = found.simulate(network)
        assert found.step_s(network) == pytest.approx(max(timeline.pipeline_s, timeline.collective_s))
        assert waiting.step_s(network) == pytest.approx(timeline.pipeline_s + timeline.collective_s)


def test_replay_simulates_a_run_without_flush(small, tmp_path) -> None:
    """Its bytes and seconds, in the order of the rows without a flush; a synchronous run is priced as before."""
    for weights in ("Synchronous", "Stashed"):
        train(small(weights=weights, forward="TopK(0.3)"), engine="inline", out=tmp_path / weights)
    for weights, schedule in (("Synchronous", OneFOneB()), ("Stashed", Unflushed(OneFOneB()))):
        one = Replay(tmp_path / weights)
        seconds = one.step_seconds(NETWORKS)
        for network, row in zip(NETWORKS, seconds, strict=True):
            expected = [simulate(schedule, profile, network).step_s for profile in one.profiles.values()]
            assert row.tolist() == pytest.approx(expected, rel=1e-12)
            flushed = [simulate(OneFOneB(), profile, network).step_s for profile in one.profiles.values()]
            assert all(a <= b * (1 + 1e-9) for a, b in zip(row, flushed, strict=True))
        assert set(one.run.actions["work"].dropna()) == ({"update"} if weights == "Stashed" else set())


def test_a_simulated_clock_has_no_flush(small, tmp_path) -> None:
    """GraVAC reads the time of a step from the clock, which prices the network and the overlap that the weights allow."""
    from raysim.engine.inline import InlineEngine
    from raysim.pipeline.prepare import prepare
    from raysim.training.feedback import Clock

    found = {}
    for weights in ("Synchronous", "DoubleBuffered"):
        engine = InlineEngine(prepare(small(weights=weights, clock="100mbps", profile="T4")))
        engine.start()
        found[weights] = Clock(engine.plan).step_s(engine.step(0), 0.0)
    assert 0 < found["DoubleBuffered"] < found["Synchronous"]


def test_the_speed_up_of_a_run_without_a_flush_is_against_the_dense_run_with_one(small, tmp_path) -> None:
    """Each is priced in the order of its own rows, and so is the bandwidth at which they are even."""
    for weights in ("Synchronous", "DoubleBuffered"):
        train(small(weights=weights), engine="inline", out=tmp_path / weights)
    found, dense = in_company([tmp_path / "DoubleBuffered", tmp_path / "Synchronous"])
    (speedup,) = found.speedup(dense, NETWORKS[1:2])
    expected = dense.step_seconds(NETWORKS[1:2]).mean() / found.step_seconds(NETWORKS[1:2]).mean()
    assert speedup.value == pytest.approx(expected)
    assert speedup.value > 1.05
    even = found.break_even_bps(dense, NETWORKS[1])
    assert even is not None
    assert even.value > 1e9  # the same bytes, without the bubble: faster on any link


@pytest.mark.parametrize("schedule", ["ZBV", ZBV["schedule"]], ids=["family", "custom"])
def test_post_validated_steps_are_recorded_and_replayed(small, tmp_path, schedule) -> None:
    changes = {"schedule": schedule, "num_stages": 4, "forward": "TopK(0.3)", "optimizer": {"clip_norm": 1.0}}
    config = small(**changes, weights="PostValidated")
    train(config, engine="inline", out=tmp_path / "run")
    replay = Replay(tmp_path / "run")
    assert isinstance(replay.schedule, PostValidatedSteps)
    assert replay.schedule.rows(4, 4) == config.executed_schedule.rows(4, 4)
    for network, row in zip(NETWORKS, replay.step_seconds(NETWORKS), strict=True):
        expected = [simulate(config.executed_schedule, each, network).step_s for each in replay.profiles.values()]
        assert row.tolist() == pytest.approx(expected, rel=1e-12)
        flushed = [simulate(config.schedule, each, network).step_s for each in replay.profiles.values()]
        assert all(a < b * (1 + 1e-9) for a, b in zip(row, flushed, strict=True))
    assert max(row) < 0.9 * min(flushed)  # where latency is long a flush waits for it
    assert any("PostValidated" in note for note in replay.notes)
