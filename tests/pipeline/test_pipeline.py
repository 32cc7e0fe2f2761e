"""Laws of the pipeline on the inline engine: staged gradients are autograd's, schedules agree, resuming is continuing."""

import copy
import itertools

import numpy as np
import pytest
import torch
from configurations import SMALL
from engines import break_at, losses_of, mend, staged_gradients, start, weights
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipelines import ADAM, DROPOUT, GPT, RUNS, SUBSPACE, TIED, shares, two_workers
from torch.nn import functional as F

from raysim.codecs.message import wire_bytes
from raysim.config import ConfigError, make_config
from raysim.engine.inline import InlineEngine
from raysim.limits import MemoryLimit
from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.messages import Send
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepFeedback
from raysim.pipeline.state import unpack_tensors
from raysim.training.rows import link_rows, step_row
from raysim.workloads.data import load_data
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.splits import Data, batch_ids

MOST_HEADER_BYTES = 24


def trained(config, steps=3):
    engine = start(config)
    return engine, [loss for step in range(steps) for loss in losses_of(engine, step)]


def tensors(engine):
    """Return the state of all workers, whichever of them owns what."""
    return {name: x for part in engine.state() for name, x in unpack_tensors(part).items()}


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def uncut(workload):
    """Return the model before it was cut, tied parameters one again."""
    model = torch.nn.Sequential()
    for module in copy.deepcopy(workload.modules):
        for name, layer in module.named_children():
            model.add_module(name, layer)
    for (_, first), *others in workload.plan.tied:
        for _, name in others:
            owner, _, parameter = name.rpartition(".")
            setattr(model.get_submodule(owner), parameter, model.get_parameter(first))
    return model


def gradients_by_autograd(workload, num_microbatches, step=0):
    """Return the whole model's gradients, by plain torch."""
    model = uncut(workload).train()
    for m in range(num_microbatches):
        epoch, ids = workload.plan.microbatch(step, m)
        x = workload.data.train.inputs(ids, epoch, workload.plan.config.seed, True)
        (CrossEntropy()(model(x), workload.data.train.targets(ids)) / num_microbatches).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


KINDS = {"cnn": {}, "gpt": GPT, "gpt-tied": TIED, "subspace": SUBSPACE}
SCHEDULES = ("GPipe", "1F1B", "1F1B(extra_warmup=2)", "ZBH1", "Interleaved1F1B(3)")
TURNS = itertools.cycle(itertools.product((4, 1), (False, True)))  # each schedule and each model meets every pair


@pytest.mark.parametrize(
    ("schedule", "kind", "num_microbatches", "recompute"),
    [(schedule, kind, *next(TURNS)) for kind in KINDS for schedule in SCHEDULES],
)
def test_staged_gradients_equal_autograd(small, schedule, num_microbatches, kind, recompute):
    config = small(schedule=schedule, num_microbatches=num_microbatches, recompute=recompute, **KINDS[kind])
    engine = start(config)
    expected = gradients_by_autograd(engine.workload, num_microbatches)
    held = staged_gradients(engine)
    shared = {name: owners[0][1] for owners in engine.plan.tied for _, name in owners}
    assert {shared.get(name, name) for name in held} == set(expected)
    for name, gradient in held.items():
        if shared.get(name) is None:  # a tied gradient is the sum of its owners', in another order than autograd's
            assert torch.equal(gradient, expected[name]), name
        else:
            torch.testing.assert_close(gradient, expected[shared[name]], rtol=1e-5, atol=1e-7)


def test_microbatches_average_to_the_whole_batch(small):
    whole, parts = (gradients_by_autograd(prepare(small(num_microbatches=m)), m) for m in (1, 8))
    engine = start(small(num_microbatches=8))
    for name, gradient in staged_gradients(engine).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(gradient, parts[name])


class Masked:
    """The samples of a split, the targets of some ignored."""

    def __init__(self, split, ignored):
        self.split, self.ignored = split, ignored

    def __len__(self):
        return len(self.split)

    def inputs(self, *call):
        return self.split.inputs(*call)

    def targets(self, ids):
        return self.split.targets(ids).masked_fill(torch.from_numpy(np.isin(ids, self.ignored)), -100)


@given(st.lists(st.booleans(), min_size=16, max_size=16), st.sampled_from([None, "tasks:plain_entropy"]), st.booleans())
@example([False] * 16, None, False)
@example([True] * 2 + [False] * 14, None, True)
@settings(max_examples=8)
def test_step_averages_valid_targets_for_any_microbatching(counted, loss, replicas):
    """A microbatch without any target that counts adds nothing, with a loss of one's own too."""
    plain = {**SMALL, "model": {"name": "mlp", "width": 8}, "num_stages": 2, "loss": loss}
    data = load_data("digits", {"train_samples": 64, "test_samples": 20}, 0)
    _, ids = batch_ids(64, 16, 0, 0)
    masked = Masked(data.train, ids[~np.array(counted)])
    data = Data(masked, data.test, data.shape._replace(has_ignored=True))
    for num_microbatches in (1, 2, 8):
        num_replicas = 2 if replicas and num_microbatches > 1 else 1
        cut = {"num_microbatches": num_microbatches // num_replicas, "num_replicas": num_replicas}
        workload = prepare(make_config({**plain, **cut}), data)
        engine = InlineEngine(workload)
        engine.start()
        model = uncut(workload).train()
        x, y = masked.inputs(ids, 0, 0, True), masked.targets(ids)
        expected = F.cross_entropy(model(x), y) if any(counted) else 0.0 * model(x).sum()
        expected.backward()
        assert np.mean(losses_of(engine, 0)) == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in weights(engine, num_replicas - 1).items():
            before = model.get_parameter(name.partition(".")[2])
            torch.testing.assert_close(parameter, before - 0.1 * before.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("run", shares(0, names=[run for run in RUNS if "weights" not in RUNS[run]]))
def test_schedules_give_the_same_bits(small, run, tmp_path):
    """Gradients of weights add up by microbatch, links see microbatches in order, and what is summed over stages is summed in
    their order: so the schedule cannot matter, nor who owns which stage. `Epilogue` goes by the cool-down of the schedule:
    there, schedules with the same cool-down agree."""
    config = small(**{**RUNS[run], "schedule": "GPipe"})
    engine, losses = trained(config)
    state, evaluated = tensors(engine), engine.evaluate("on")
    own = RUNS[run].get("schedule", "1F1B")
    custom = two_workers(config.stages, config.num_microbatches, tmp_path / "rows.csv")
    by_cooldown = "Epilogue" in str(RUNS[run].get("backward"))
    fitting = [custom] if by_cooldown else [own, "1F1B"] if "tied_gradient" in RUNS[run] else [own, "1F1B", custom]
    for schedule in dict.fromkeys(fitting):  # `custom` keeps both ends on one worker, where no tied gradient is sent
        engine, others = trained(config.changed(schedule=schedule))
        assert others == losses
        found = tensors(engine)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], x) for name, x in state.items())
        assert engine.evaluate("on") == evaluated


@pytest.mark.parametrize("schedule", ["ZBH1", "1F1B", "Interleaved1F1B(2)"])
def test_the_update_waits_for_every_weights_backward(small, schedule):
    """No worker updates before all workers have run their rows to the end."""
    engine = start(small(schedule=schedule, num_stages=4))
    ran, updated = [], []
    for worker in engine.workers:
        execute, update = worker.row._execute, worker.update
        worker.row._execute = lambda action, execute=execute: (ran.append(action), execute(action))[1]
        worker.update = lambda *call, update=update: (updated.append(len(ran)), update(*call))[1]
    engine.step(0)
    assert updated == [sum(len(row) for row in engine.plan.rows)] * len(engine.workers)


@pytest.mark.parametrize("run", shares(1))
def test_resumed_equals_not_interrupted(small, run):
    config = small(**RUNS[run])
    whole, losses = trained(config, steps=5)
    first, early = trained(config, steps=2)
    second = start(config)
    second.load(2, first.state())
    second.signals = first.signals
    late = [loss for step in range(2, 5) for loss in losses_of(second, step)]
    assert early + late == losses
    assert same(second.state(), whole.state())


@pytest.mark.parametrize("run", shares(2))
def test_used_workers_load_as_fresh_ones(small, run):
    """What a step left that broke off, or that the checkpoint knows nothing of, is gone."""
    engine = start(small(**RUNS[run]))
    begin = engine.state()
    losses = [losses_of(engine, step) for step in range(2)]
    worker = engine.workers[-1]
    break_at(worker, 2 * len(engine.plan.rows[-1]) // 3)
    with pytest.raises(StageError, match="broken on purpose"):
        engine.step(2)
    mend(worker)
    engine.load(0, begin)
    assert [losses_of(engine, step) for step in range(2)] == losses


@pytest.mark.parametrize("run", shares(3))
def test_evaluation_changes_no_state(small, run):
    config = small(**RUNS[run])
    undisturbed, losses = trained(config)
    engine = start(config)
    random_state = torch.get_rng_state()
    disturbed = []
    for step in range(3):
        for mode in ("on", "off", "on_direct"):
            engine.batchnorm("estimate")
            engine.evaluate(mode, "train", 1)
            engine.batchnorm("use")
            engine.evaluate(mode)
            engine.batchnorm("restore")
        disturbed += losses_of(engine, step)
    assert disturbed == losses
    assert same(engine.state(), undisturbed.state())
    assert torch.equal(torch.get_rng_state(), random_state)


IN_PLACE = {"model": {"name": "tests.support.models:in_place"}, "num_stages": None, "cuts": ["2"]}


@pytest.mark.parametrize(
    "kind", [{}, DROPOUT, RUNS["batchnorm"], IN_PLACE], ids=["cnn", "dropout", "batchnorm", "in place"]
)
def test_recomputation_changes_nothing(small, kind):
    plain, losses = trained(small(**kind))
    again, recomputed = trained(small(**kind, recompute=True))
    assert recomputed == losses
    assert same(plain.state(), again.state())


@pytest.mark.parametrize("method", ["ErrorFeedback({})", "EF21({})", "AQSGD({})", "{}"])
@pytest.mark.parametrize("codec", ["TopK(1)", "Nonzero"])
def test_lossless_settings_equal_no_compression(small, method, codec):
    text = method.format(codec)
    _, plain = trained(small())
    _, compressed = trained(small(forward=text, backward=text.replace("AQSGD", "EF21")))
    if "21" in text or "AQ" in text:  # to rounding of m + (a - m)
        assert compressed == pytest.approx(plain, rel=1e-5)
    else:
        assert compressed == plain


def test_tied_parameters_stay_equal_at_all_owners(small):
    engine, _ = trained(small(**TIED, **ADAM))
    (owners,) = engine.plan.tied
    assert len(owners) == 2
    stages = {index: stage for worker in engine.workers for index, stage in worker.stages.items()}
    copies = [dict(stages[stage].module.named_parameters())[name] for stage, name in owners]
    assert torch.equal(*copies)


def test_tied_bytes_are_counted(small):
    engine = start(small(**TIED))
    groups = [group for report in engine.step(0) for group in report.groups]
    sent = sum(group.wire_bytes for group in groups) - 2 * 256 * 16 * 4  # vocabulary x width, each way
    assert 0 < sent <= MOST_HEADER_BYTES * sum(group.packets for group in groups)


def test_clipping_is_by_the_norm_over_all_stages(small):
    config = small(optimizer={"learning_rate": 1.0, "clip_norm": 0.01})
    engine = start(config)
    expected = gradients_by_autograd(engine.workload, 4)
    norm = torch.cat([g.flatten() for g in expected.values()]).double().norm()
    before = {n: p.detach().clone() for module in engine.workload.modules for n, p in module.named_parameters()}
    reports = engine.step(0)
    assert [report.gradient_norm for report in reports] == pytest.approx([norm.item()] * 3)
    after = {n: p.detach() for w in engine.workers for s in w.stages.values() for n, p in s.module.named_parameters()}
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).double().norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-4)


def test_nan_gradient_norm_skips_the_step(small):
    engine = start(small(optimizer={"learning_rate": 1.0, "clip_norm": 1.0}))
    before = engine.state()
    engine.workers[1].updates.squared_norm = lambda stage: float("nan")
    with pytest.raises(DivergedError, match="step 0, update: NaN or infinity in the gradient norm"):
        engine.step(0)
    assert same(engine.state(), before)


def headers_of(account, array_bytes):
    """Return whether a link sent so many bytes of arrays, and headers of one size with its packets."""
    headers = account.wire_bytes - array_bytes
    return headers % account.packets == 0 and 0 < headers // account.packets <= MOST_HEADER_BYTES


def test_shared_indices_send_values_only(small):
    engine = start(small(forward="TopK(0.25)", backward="Identity", shared_indices=True))
    links = {(a.boundary, a.direction): a for report in engine.step(0) for a in report.links if a.sender}
    for boundary, shape in enumerate(one.shape for one in engine.plan.boundaries):
        kept = 4 * shape[0] * -(-np.prod(shape[1:]) // 4)
        assert headers_of(links[boundary, "backward"], 4 * kept)


def test_one_packet_per_microbatch_and_direction(small):
    engine = start(small())
    for report in engine.step(0):
        for account in report.links:
            assert account.packets == 4
            assert account.dense_bytes == 16 * 4 * np.prod(engine.plan.boundaries[account.boundary].shape[1:])
            assert headers_of(account, account.dense_bytes)


def test_bfloat16_links_carry_two_bytes_a_value(small):
    engine = start(small(**GPT, dtype="bfloat16"))
    for report in engine.step(0):
        for account in report.links:
            assert account.dense_bytes == 2 * 4 * np.prod(engine.plan.boundaries[account.boundary].shape)


def test_divergence_names_step_boundary_and_direction(small):
    engine = start(small(model={"name": "tests.support.models:exploding"}, num_stages=None, cuts=["2"]))
    with pytest.raises(DivergedError) as caught:
        engine.step(0)
    assert str(caught.value) == "step 0, 0F0: NaN or infinity in the activation at boundary 0, forward"


def test_a_model_that_fails_is_named(small):
    engine = start(small(model={"name": "tests.support.models:broken"}, num_stages=2))
    with pytest.raises(StageError) as caught:
        engine.step(0)
    assert str(caught.value) == "stage 1, 1F2, step 0: RuntimeError: no luck"


def test_weight_gradient_error_is_located(small, monkeypatch):
    engine = start(small(schedule="ZBH1"))

    def broken(microbatch):
        raise RuntimeError("no luck")

    monkeypatch.setattr(engine.workers[2].stages[2], "backward_weights", broken)
    before = engine.state()
    with pytest.raises(StageError) as caught:
        engine.step(0)
    assert str(caught.value) == "stage 2, 2W0, step 0: RuntimeError: no luck"
    assert same(engine.state(), before)


def test_calls_out_of_order_are_refused(small):
    engine = start(small())
    with pytest.raises(StageError, match="is at step 0, but was called for step 1"):
        engine.step(1)
    with pytest.raises(StageError, match="was told to update in step 0 before the step was run"):
        next(engine.workers[0].update(0, StepFeedback(), []))


def test_threads_are_set_for_stages_and_put_back(small):
    before = torch.get_num_threads()
    seen = []
    engine = start(small(threads_per_stage=before + 1))
    stage = engine.workers[0].stages[0]
    forward = stage.forward
    stage.forward = lambda *arguments: (seen.append(torch.get_num_threads()), forward(*arguments))[1]
    engine.step(0)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_memory_beyond_the_host_is_refused_with_the_arithmetic(small, monkeypatch):
    engine = InlineEngine(prepare(small(forward="AQSGD(Quantize(4))", data={"name": "digits"})))
    monkeypatch.setattr("raysim.engine.inline.process_memory", lambda: MemoryLimit(10**6, "this container may use"))
    with pytest.raises(ConfigError) as caught:
        engine.check()
    # 1,437 samples of 4 x 8 x 8 values in float32 at boundary 0, kept at both its ends
    assert "1.47 MB reference copies" in str(caught.value)
    assert "AQSGD's `capacity`" in str(caught.value)
    assert str(caught.value).endswith(" This container may use 0.0 GB.")


@pytest.mark.parametrize("run", shares(6, 10))
def test_the_bytes_that_workers_hand_over_are_those_of_the_records(small, run):
    """A message holds a header and flat arrays, no object of ours; stages of one worker hand over nothing."""
    engine = start(small(**RUNS[run]))
    owners = engine.plan.owners
    handed = {"packets": 0, "exchanges": 0}

    def watch(worker, turns):
        answer = None
        while True:
            try:
                asked = turns.send(answer)
            except StopIteration as stop:
                return stop.value
            for target, key, message in asked.messages if isinstance(asked, Send) else ():
                for header, *arrays in (one for one in (message, *asked.everyone) if one and target != worker):
                    assert type(header) is bytes
                    assert all(type(x) is np.ndarray and x.dtype == np.uint8 and x.ndim == 1 for x in arrays)
                    if (
                        key[0] == "norms"
                    ):  # of post-validation, as few as the norms that the engine hands over otherwise
                        continue
                    handed["packets" if len(key) == 3 else "exchanges"] += wire_bytes((header, *arrays))
            answer = yield asked

    for index, worker in enumerate(engine.workers):
        for name in ("run", "update"):
            method = getattr(worker, name)
            setattr(worker, name, lambda *call, index=index, method=method: watch(index, method(*call)))
    reports = engine.step(0)
    sent = [link for report in reports for link in report.links if link.sender]
    kept = sum(link.wire_bytes for link in sent if owners[link.boundary] == owners[link.boundary + 1])
    assert handed["packets"] == sum(link.wire_bytes for link in sent) - kept
    assert handed["exchanges"] == sum(group.wire_bytes for report in reports for group in report.groups)
    rows = link_rows(engine.plan, 0, reports)
    assert step_row(engine.plan, 0, reports, rows, 1.0)["wire_bytes"] == sum(handed.values()) + kept
