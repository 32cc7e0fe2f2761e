"""Several tensors at a boundary: one is compressed and has a gradient, masks and positions beside it are sent as they are."""

import pytest
import torch
from engines import losses_of, staged_gradients, start
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from raysim import train
from raysim.codecs import TopK
from raysim.codecs.exact import attach, detach
from raysim.codecs.message import CodecTable, Entry, wire_bytes
from raysim.config import ConfigError
from raysim.values import EXACT, join, sent_bytes, split
from raysim.workloads.data import batch_ids, load_data
from raysim.workloads.models import build_model

MARKED = {
    "model": {"name": "own_modules:marked"},
    "data": {"name": "topics", "length": 16, "train_samples": 64, "test_samples": 16},
    "num_stages": None,
    "cuts": ["0", "1", "2"],
}
TABLE = CodecTable([Entry.of(TopK(0.5))])
PACKED = TABLE.pack(TopK(0.5).encode(torch.randn(3, 8)))


@given(st.sampled_from(EXACT), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2**32 - 1))
def test_tensors_beside_a_packet_come_back_as_they_were(kind, shape, seed):
    x = torch.randint(0, 2 if kind == "bool" else 100, shape, generator=torch.Generator().manual_seed(seed))
    x = x.to(getattr(torch, kind))
    message = attach(PACKED, "hidden", {"beside": x, "again": x})
    packed, name, beside = detach(message, max_values=1000)
    assert name == "hidden"
    assert packed[0] == PACKED[0]
    assert all((a == b).all() for a, b in zip(packed[1:], PACKED[1:], strict=True))
    assert list(beside) == ["beside", "again"]
    assert all(y.dtype == x.dtype and torch.equal(y, x) for y in beside.values())
    header = len(message[0]) - len(PACKED[0])
    assert wire_bytes(message) == wire_bytes(PACKED) + 2 * sent_bytes(x) + header
    assert header < 64
    assert attach(PACKED, "", {}) is PACKED


@given(st.integers(0, 60), st.integers(0, 255))
def test_a_message_that_was_changed_is_refused_or_read_but_never_crashes(place, byte):
    header, *arrays = attach(PACKED, "hidden", {"mask": torch.ones(4, 9, dtype=torch.bool)})
    changed = bytearray(header)
    changed[place % len(changed)] = byte
    try:
        _, _, beside = detach((bytes(changed), *arrays), max_values=1000)
    except ValueError:
        return
    assert all(x.numel() <= 1000 for x in beside.values())


def test_split_and_join_are_inverses_and_refuse_what_cannot_cross():
    x, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    assert split(x) == (x, "", {})
    value = {"mask": mask, "hidden": x}
    assert join(*split(value)) == value
    for wrong in ({"a": x, "b": x}, {"mask": mask}, {}, {"a": x, "b": torch.ones(2, dtype=torch.complex64)}):
        with pytest.raises(ValueError, match="just one may hold floating-point numbers"):
            split(wrong)


@pytest.mark.parametrize("changes", [{}, {"schedule": "ZBH1"}, {"recompute": True}], ids=str)
def test_gradients_are_those_of_the_uncut_model(small, changes):
    config = small(**MARKED, **changes)
    data = load_data(config.data.name, config.data.options, 0)
    model = build_model("own_modules:marked", {}, data.shape, seed=0)
    losses = []
    for microbatch in range(4):
        ids = batch_ids(len(data.train), 16, seed=0, step=0)[1][4 * microbatch : 4 * microbatch + 4]
        logits = model(data.train.inputs(ids, 0, 0, True))
        loss = F.cross_entropy(logits.flatten(0, -2), data.train.targets(ids).flatten())
        losses.append(loss.item())
        loss.backward(torch.tensor(0.25))
    assert losses_of(start(config), 0) == losses
    found = staged_gradients(start(config))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(gradient, model.get_parameter(name).grad) for name, gradient in found.items())


def test_bytes_beside_are_counted_and_never_compressed(small, tmp_path):
    run = train(small(**MARKED, forward="TopK(0.1)"), engine="inline", out=tmp_path / "run")
    forward = run.links[run.links["direction"] == "forward"]
    values = 4 * 16 * 8  # of a microbatch's hidden state
    beside = 4 * 16 // 8 + 4 * 16 * 2  # a bit of the mask and two bytes of the position for each token
    dense = forward["dense_bytes"] / forward["packets"]
    assert dense.between(4 * values + beside, 4 * values + beside + 64).all()
    packed = TopK(0.1).encode(torch.randn(4, 16, 8)).array_bytes
    wire = forward["wire_bytes"] / forward["packets"]
    assert wire.between(packed + beside - 16, packed + beside + 96).all()
    assert run.status == "finished"
    assert run.evals["loss"].notna().all()


@pytest.mark.slow
def test_engines_agree(ray, small, tmp_path):
    changes = {**MARKED, "model": "tests.support.own_modules:marked"}
    config = small(**changes, forward="ErrorFeedback(TopK(0.2))", backward="Quantize(4)", steps=4)
    here = train(config, engine="inline", out=tmp_path / "inline")
    there = train(config, out=tmp_path / "ray")
    assert there.steps["loss"].tolist() == here.steps["loss"].tolist()
    assert there.evals["loss"].tolist() == here.evals["loss"].tolist()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model": "own_modules:two_floats", "num_stages": 1},
            "Layer `2`: Of the tensors that cross a boundary, just one",
        ),
        (
            {**MARKED, "forward": "ACGC(0.1)"},
            "`forward` cannot be ACGC(0.1) at boundary 0, where several tensors cross.",
        ),
        (
            {**MARKED, "num_replicas": 2, "num_microbatches": 2, "replica_gradient": "MARINA(QSGD(7))"},
            "`replica_gradient` cannot be MARINA(QSGD(7)) where several tensors cross a boundary.",
        ),
    ],
)
def test_what_cannot_cross_is_refused(small, tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as caught:
        train(small(**changes), engine="inline", out=tmp_path / "run")
    assert sentence in str(caught.value)
