"""Timings by hand: files, their checks, and steps equal to those of profiles made in Python."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from timelines import check_timeline
from typer.testing import CliRunner

from raysim.cli import app
from raysim.forecast.timings import Timings, read_timings, timed_step
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.simulate import simulate
from raysim.network.topology import FREE
from raysim.network.transport import NCCL
from raysim.notation import InputError
from raysim.schedules import parse_schedule

SLOW = parse_network("100mbps+5ms")
WHOLE: dict[str, Any] = {"num_stages": 4, "num_microbatches": 8, "forward_s": 0.01, "backward_s": 0.02}
PARTS: dict[str, Any] = {"num_stages": 4, "num_microbatches": 8, "forward_s": 0.01, "input_s": 0.01, "weight_s": 0.008}


def step_s(**values: Any) -> float:
    return Timings(**values).step().simulate(SLOW).step_s


@pytest.mark.parametrize("text", ["1F1B", "GPipe", "Interleaved1F1B(2)", "ZBH1"])
def test_timings_file_is_priced_as_equal_profile(text: str) -> None:
    profile = Profile.uniform(
        4, 0.01, 0.01, weight_s=0.008, wire_bytes=1e5, update_s=0.002, gradient_bytes=4e6, message_s=0.003
    )
    timings = PARTS | {"message_bytes": 1e5, "update_s": 0.002, "gradient_bytes": 4e6, "message_s": 0.003}
    expected = simulate(parse_schedule(text), profile, SLOW, num_microbatches=8, num_replicas=2).step_s
    assert step_s(**timings, schedule=text, num_replicas=2) == expected


@pytest.mark.parametrize("text", ["1F1B", "Interleaved1F1B(2)", "ZBH1", "ZBV"])
def test_worker_updates_its_stages_one_after_another(text: str) -> None:
    without, updating = (Timings(**PARTS, schedule=text, update_s=each).step() for each in (0.0, (0.25, 0.5, 1.0, 2.0)))
    longest = {"Interleaved1F1B(2)": 0.5 + 2.0, "ZBV": 0.25 + 2.0}.get(text, 2.0)
    assert updating.simulate(FREE).step_s - without.simulate(FREE).step_s == pytest.approx(longest)


def test_steps_may_follow_without_a_flush() -> None:
    thirds: dict[str, Any] = {
        "num_stages": 4,
        "num_microbatches": 8,
        "forward_s": 1.0,
        "input_s": 1.0,
        "weight_s": 1.0,
        "schedule": "ZBH2",
    }
    flushed, validated = (
        Timings(**thirds, weights=weights).step().simulate(FREE) for weights in ("Synchronous", "PostValidated")
    )
    assert (flushed.step_s, validated.step_s) == (27.0, 24.0)
    with pytest.raises(InputError, match=r"^ZBH2 cannot run without a flush\.$"):
        Timings(**thirds, weights="Stashed").step()


@pytest.mark.parametrize(("weights", "updates"), [("Stashed", 4), ("Stashed(update='step')", 1), ("Synchronous", 1)])
def test_every_update_takes_its_seconds(weights: str, updates: int) -> None:
    alone = Timings(num_stages=1, num_microbatches=4, forward_s=1.0, backward_s=2.0, update_s=0.5, weights=weights)
    assert alone.step().step_s(FREE) == pytest.approx(4 * 3.0 + updates * 0.5)


def test_lists_have_a_value_for_each_stage() -> None:
    timings = Timings(**WHOLE | {"forward_s": (0.01, 0.03, 0.01, 0.01), "message_bytes": (3e5, 2e5, 1e5, 0)})
    profile = timings.step().profile
    assert profile.compute_s[0, :, 0, 0].tolist() == [0.01, 0.03, 0.01, 0.01]
    assert profile.wire_bytes[0, :, 0, 0].tolist() == [3e5, 2e5, 1e5, 0]
    assert profile.wire_bytes[0, :, 1, 0].tolist() == [0, 3e5, 2e5, 1e5]  # a gradient is as large as its activation


def test_messages_may_block_their_senders_and_cost_their_hosts() -> None:
    base = step_s(**WHOLE, message_s=0.004)
    assert step_s(**WHOLE, message_s=0.004, blocking_sends=True) > base
    with pytest.raises(InputError, match=r'^`blocking` sends need a network whose `sharing` is not "inbound"'):
        Timings(**WHOLE, message_s=0.004, blocking_sends=True).step().simulate(parse_network("1gbps/inbound"))
    copied = Timings(**WHOLE, message_bytes=1e6, send_byte_s=15e-9).step().profile
    assert copied.encode_s[0, :, :, 0].tolist() == [[0.015, 0], [0.015, 0.015], [0.015, 0.015], [0, 0.015]]


@pytest.mark.parametrize("text", ["GPipe", "1F1B", "1F1B(ahead=3)", "ZBH2", "ZB(weight=0.8, memory=2)"])
@pytest.mark.parametrize("weights", ["Synchronous", "PostValidated"])
def test_a_blocking_send_takes_its_sender_as_long_as_the_network(text: str, weights: str) -> None:
    parts = PARTS | {"schedule": text, "weights": weights, "blocking_sends": True}
    by_network = Timings(**parts, message_bytes=1e5).step().simulate(SLOW)
    by_hand = Timings(**parts, message_s=8 * 1e5 / 100e6 + 5e-3).step().simulate(FREE)
    np.testing.assert_allclose(by_network.start_s, by_hand.start_s, rtol=1e-9, atol=1e-12)
    assert by_network.step_s == pytest.approx(by_hand.step_s, rel=1e-9)
    check_timeline(by_network)
    waits = sum(each.wait_bytes_s + each.wait_latency_s for each in by_network.workers())
    assert waits >= sum(each.overhead_s for each in by_hand.workers()) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"weight_s": 0.1}, "either `backward_s`, or `input_s` and `weight_s`"),
        ({"backward_s": None}, "either `backward_s`, or `input_s` and `weight_s`"),
        ({"forward_s": (1.0, 2.0)}, "`forward_s` must have a value for each of 4 stages, but has 2"),
        ({"blocking_sends": True}, "`blocking_sends` needs messages: give `message_bytes`, `message_s` or both"),
        ({"schedule": "2F1B"}, "schedule"),
        ({"forward_s": -1}, "forward_s"),
        ({"forward_s": True}, "forward_s"),
        ({"num_stages": 0}, "num_stages"),
    ],
)
def test_contradictory_figures_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Timings(**WHOLE | changes)


def test_missing_weight_gradient_share_is_requested() -> None:
    with pytest.raises(InputError, match=r"^ZBH1 runs weight gradients separately, .* give `weight_share`"):
        Timings(**WHOLE, schedule="ZBH1").step()
    third, half = (Timings(**WHOLE, schedule="ZBH1", weight_share=share).step() for share in (1 / 3, 1 / 2))
    assert third.profile.compute_s[0, 1, :, 0].tolist() == pytest.approx([0.01, 0.04 / 3, 0.02 / 3])
    assert half.simulate(FREE).step_s < third.simulate(FREE).step_s < Timings(**WHOLE).step().simulate(FREE).step_s


@given(forward=st.floats(1e-4, 1.0), inputs=st.floats(1e-4, 1.0), weight=st.floats(1e-4, 1.0), count=st.integers(1, 12))
def test_step_time_is_independent_of_backward_split(forward, inputs, weight, count) -> None:
    common = {"num_stages": 3, "num_microbatches": count, "forward_s": forward}
    parts = Timings(**common, input_s=inputs, weight_s=weight).step().simulate(FREE).step_s
    whole = Timings(**common, backward_s=inputs + weight).step().simulate(FREE).step_s
    assert parts == pytest.approx(whole)


def test_timings_and_profile_files_are_recognised(tmp_path: Path) -> None:
    written = tmp_path / "t.toml"
    written.write_text("\n".join(f"{name} = {value}" for name, value in PARTS.items()))
    (tmp_path / "t.json").write_text(json.dumps(PARTS))
    saved = tmp_path / "profile.json"
    timed = Timings(**PARTS).step()
    timed.profile.save(saved)
    expected = timed.simulate(SLOW).step_s
    for path, changes in ((written, []), (tmp_path / "t.json", []), (saved, ["num_microbatches=8"])):
        step = read_timings(str(path), changes)
        assert step is not None
        assert step.simulate(SLOW).step_s == expected
    (tmp_path / "recipe.toml").write_text('base = "digits-cnn"')
    assert read_timings(str(tmp_path / "recipe.toml")) is None
    assert read_timings("digits-cnn") is None
    with pytest.raises(InputError, match="Unknown key `forward` with a profile"):
        read_timings(str(saved), ["forward=1"])


def test_a_transport_adds_its_hosts_seconds() -> None:
    timed = Timings(**WHOLE, message_s=0.004, message_bytes=1e5).step()
    over = timed.over(NCCL)
    assert over.profile.message_s == 0.004 + NCCL.host.message_s
    assert over.simulate(SLOW).step_s > timed.simulate(SLOW).step_s


def test_microbatches_of_a_profile_are_averaged_for_another_number() -> None:
    profile = replace(Profile.uniform(2, 1.0, 2.0), compute_s=np.arange(1.0, 9.0).reshape(1, 2, 2, 2))
    assert timed_step(profile).num_microbatches == 2
    assert timed_step(profile, num_microbatches=5).profile.num_microbatches is None


def test_the_command_prices_a_file_and_says_nothing_about_recorded_steps(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("\n".join(f"{name} = {value}" for name, value in PARTS.items()))
    done = CliRunner().invoke(
        app, ["simulate", str(path), "schedule=ZBH1", "--network", "1gbps", "--json", str(tmp_path / "f.json")]
    )
    assert done.exit_code == 0, done.output
    assert done.output.startswith("A step takes")
    assert "record" not in done.output
    figures = json.loads((tmp_path / "f.json").read_text())
    expected = Timings(**PARTS, schedule="ZBH1").step().simulate(parse_network("1gbps")).step_s
    assert figures["networks"][0]["step_s"] == expected
    for gradients, said in (("", True), ("gradient_bytes=1e6", False)):
        more = CliRunner().invoke(
            app, ["simulate", str(path), "num_replicas=2", *gradients.split(), "--network", "1gbps"]
        )
        assert ("2 replicas that average nothing, without `gradient_bytes`" in " ".join(more.output.split())) == said
    refused = CliRunner().invoke(app, ["simulate", str(path), "--device", "A100", "--network", "1gbps"])
    assert refused.exit_code == 2
    assert "`--device` belongs to a recipe" in " ".join(refused.output.split())


def test_pipelines_are_as_long_as_memory_allows() -> None:
    """Of S stages and m microbatches without messages a step takes (S + m - 1)(f + b)."""
    step = Timings(num_stages=3000, num_microbatches=2, forward_s=1.0, backward_s=2.0).step()
    assert step.simulate(FREE).step_s == pytest.approx(3 * (3000 + 2 - 1))
    with pytest.raises(
        ValidationError, match=r"`num_stages` = 1000000000 with `num_microbatches` = 3 takes 1\.26 TB to simulate, but "
    ):
        Timings(num_stages=10**9, num_microbatches=3, forward_s=1.0, backward_s=2.0)


def test_ten_thousand_replicas_are_priced_without_a_row_for_each_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "many.toml"
    file.write_text(
        "num_stages = 4\nnum_microbatches = 8\nforward_s = 0.02\nbackward_s = 0.04\nmessage_bytes = 1e6\ngradient_bytes = 5e7\n"
    )
    monkeypatch.setattr("raysim.network.rounds.Round.pairs", None)  # 4 x 10^8 of them
    done = CliRunner().invoke(app, ["simulate", str(file), "num_replicas=10000", "--network", "1gbps"])
    assert done.exit_code == 0, done.output
    few = CliRunner().invoke(app, ["simulate", str(file), "num_replicas=5000", "--network", "1gbps"])
    assert few.stdout.splitlines()[0] == done.stdout.splitlines()[0]  # 2 (D - 1) / D of the bytes, to three digits
