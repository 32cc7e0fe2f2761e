"""Transports: one and the same packet has one price, wherever its bytes come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from raysim import train
from raysim.analysis import Replay
from raysim.cli import app
from raysim.config import ConfigError, RunConfig, make_config
from raysim.forecast.forecast import forecast
from raysim.network.transport import RAY, TRANSPORTS, parse_transport
from raysim.pipeline.prepare import prepare
from raysim.training.feedback import Clock

transports = pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)


@transports
@given(sizes=st.lists(st.floats(0, 1e12), min_size=1, max_size=20))
def test_more_bytes_never_cost_less(transport, sizes) -> None:
    ordered = np.sort(np.array(sizes))
    for costs in (ordered + transport.beside(ordered), transport.trips(ordered)):
        assert (np.diff(costs) >= 0).all()
    assert (transport.beside(ordered)[ordered == 0] == 0).all()


@pytest.mark.parametrize("transport", [TRANSPORTS["nccl"], TRANSPORTS["ray"]], ids=["nccl", "ray"])
def test_run_replay_and_forecast_agree_on_bytes_and_trips(small, tmp_path, transport) -> None:
    config = small(forward="TopK(0.3)", backward="Quantize(4)")
    run = train(config, engine="inline", out=tmp_path / "run")
    replayed = Replay(run, transport=transport.name)
    planned = forecast(config, device="T4", transport=transport.name)
    for profile in replayed.profiles.values():
        sizes = np.broadcast_to(planned.steady.wire_bytes, profile.wire_bytes.shape)
        np.testing.assert_array_equal(profile.wire_bytes, sizes)
        for name in ("moved_bytes", "trips"):
            mine = np.broadcast_to(getattr(planned.steady, name), sizes.shape)
            np.testing.assert_array_equal(getattr(profile, name), mine)
    for notes in (replayed.notes, planned.notes):
        assert f"Transport {transport}." in notes


def test_a_simulated_clock_takes_the_transport_of_the_configuration(small) -> None:
    seconds = {}
    for name in TRANSPORTS:
        config = small(
            num_replicas=2,
            num_microbatches=2,
            replica_gradient="TopK(0.1)",
            clock="1mbps+50ms",
            profile="T4",
            transport=name,
        )
        plan = prepare(config).plan
        report = _report(plan)
        seconds[name] = Clock(plan).step_s(report, 0.0)
    assert seconds["nccl"] < seconds["gloo"] < seconds["ray"]


def _report(plan):
    from raysim.pipeline.link import LinkAccount
    from raysim.pipeline.reports import StepReport

    accounts = [
        LinkAccount(boundary, direction, True, packets=2, wire_bytes=4000, dense_bytes=8000)
        for boundary in range(plan.num_stages - 1)
        for direction in ("forward", "backward")
    ]
    return [StepReport(replica, [], accounts, [], [], None) for replica in range(plan.num_replicas)]


def test_unknown_transports_are_one_sentence(small, tmp_path) -> None:
    sentence = "`transport` must be one of ray, gloo, nccl, bare, but got 'tcp'."
    with pytest.raises(ValueError, match="`transport` must be one of"):
        parse_transport("tcp")
    done = CliRunner().invoke(
        app, ["simulate", "digits-cnn", "--device", "T4", "--network", "8mbps", "--transport", "tcp"]
    )
    assert (done.exit_code, done.stderr.strip().replace("\n", " ")) == (2, f"raysim: {sentence.replace('`t', '`--t')}")
    with pytest.raises(ConfigError, match="`transport`"):
        make_config({"model": "cnn", "steps": 1, "clock": "8mbps", "profile": "T4", "transport": "tcp"})
    with pytest.raises(ConfigError, match="`transport` has no effect with `clock` = 'measured'"):
        small(transport="gloo")


def test_clock_help_states_no_default_profile(small) -> None:
    assert "needs" in (RunConfig.model_fields["profile"].description or "")
    plan = prepare(small(clock="8mbps")).plan
    with pytest.raises(ConfigError, match="`profile` is needed with `clock` = '8mbps'"):
        Clock(plan)


def test_transport_description_has_its_figures() -> None:
    assert f"{RAY.bands[0].beside_bytes:,} bytes of overhead per message" in str(RAY)
    assert "1 one-way trip" in str(TRANSPORTS["nccl"])
