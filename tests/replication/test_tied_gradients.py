"""Laws of coded sums of tied gradients: the owners of a parameter sum them as replicas average theirs, and stay equal."""

import math

import pytest
import torch
from engines import staged_gradients, start
from pipelines import ADAM, REPLICAS, RUNS, TIED

from raysim.config import ConfigError
from raysim.forecast.forecast import forecast
from raysim.network.collectives import as_transfers
from raysim.pipeline.prepare import prepare
from raysim.training.rows import decision_rows

CODED = [name for name in RUNS if "tied_gradient" in RUNS[name]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("replicas", [{}, REPLICAS])
@pytest.mark.parametrize("method", ["Gathered(Nonzero)", "TwoShot(Nonzero)"])
def test_lossless_codec_gives_sum_of_gradients(small, method, replicas, fused):
    """Nonzero sends every value: only the order of additions differs from the uncompressed sum."""
    if fused and not replicas:
        pytest.skip("one replica has nothing to fuse")
    config = {**TIED, **replicas, "fused_embedding": fused}
    plain, coded = (staged_gradients(start(small(**config, tied_gradient=each))) for each in ("Identity", method))
    for name, gradient in coded.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("run", CODED)
def test_owners_never_part(small, run):
    engine = start(small(**RUNS[run]))
    for step in range(3):
        engine.step(step)
    for owners in engine.plan.tied:
        held = []
        for replica in range(engine.plan.num_replicas):
            for stage, name in owners:
                worker = engine.workers[engine.plan.worker(replica, stage)]
                held.append(worker.stages[stage].module.get_parameter(name).detach())
        assert all(torch.equal(held[0], x) for x in held[1:])


@pytest.mark.parametrize("other", ["Identity", "DGC(0.1, warmup=2)"])
def test_owners_share_momentum(small, other):
    """The optimiser adds no momentum where a method has: copies would be updated by different rules."""
    settings = {**REPLICAS, **TIED, "num_stages": 2, "replica_gradient": ["DGC(0.1)", other]}
    with pytest.raises(ConfigError, match=r"^`replica_gradient` must be the same at stages 0 and 1"):
        prepare(small(**settings))
    prepare(small(**settings, fused_embedding=True))


def test_decisions_on_sums_are_told_from_those_on_averages(small):
    fields = {"tied": "EDGC(4, min_values=16)", "replica_gradient": "EDGC(2, min_values=16)"}
    tied, averaged = fields.values()
    engine = start(small(**REPLICAS, **TIED, num_stages=2, tied_gradient=tied, replica_gradient=averaged))
    rows = list(decision_rows(engine.plan, 0, engine.step(0)))
    assert {row["stage"] for row in rows} == {0, 1}
    assert {(row["where"], row["method"]) for row in rows} == {*fields.items()}


def test_feedback_sends_what_was_left_out(small):
    """At a small learning rate gradients hardly change, so with feedback the weights follow those of uncompressed sums."""
    config = {**TIED, "batch_size": 64, "optimizer": {"name": "sgd", "learning_rate": 1e-3, "momentum": 0.0}}
    held = {}
    for method in ("Identity", "TopK(0.3)", "ErrorFeedback(TopK(0.3))"):
        engine = start(small(**config, tied_gradient=method))
        (stage, name), *_ = engine.plan.tied[0]
        table = engine.workers[engine.plan.worker(0, stage)].stages[stage].module.get_parameter(name)
        first = table.detach().clone()
        for step in range(8):
            engine.step(step)
        held[method] = table.detach() - first
    errors = {
        method: float((moved - held["Identity"]).norm() / held["Identity"].norm()) for method, moved in held.items()
    }
    assert 0 < errors["ErrorFeedback(TopK(0.3))"] < 0.5 * errors["TopK(0.3)"]


@pytest.mark.parametrize("changes", [{}, REPLICAS, {**REPLICAS, "fused_embedding": True}])
def test_forecast_has_bytes_of_run(small, changes):
    config = small(**{**TIED, **changes, "tied_gradient": "Quantize(8, per='row')"})
    reports = start(config).step(0)
    sent = as_transfers(
        sorted(t for report in reports for group in report.groups if group.tied for t in group.transfers)
    )
    planned = forecast(config, device="T4").endings[0][1].transfers
    planned = planned[planned["direction"] == "tied"]
    order = ["round", "source_replica", "source_stage", "target_replica", "target_stage"]
    for one, other in zip(
        sorted(planned[[*order, "wire_bytes"]].tolist()), sorted(sent[[*order, "wire_bytes"]].tolist()), strict=True
    ):
        assert one == pytest.approx(other)


def test_codec_seconds_are_part_of_update(small):
    config = small(**TIED)
    coded = config.changed(tied_gradient="Quantize(8, per='row')")
    plain_s, coded_s = (forecast(each, device="T4").steady.update_s for each in (config, coded))
    tied = [stage for stage, _ in prepare(config).plan.tied[0]]
    assert [stage for stage, more in enumerate(coded_s > plain_s) if more] == tied


def test_memory_is_counted_and_kept_in_checkpoints(small):
    config = {**TIED, **ADAM, "tied_gradient": "ErrorFeedback(TopK(0.01))"}
    engine = start(small(**config))
    engine.step(0)
    without = prepare(small(**{**config, "tied_gradient": "Identity"})).plan
    for stage, name in engine.plan.tied[0]:
        table = engine.workload.modules[stage].get_parameter(name)
        more = engine.plan.memories[stage].residuals_bytes - without.memories[stage].residuals_bytes
        assert more == 4 * table.numel()
        state = engine.workers[engine.plan.worker(0, stage)].averaging.state()
        (residual,) = [x for key, x in state.items() if key.startswith(f"tied.{stage}.0.residual/")]
        assert residual.numel() == math.prod(table.shape)
        assert residual.any()
