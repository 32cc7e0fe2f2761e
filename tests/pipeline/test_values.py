"""Several tensors at a boundary: numbers are compressed by name and have gradients, masks and positions are sent as they are."""

import pytest
import torch
from engines import losses_of, staged_gradients, start
from hypothesis import given
from hypothesis import strategies as st
from pipelines import MARKED, SKIPS
from torch.nn import functional as F

from raysim import train
from raysim.codecs import TopK
from raysim.codecs.message import CodecTable, Entry, bundle, unbundle, wire_bytes
from raysim.forecast.forecast import forecast
from raysim.values import EXACT, UNNAMED, argument_of, exact, floats, sent_bytes, value_of
from raysim.workloads.data import batch_ids, load_data
from raysim.workloads.models import build_model

TABLE = CodecTable([Entry.of(TopK(0.5))])
PACKED = TABLE.pack(TopK(0.5).encode(torch.randn(3, 8)))
TABLES = {
    "forward": {"hidden": "ErrorFeedback(TopK(0.4))", "skip": "AQSGD(Quantize(4))", "mask": "Identity"},
    "backward": {"hidden": "ErrorFeedback(Quantize(4))", "late": "Quantize(2, rounding='stochastic')"},
}


@given(st.sampled_from(EXACT), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_bundled_packets_and_tensors_come_back_as_they_were(kind, shape, seed, packets):
    x = torch.randint(0, 2 if kind == "bool" else 100, shape, generator=torch.Generator().manual_seed(seed))
    x = x.to(getattr(torch, kind))
    names = ["hidden", "skip", "late"][:packets]
    message = bundle(dict.fromkeys(names, PACKED), {"beside": x, "again": x})
    messages, exact = unbundle(message, max_values=1000)
    assert list(messages) == names
    for packed in messages.values():
        assert packed[0] == PACKED[0]
        assert all((a == b).all() for a, b in zip(packed[1:], PACKED[1:], strict=True))
    assert list(exact) == ["beside", "again"]
    assert all(y.dtype == x.dtype and torch.equal(y, x) for y in exact.values())
    header = len(message[0]) - packets * len(PACKED[0])
    assert wire_bytes(message) == packets * wire_bytes(PACKED) + 2 * sent_bytes(x) + header
    assert header < 64
    assert bundle({UNNAMED: PACKED}, {}) is PACKED


@given(st.integers(0, 60), st.integers(0, 255))
def test_changed_message_is_refused_or_read_without_crash(place, byte):
    header, *arrays = bundle({"a": PACKED, "b": PACKED}, {"mask": torch.ones(4, 9, dtype=torch.bool)})
    changed = bytearray(header)
    changed[place % len(changed)] = byte
    try:
        _, exact = unbundle((bytes(changed), *arrays), max_values=1000)
    except ValueError:
        return
    assert all(x.numel() <= 1000 for x in exact.values())


def test_outputs_of_modules_become_values_and_unsupported_ones_are_refused():
    x, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    for alone in (x, mask):  # the data of the first stage may be of any type
        assert (floats(value_of(alone)), exact(value_of(alone))) == ({UNNAMED: alone}, {})
        assert argument_of(value_of(alone)) is alone
    value = {"mask": mask, "hidden": x, "skip": x}
    assert (floats(value), exact(value)) == ({"hidden": x, "skip": x}, {"mask": mask})
    assert argument_of(value_of(value)) == value
    for wrong in ({"mask": mask}, {}, {"a": x, "b": torch.ones(2, dtype=torch.complex64)}):
        with pytest.raises(ValueError, match="At least one tensor that crosses a boundary must hold"):
            value_of(wrong)
    with pytest.raises(ValueError, match="must have names"):
        value_of({"": x, "a": x})


def by_autograd(model, data):
    """Return the losses and the gradients of an uncut model over the four microbatches of the first step."""
    losses = []
    for microbatch in range(4):
        ids = batch_ids(len(data.train), 16, seed=0, step=0)[1][4 * microbatch : 4 * microbatch + 4]
        logits = model(data.train.inputs(ids, 0, 0, True))
        loss = F.cross_entropy(logits.flatten(0, -2), data.train.targets(ids).flatten())
        losses.append(loss.item())
        loss.backward(torch.tensor(0.25))
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", [MARKED, SKIPS], ids=["marked", "skipping"])
@pytest.mark.parametrize("changes", [{}, {"schedule": "ZBH1"}, {"recompute": True}], ids=str)
def test_gradients_are_those_of_the_uncut_model(small, settings, changes):
    config = small(**settings, **changes)
    data = load_data(config.data.name, config.data.options, 0)
    losses, gradients = by_autograd(build_model(config.model.name, {}, data.shape, seed=0), data)
    assert losses_of(start(config), 0) == losses
    found = staged_gradients(start(config))
    assert found.keys() == gradients.keys()
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in found.items())


def test_side_tensors_are_counted_uncompressed(small, tmp_path):
    run = train(small(**MARKED, forward="TopK(0.1)"), engine="inline", out=tmp_path / "run")
    forward = run.links[run.links["direction"] == "forward"].fillna({"tensor": ""})
    values = 4 * 16 * 8  # of a microbatch's hidden state
    beside = 4 * 16 // 8 + 4 * 16 * 2  # a bit of the mask and two bytes of the position for each token
    each = dict(list(forward.groupby("tensor")))
    assert each.keys() == {"hidden", "mask", "positions"}
    assert all((rows["packets"] == 4).all() for rows in each.values())
    for name, size in (("mask", 4 * 16 // 8), ("positions", 4 * 16 * 2)):
        assert (each[name]["wire_bytes"] == 4 * size).all()
        assert (each[name]["dense_bytes"] == 4 * size).all()
        assert (each[name]["codec"] == "Identity").all()
    hidden = each["hidden"]
    assert (hidden["dense_bytes"] / 4).between(4 * values, 4 * values + 64).all()
    packed = TopK(0.1).encode(torch.randn(4, 16, 8)).array_bytes
    assert (hidden["wire_bytes"] / 4).between(packed - 16, packed + 96).all()
    sent = run.actions[(run.actions["op"] == "F") & (run.actions["stage"] < 3)]["dense_bytes"]
    assert sent.between(4 * values + beside, 4 * values + beside + 64).all()
    assert run.status == "finished"
    assert run.evals["loss"].notna().all()


def test_each_tensor_has_a_compressor_and_a_memory_of_its_own(small, tmp_path):
    run = train(small(**SKIPS, **TABLES, steps=3), engine="inline", out=tmp_path / "run")
    links = run.links
    assert links["tensor"].notna().all()
    codecs = {
        (d, b, t): c for d, b, t, c in links[["direction", "boundary", "tensor", "codec"]].itertuples(index=False)
    }
    assert codecs["forward", 0, "hidden"] == "ErrorFeedback(TopK(0.4))"
    assert codecs["forward", 1, "skip"] == "AQSGD(Quantize(4))"
    assert codecs["forward", 0, "mask"] == codecs["forward", 0, "place"] == codecs["backward", 0, "place"] == "Identity"
    assert codecs["forward", 2, "late"] == "Identity"
    assert codecs["backward", 2, "late"] == "Quantize(2, rounding='stochastic')"
    assert ("backward", 0, "mask") not in codecs
    assert ("forward", 2, "mask") not in codecs
    remember = links[(links["step"] == 0) & links["residual_norm"].notna()]
    assert set(zip(remember["direction"], remember["tensor"], strict=True)) == {
        ("forward", "hidden"),
        ("forward", "skip"),
        ("backward", "hidden"),
    }
    totals = links.groupby("step")["wire_bytes"].sum()
    assert run.steps.set_index("step")["wire_bytes"].equals(totals)
    assert run.row["forward"] == '{hidden = "ErrorFeedback(TopK(0.4))", mask = "Identity", skip = "AQSGD(Quantize(4))"}'


def test_a_forecast_prices_each_tensor_as_a_run_counts_it(small, tmp_path):
    """But for the names in the header of a message, which count with its first tensor."""
    config = small(**SKIPS, forward={"hidden": "TopK(0.4)", "skip": "Quantize(4)"}, backward="Quantize(8)", steps=1)
    links = train(config, engine="inline", out=tmp_path / "run").links
    recorded = links.set_index(["boundary", "direction", "tensor"])["wire_bytes"] / 4  # of a microbatch
    found = {
        (link.boundary, link.direction, link.tensor): link.wire_bytes for link in forecast(config, device="A100").links
    }
    assert found.keys() == set(recorded.index)
    for link, size in found.items():
        header = recorded[link] - size
        assert (0 < header < 80) if link[2] == "hidden" else header == 0, link


def test_compressor_without_table_applies_to_all_tensors(small):
    plan = start(small(**SKIPS, forward="TopK(0.4)")).plan
    assert [list(pairs) for pairs in plan.compressors[0]] == [["hidden", "skip", "place"]] * 2 + [
        ["hidden", "skip", "late"]
    ]
    assert {repr(forward) for pairs in plan.compressors[0] for forward, _ in pairs.values()} == {"TopK(0.4)"}


@pytest.mark.parametrize("shared", [False, True])
def test_resumed_run_has_losses_of_uninterrupted_run(small, shared):
    tables = {"forward": {"skip": "TopK(0.3)"}, "shared_indices": True} if shared else TABLES
    config = small(**SKIPS, **tables, steps=4)
    whole = start(config)
    expected = [losses_of(whole, step) for step in range(4)]
    first = start(config)
    assert [losses_of(first, step) for step in range(2)] == expected[:2]
    again = start(config)
    again.load(2, first.state())
    again.signals = first.signals
    assert [losses_of(again, step) for step in range(2, 4)] == expected[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        MARKED | {"model": "tests.support.own_modules:marked", "forward": "ErrorFeedback(TopK(0.2))"},
        SKIPS | {"model": "tests.support.own_modules:skipping"} | TABLES,
    ],
    ids=["marked", "skipping"],
)
def test_engines_agree(ray, small, tmp_path, settings):
    config = small(**settings, steps=4)
    here = train(config, engine="inline", out=tmp_path / "inline")
    there = train(config, out=tmp_path / "ray")
    assert there.steps["loss"].tolist() == here.steps["loss"].tolist()
    assert there.evals["loss"].tolist() == here.evals["loss"].tolist()
