"""Prices of runs whose replicas exchange in some steps only: clock, forecast and replay agree, step by step."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from runs import break_off

from raysim import train
from raysim.analysis import Replay, ReplayError, replay
from raysim.engine.inline import InlineEngine
from raysim.forecast.forecast import forecast
from raysim.network.presets import parse_network
from raysim.network.profile import COSTS
from raysim.network.simulate import simulate
from raysim.pipeline.prepare import prepare
from raysim.records import Run
from raysim.sweeps.objectives import Objective, Pricing
from raysim.sweeps.trial import step_costs
from raysim.training.feedback import Clock
from raysim.training.run import Training

TWO = {"num_replicas": 2, "num_microbatches": 2, "clock": "100mbps+1ms", "profile": "T4", "backward": "Quantize(8)"}


def clocked(config, num_steps):
    """Return the clock of a run and the reports of its first steps."""
    engine = InlineEngine(prepare(config))
    engine.start()
    return Clock(engine.plan), [engine.step(step) for step in range(num_steps)]


@pytest.mark.parametrize(
    "method",
    [
        "DiLoCo(3, codec=ErrorFeedback(TopK(0.05, index='int32')))",
        "StreamingDiLoCo(3)",
        "StreamingDiLoCo(3, fragments=1, delay=2)",
        ["DiLoCo(3)", "Identity", "DiLoCo(2)"],
    ],
)
def test_clock_and_forecast_agree_on_every_step_of_a_period(small, method) -> None:
    config = small(**TWO, replica_gradient=method)
    network, planned = parse_network(config.clock), forecast(config, device="T4")
    clock, reports = clocked(config, 6)
    seconds = [clock.step_s(each, 0.0) for each in reports]
    shares = [share * 6 for share, _ in planned.endings]
    expected = np.repeat(planned.timed().seconds([network])[0], np.round(shares).astype(int))
    assert sum(shares) == pytest.approx(6)
    np.testing.assert_allclose(sorted(seconds), sorted(expected), rtol=1e-9)
    assert planned.step_s(network) == pytest.approx(np.mean(seconds), rel=1e-9)
    assert planned.run_s(network) == pytest.approx(np.sum(seconds), rel=1e-9)


def test_following_steps_hide_an_exchange_as_far_as_they_last(small) -> None:
    for network in ("1mbps", "10gbps"):
        prices = {}
        for delay in (0, 1, 3):
            config = small(
                **{**TWO, "clock": network}, replica_gradient=f"StreamingDiLoCo(6, fragments=1, delay={delay})"
            )
            planned = forecast(config, device="T4")
            prices[delay] = planned.timed().seconds([parse_network(network)])[0]
            codec_s = float(planned.endings[0][1].method_s.max())
        whole, quiet = prices[0]
        for delay in (1, 3):
            exchange, other = prices[delay]
            assert other == quiet
            assert exchange == pytest.approx(max(whole - delay * quiet, quiet + codec_s), rel=1e-9)
        assert whole > prices[1][0] >= prices[3][0]


def test_replay_prices_a_whole_period(small, tmp_path) -> None:
    config = small(
        **TWO, replica_gradient="DiLoCo(3)", profile_every_steps=3
    )  # the last exchange is in no profiled step
    network = parse_network(config.clock)
    run = train(config, engine="inline", out=tmp_path / "run")
    assert 5 not in set(run.actions["step"])
    priced = Replay(run)
    assert list(priced.profiles) == [3, 4, 5]
    assert priced.exchanging.tolist() == [False, False, True]
    clock, reports = clocked(config, 6)
    for step, profile in priced.profiles.items():
        frozen = clock.profile(reports[step])
        shape = (*frozen.compute_s.shape[:3], config.num_microbatches)
        taken: dict[str, Any] = {
            name: np.broadcast_to(getattr(frozen, name), shape) for name in COSTS if not name.endswith("_bytes")
        }
        same = dataclasses.replace(profile, **taken, method_s=frozen.method_s, update_s=frozen.update_s)
        found = simulate(priced.schedule, same, network).step_s
        assert found == pytest.approx(clock.step_s(reports[step], 0.0), rel=1e-9)
    row = replay([run], network).iloc[0]
    assert row["quiet_step_s"] < row["step_s"] < row["exchange_step_s"]
    assert row["step_s"] == pytest.approx((2 * row["quiet_step_s"] + row["exchange_step_s"]) / 3)
    links = run.links[run.links["direction"] == "replica_gradient"]
    assert row["exchange_bytes"] == links.groupby("step")["wire_bytes"].sum()[5]
    assert row["replica_bytes"] == pytest.approx(row["exchange_bytes"] / 3)


def broken_off(config, folder, steps):
    """Return a run that ended after so many steps."""
    break_off(Training(config, engine="inline", out=folder), steps)
    return Run(folder)


@pytest.mark.parametrize("diverged", [False, True])
def test_a_run_that_ended_before_its_first_exchange_has_no_price(small, tmp_path, diverged) -> None:
    """Its steps are those without an exchange, and would make its setting look fast."""
    settings = {**TWO, "replica_gradient": "DiLoCo(6)", "profile_every_steps": 1}
    if diverged:
        run = train(small(**settings, optimizer={"learning_rate": 1e30}), engine="inline", out=tmp_path / "run")
        assert run.status == "diverged"
    else:
        run = broken_off(small(**settings), tmp_path / "run", 5)
    assert len(run.actions)
    with pytest.raises(ReplayError, match=rf"it has {len(run.steps)} of the 6 steps"):
        Replay(run)


def test_the_cost_of_a_step_is_unknown_before_the_first_exchange_and_then_that_of_whole_periods(
    small, tmp_path
) -> None:
    """In a race, by price and by bytes; that of other settings does not change with it."""
    made = {"DiLoCo(3)": (2, 3, 5, 6), "Identity": (2,)}
    runs = [
        broken_off(small(**TWO, replica_gradient=method, profile_every_steps=1), tmp_path / f"{method}{steps}", steps)
        for method, parts in made.items()
        for steps in parts
    ]
    pricing = Pricing(compute="auto", profile=None)
    for name, rel in (("wire_bytes", 0), ("step_s@1mbps", 0.2)):
        early, first, partial, whole, other = step_costs([Objective("loss_on"), Objective(name)], runs, pricing, ())
        assert early == 0
        assert first == pytest.approx(whole, rel=rel)
        assert partial == pytest.approx(whole, rel=rel)
        assert other > whole > 0
        assert step_costs([Objective(name)], runs[:1], pricing, ()) == [0]


def test_break_even_of_periodic_method_uses_mean_period(small, tmp_path) -> None:
    """At the break-even the mean of the period takes as long as the dense step, not that of a step with a mean exchange."""
    runs = [
        train(small(**{**TWO, "replica_gradient": method}), engine="inline", out=tmp_path / str(place))
        for place, method in enumerate(("Identity", "DiLoCo(3)"))
    ]
    row = replay([runs[1]], "100mbps+5ms", against=runs[0]).iloc[0]
    if 0 < row["break_even_bps"] < 1e12:
        at = parse_network("100mbps+5ms")
        even = dataclasses.replace(at, bandwidth_bps=float(row["break_even_bps"]), name="")
        there = replay([runs[1]], even, against=runs[0]).iloc[0]
        assert there["step_s"] == pytest.approx(there["dense_step_s"], rel=0.05)
    else:
        assert row["break_even_bps"] == float("inf")
