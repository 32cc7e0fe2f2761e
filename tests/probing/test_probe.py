"""The probe: losses as without it, records that are priced, refusals."""

import pytest
import torch
from torch import nn

from analysis import load, replay
from raysim.codecs import TopK
from raysim.probing import probe

CANDIDATES = ["TopK(0.05)", "Quantize(4)", "ErrorFeedback(TopK(0.1))"]


def train(model, steps=6, microbatches=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        for microbatch in range(microbatches):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + microbatch))
            loss = model(x).square().mean()
            (loss / microbatches).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 8))


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe") / "probe"
    torch.set_num_threads(1)
    plain = train(build())
    model = build()
    with probe(model, ["1", "3"], CANDIDATES, out=folder, steps=4, every=1, num_microbatches=2):
        losses = train(model)
    return plain, losses, folder


def test_the_training_is_not_touched(probed):
    plain, losses, _ = probed
    assert losses == plain


def test_every_candidate_is_priced_on_every_network(probed):
    results = load(probed[2])
    assert results.problems == []
    assert sorted(results.runs["forward"]) == sorted(["Identity", *CANDIDATES])
    priced = replay(results, ["1mbps", "10gbps"], against="dense")
    assert len(priced) == 2 * 4
    slow = priced[priced["network"] == "1mbps"].merge(results.runs[["run", "forward"]], on="run")
    assert (slow.set_index("forward").loc[CANDIDATES, "speedup"] > 1).all()


def test_bytes_are_those_of_the_codec(probed):
    links = load(probed[2]).links
    mine = links[(links["codec"] == "TopK(0.05)") & (links["direction"] == "forward") & (links["boundary"] == 0)]
    arrays = TopK(0.05).encode(torch.randn(4, 64)).array_bytes
    assert (mine["packets"] == 2).all()
    assert (mine["wire_bytes"] >= 2 * arrays).all()
    assert (mine["wire_bytes"] <= 2 * (arrays + 16)).all()
    assert mine["fidelity"].between(0, 1).all()


def test_compute_is_measured_for_each_stage(probed):
    actions = load(probed[2]).table("actions")
    assert sorted(set(zip(actions["stage"], actions["op"], strict=True))) == [(s, op) for s in range(3) for op in "BF"]
    assert (actions["compute_wall_s"] > 0).all()


def test_a_transformers_model_with_its_own_loop(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16)

    def losses(measured):
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []

        def loop():
            for step in range(3):
                ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())

        if measured:
            with probe(model, ["transformer.h.0", "transformer.h.1"], ["Quantize(4)"], out=tmp_path / "probe", every=1):
                loop()
        else:
            loop()
        return found

    assert losses(True) == losses(False)
    assert len(replay(load(tmp_path / "probe"), ["100mbps"], against="dense")) == 2


REFUSALS = {
    "cut": ({"cuts": ["9"]}, "`cuts` must name modules of the model, as in `model.named_modules()`, but got '9'."),
    "none": ({"cuts": []}, "`cuts` must name at least one module of the model, but got none."),
    "candidate": ({"candidates": ["TopKk(0.1)"]}, "TopKk"),
    "steps": ({"steps": 0}, "`steps` must be at least 1, but got 0."),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_refused_in_a_sentence(case, tmp_path):
    changes, sentence = REFUSALS[case]
    with pytest.raises(ValueError) as refused:
        probe(**{"model": build(), "cuts": ["1"], "candidates": ["TopK(0.1)"], "out": tmp_path / "probe", **changes})
    assert sentence in str(refused.value)
