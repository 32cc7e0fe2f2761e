"""The replica methods of raysim-contrib: the laws of replica methods hold, and each is the formula of its source."""

from __future__ import annotations

import dataclasses
from importlib import metadata

import numpy as np
import pytest
from contrib_variants import AVERAGES, LOCAL, METHODS
from pipelines import few_of_each, with_slow
from replica_laws import keeps_all_laws, keeps_all_laws_of_local_steps
from replica_variants import (
    Variant,
)

from raysim import train
from raysim.analysis import replay
from raysim.engine.inline import InlineEngine
from raysim.engine.ray import RayEngine
from raysim.forecast.forecast import forecast
from raysim.network.presets import parse_network
from raysim.pipeline.prepare import prepare
from raysim.replication import parse_replica_method

NOTATIONS = [*(variant.notation for variant in AVERAGES), *LOCAL]
FOUR = {"num_replicas": 4, "num_microbatches": 1}


def test_every_method_has_a_variant_and_an_entry_point() -> None:
    assert {type(parse_replica_method(notation)) for notation in NOTATIONS} == set(METHODS)
    points = {point.name: point.value for point in metadata.entry_points(group="raysim.replica_methods")}
    assert {cls.__name__: f"{cls.__module__}:{cls.__name__}" for cls in METHODS} == points


# Averages of gradients.


@pytest.mark.parametrize(
    "variant", few_of_each(AVERAGES, 1, lambda variant: type(variant.method)), ids=lambda variant: variant.notation
)
def test_all_laws(variant: Variant) -> None:
    keeps_all_laws(variant)


@pytest.mark.parametrize("notation", LOCAL)
def test_all_laws_of_local_steps(notation) -> None:
    keeps_all_laws_of_local_steps(notation, whole=False)


# In runs.


@pytest.mark.parametrize(
    "notation",
    [
        "DiLoCoX(3, values=Quantize(4))",
        pytest.param("HALoS(1, updates=3)", marks=pytest.mark.slow),
        pytest.param("AsyncSPARTA(share=0.2, delay=2)", marks=pytest.mark.slow),
        pytest.param("Dion(2, min_values=16)", marks=pytest.mark.slow),
        "EDGC(2, window=2, every=1, min_values=16)",
    ],
)
def test_bytes_planned_are_counted_and_priced(small, tmp_path, notation) -> None:
    optimizer = {"learning_rate": 0.02, "momentum": 0.0 if notation.startswith("Dion") else 0.9}
    config = small(**FOUR, num_stages=2, replica_gradient=notation, steps=6, optimizer=optimizer)
    planned = forecast(config, device="T4")
    run = train(config, engine="inline", out=tmp_path / "run")
    links = run.links[run.links["direction"] == "replica_gradient"]
    last = links[links["step"] >= 3].groupby(["step", "stage"])["wire_bytes"].max()
    costs = {(cost.stage, cost.part): cost.wire_bytes for cost in planned.averages}
    method = config.replica_methods()[0]
    for (step, stage), sent in last.items():
        part = method.part(step)
        assert sent == (0 if part is None else pytest.approx(costs[stage, part], rel=0.01)), (step, stage)
    network = parse_network("20mbps+30ms")
    row = replay([run], network).iloc[0]
    assert 0 < row["step_s"] < 10
    assert row["replica_bytes"] > 0


def test_a_delay_hides_latency_but_no_bytes(small) -> None:
    """An exchange in every step: with a long delay a step lasts as long as the transfers of one exchange."""
    slow, far = parse_network("1mbps"), parse_network("100gbps+50ms")
    seconds = {}
    for delay in (0, 1, 20):
        planned = forecast(small(**FOUR, replica_gradient=f"DeCoSGD(0.1, delay={delay})"), device="T4")
        seconds[delay] = (planned.step_s(slow), planned.step_s(far))
    assert seconds[0][0] >= seconds[1][0] >= seconds[20][0] > 0.3 * seconds[0][0]
    quiet = forecast(small(**FOUR, replica_gradient="DiLoCo(6)"), device="T4")
    assert seconds[20][1] < seconds[0][1]
    assert seconds[20][1] == pytest.approx(quiet.timed().seconds([far]).min(), rel=0.05)


RUNS = {
    "dilocox": {**FOUR, "replica_gradient": "DiLoCoX(2, rank=2, window=1)"},
    "halos": {**FOUR, "replica_gradient": "HALoS(1, updates=2)"},
    "sparta": {**FOUR, "replica_gradient": "AsyncSPARTA(share=0.2, delay=2)"},
    "deco": {**FOUR, "replica_gradient": "DeCoSGD(0.1, delay=2)"},
    "edgc": {**FOUR, "replica_gradient": "EDGC(2, window=2, every=1, min_values=16)"},
    "dion": {**FOUR, "optimizer": {"learning_rate": 0.02}, "replica_gradient": "Dion(2, min_values=16)"},
}


@pytest.mark.parametrize("name", with_slow(RUNS, "sparta", "deco", "edgc"))
def test_a_restored_engine_goes_on_bit_for_bit(small, name) -> None:
    config = small(**RUNS[name], num_stages=1)
    one, other = InlineEngine(prepare(config)), InlineEngine(prepare(config))
    one.start(), other.start()
    for step in range(3):
        one.step(step)
    other.load(3, one.state())
    for step in range(3, 6):
        for mine, theirs in zip(one.step(step), other.step(step), strict=True):
            assert mine.losses == theirs.losses
            sent = [[dataclasses.replace(group, codec_s=0) for group in report.groups] for report in (mine, theirs)]
            assert sent[0] == sent[1]
    assert all(np.array_equal(a, b) for a, b in zip(one.state(), other.state(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dilocox", "halos"])
def test_engines_agree_bit_for_bit(ray, small, name) -> None:
    config = small(**RUNS[name], num_stages=1)
    inline = InlineEngine(prepare(config))
    inline.start()
    on_ray = RayEngine(prepare(config))
    on_ray.start()
    try:
        for step in range(4):
            for mine, theirs in zip(inline.step(step), on_ray.step(step), strict=True):
                assert mine.losses == theirs.losses
                sent = [[dataclasses.replace(a, codec_s=0) for a in report.groups] for report in (mine, theirs)]
                assert sent[0] == sent[1]
        assert all(np.array_equal(a, b) for a, b in zip(inline.state(), on_ray.state(), strict=True))
    finally:
        on_ray.close()
