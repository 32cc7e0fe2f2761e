"""Replicas whose links differ: each sends by its own compressor, and only the slow one need compress."""

import numpy as np
import pytest
import torch
from engines import losses_of, start
from pipelines import GPT, REPLICAS

from raysim import train
from raysim.analysis import replay
from raysim.cli.train import show_run
from raysim.forecast.forecast import forecast
from raysim.network.topology import Network
from raysim.pipeline.state import unpack_tensors
from raysim.records import with_replicas

SLOW = Network(  # two stages, two replicas: the second replica has a slow link between its stages
    bandwidth_bps=tuple(tuple(1e6 if {source, target} == {2, 3} else 1e9 for target in range(4)) for source in range(4))
)
TWO = {**REPLICAS, "num_stages": 2}


def trained(config, steps=3):
    engine = start(config)
    losses = [loss for step in range(steps) for loss in losses_of(engine, step)]
    return engine, losses, {name: x for part in engine.state() for name, x in unpack_tensors(part).items()}


@pytest.mark.parametrize("method", ["AQSGD(Quantize(4))", "ErrorFeedback(TopK(0.1))"])
def test_one_setting_for_all_replicas_is_that_setting(small, method):
    whole, losses, state = trained(small(**REPLICAS, forward=method, backward="Quantize(4)"))
    tables_ = {"0": method, "1": [method, method]}, {"others": "Quantize(4)"}
    found, others, same = trained(small(**REPLICAS, forward=tables_[0], backward=tables_[1]))
    assert others == losses
    assert same.keys() == state.keys()
    assert all(torch.equal(same[name], x) for name, x in state.items())
    assert found.evaluate("on") == whole.evaluate("on")
    assert found.plan.memories == whole.plan.memories


def test_each_replica_sends_the_bytes_of_its_own_codec(small, tmp_path, capsys):
    changes = {
        "dense": {},
        "coded": {"forward": "Quantize(4)", "backward": "Quantize(8)"},
        "mixed": {"forward": {"1": "Quantize(4)"}, "backward": {"1": "Quantize(8)"}},
    }
    runs = {
        name: train(small(**TWO, **change, steps=2), engine="inline", out=tmp_path / name)  # type: ignore[arg-type]
        for name, change in changes.items()
    }
    keys = ["replica", "direction"]
    sent = {name: run.links[run.links["boundary"].notna()] for name, run in runs.items()}
    bytes_ = {name: links.groupby(keys)["wire_bytes"].sum() for name, links in sent.items()}
    codecs = sent["mixed"].groupby(keys)["codec"].unique().map(list).to_dict()
    for direction, codec in (("forward", "Quantize(4)"), ("backward", "Quantize(8)")):
        assert bytes_["mixed"][0, direction] == bytes_["dense"][0, direction]
        assert bytes_["mixed"][1, direction] == bytes_["coded"][1, direction] < bytes_["dense"][1, direction] / 3
        assert codecs[0, direction] == ["Identity"]
        assert codecs[1, direction] == [codec]
    assert runs["mixed"].row["forward"] == '{1 = "Quantize(4)"}'
    assert set(with_replicas(sent["mixed"])["replicas"]) == {"replica 0", "replica 1"}
    assert set(with_replicas(sent["coded"])["replicas"]) == {""}
    show_run(runs["mixed"])
    shown = capsys.readouterr().out
    assert "0 -> 1, replica 0" in shown
    assert "0 <- 1, replica 1" in shown
    prices = {name: float(replay(run, SLOW).step_s.mean()) for name, run in runs.items()}
    assert prices["mixed"] < 0.75 * prices["dense"]  # recorded packets, on hosts of which one replica's are slow


def test_evaluations_go_through_the_links_that_compress(small):
    coded, mixed, last = (
        start(small(**REPLICAS, forward=forward)) for forward in ("TopK(0.1)", {"1": "TopK(0.1)"}, {"0": "TopK(0.1)"})
    )
    assert [engine.plan.evaluated for engine in (coded, mixed, last)] == [0, 1, 0]
    assert mixed.evaluate("on") == coded.evaluate("on") == last.evaluate("on")
    assert mixed.evaluate("on") != mixed.evaluate("off") == coded.evaluate("off")


def test_the_slow_replica_sets_the_step_and_only_its_compression_makes_it_faster(small):
    def priced(forward):
        found = forecast(small(**TWO, **GPT, forward=forward, backward=forward), device="T4")
        return found.step_s(SLOW), {(link.replica, link.wire_bytes) for link in found.links}

    codec = "Quantize(4)"
    (dense, _), (slow, links), (fast, _), (both, _) = map(priced, ("Identity", {"1": codec}, {"0": codec}, codec))
    assert fast == pytest.approx(dense, rel=1e-9)
    assert slow < dense / 3
    assert slow == pytest.approx(both, rel=1e-9)
    assert {replica for replica, _ in links} == {0, 1}


def test_memory_is_maximum_over_replicas(small):
    memory = {
        name: np.array([each.references_bytes for each in start(small(**REPLICAS, forward=forward)).plan.memories])
        for name, forward in {
            "none": "Identity",
            "all": "AQSGD(Quantize(4))",
            "one": {"1": "AQSGD(Quantize(4))"},
        }.items()
    }
    assert (memory["one"] == memory["all"]).all()
    assert memory["all"].sum() > memory["none"].sum() == 0
