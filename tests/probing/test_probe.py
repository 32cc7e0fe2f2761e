"""The probe: losses as without it, records that are priced, refusals."""

import json
import shlex
from typing import Any

import pytest
import torch
from probe_jobs import CANDIDATES as CANDIDATES_OF_RANKS
from ranks import run_ranks
from torch import nn
from typer.testing import CliRunner

from raysim.analysis import load, replay
from raysim.analysis.report import compose
from raysim.analysis.report.page import Table, Text
from raysim.analysis.report.tables import LIMIT, smaller_runs
from raysim.cli import app
from raysim.codecs import TopK
from raysim.config import read_config
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


CUTS = ["transformer.h.0", "transformer.h.1"]


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16)


def test_a_transformers_model_with_its_own_loop(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = gpt2()

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
            with probe(model, CUTS, ["Quantize(4)"], out=tmp_path / "probe", every=1):
                loop()
        else:
            loop()
        return found

    assert losses(True) == losses(False)
    assert len(replay(load(tmp_path / "probe"), ["100mbps"], against="dense")) == 2


@pytest.mark.slow
def test_the_trainer_is_probed_by_a_callback(tmp_path):
    """Of seven batches in two accumulations, the last step of an epoch has one: it is not sampled."""
    transformers = pytest.importorskip("transformers")
    from raysim.probing.trainer import ProbeCallback

    data = [{"input_ids": row, "labels": row} for row in torch.arange(14 * 16).view(14, 16) % 64]

    def losses(callbacks):
        torch.manual_seed(1)
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = transformers.GPT2LMHeadModel(gpt2())
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    callback = ProbeCallback(CUTS, ["Quantize(4)"], out=tmp_path / "probe", every=1)
    assert losses([callback]) == losses([])
    results = load(tmp_path / "probe")
    assert results.problems == []
    assert results.runs["steps_done"].tolist() == [6, 6]
    assert results.runs["num_microbatches"].tolist() == [2, 2]
    assert len(replay(results, ["100mbps"], against="dense")) == 2


REFUSALS: dict[str, Any] = {
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


@pytest.mark.parametrize("cuts", [["3", "2"], ["1"]])
def test_cuts_in_another_order_than_the_forward_are_refused(cuts, tmp_path):
    model = build()
    model.insert(1, twice := nn.Tanh())
    model.append(twice)
    with (
        pytest.raises(
            ValueError, match=r"^`cuts` must be modules in the order in which a forward calls them, each once"
        ),
        pytest.warns(UserWarning, match="sampled no whole step"),
        probe(model, cuts, ["TopK(0.1)"], out=tmp_path / "probe", every=1),
    ):
        train(model)


SENTENCES = [
    "All ranks must probe alike, but `gradients` differs between ranks 1 and 0: ['PowerSGD(2)'] and ['PowerSGD(1)'].",
    "`gradients` cannot be MARINA(QSGD(7)) in a probe, which sees only gradients. Use `raysim.train`.",
    "`gradients` must name at least one replica method, but got none.",
    "`cuts` must name modules of the model, as in `model.named_modules()`, but got 'nine'.",
    "`cuts` must name at least one module of the model where `candidates` are given, but got none.",
    "`schedule` must have backwards in one part, as this training has, but got ZBH1. Use 1F1B or GPipe.",
    "TopKk",
    "`cuts` and `gradients` must be left out for stages of a pipeline, which are cut already.",
    "All ranks must probe alike, but `every` differs between ranks 1 and 0: 2 and 1.",
    "Every stage must train a parameter, since a probe counts steps by its updates, but stage 0 has none.",
]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    if request.param == 2:
        results = [each["test_probe"] for each in request.getfixturevalue("results_of_ranks")]
    else:
        folder = tmp_path_factory.mktemp("ranks")
        results = run_ranks("probe_jobs:everything", request.param, folder, folder)
    return results, results[0]["folder"]


@pytest.mark.parametrize("job", ["pipeline", "zero_bubble", "merged", "replicas", "both"])
def test_trainings_on_several_ranks_are_not_touched(job, ranks):
    assert [rank["same"][job] for rank in ranks[0]] == [True] * len(ranks[0])


def test_a_pipeline_of_several_ranks_leaves_one_folder_that_is_priced(ranks):
    size = len(ranks[0])
    results = load(ranks[1] / "pipeline")
    assert results.problems == []
    assert len(results.runs) == 1 + len(CANDIDATES_OF_RANKS)
    actions = results.actions
    found = actions.groupby("run", observed=True)[["stage", "op", "microbatch", "step"]].nunique()
    assert (found == [size, 2, 4, 2]).all().all()
    assert (actions["compute_wall_s"] > 0).all()
    links = results.links
    assert sorted(set(zip(links["boundary"], links["direction"], strict=True))) == [
        (boundary, direction) for boundary in range(size - 1) for direction in ("backward", "forward")
    ]
    mine = links[(links["codec"] == "TopK(0.1)") & (links["direction"] == "backward")]
    arrays = TopK(0.1).encode(torch.randn(8, 64)).array_bytes
    assert (mine["packets"] == 4).all()
    assert mine["wire_bytes"].between(4 * arrays, 4 * (arrays + 16)).all()
    assert mine["fidelity"].between(0, 1).all()
    slow = replay(results, ["1mbps"], against="dense").set_index("run")["speedup"]
    assert (slow.drop("0-Identity") > 2).all()


def test_gradients_of_replicas_are_priced(ranks):
    results = load(ranks[1] / "replicas")
    assert results.problems == []
    links = results.links
    assert (links["direction"] == "replica_gradient").all()
    assert links.groupby("codec", observed=True)["replica"].nunique().tolist() == [len(ranks[0])] * 3
    dense = links[links["codec"] == "Identity"]
    assert (dense["fidelity"] == 1).all()
    assert dense["wire_bytes"].between(0.99 * dense["dense_bytes"], 1.01 * dense["dense_bytes"]).all()
    others = links[links["codec"] != "Identity"]
    assert others["fidelity"].between(0.01, 0.999).all()
    slow = replay(results, ["1mbps"], against="dense").set_index("run")["speedup"]
    assert (slow.drop("0-Identity") > 2).all()


def test_halves_of_backwards_are_timed_apart(ranks):
    """torch's first stage has no input to differentiate, and computes its whole backward with the gradients of weights."""
    results = load(ranks[1] / "zero_bubble")
    assert results.problems == []
    num_stages, actions = 2 * len(ranks[0]), results.actions
    found = actions.groupby(["run", "step"], observed=True)[["stage", "op", "microbatch"]].nunique()
    assert (found == [num_stages, 3, 4]).all().all()
    seconds = actions.groupby(["op", "stage"], observed=True)["compute_wall_s"].min()
    assert (seconds["W"] > 0).all()
    assert (seconds["B"] > 0).tolist() == [stage > 0 for stage in range(num_stages)]
    slow = replay(results, ["1mbps"], against="dense").set_index("run")["speedup"]
    assert (slow.drop("0-Identity") > 2).all()


def test_halves_are_added_where_the_schedule_has_one_part(ranks):
    actions = load(ranks[1] / "merged").actions
    found = actions.groupby(["run", "step"], observed=True)[["stage", "op", "microbatch"]].nunique()
    assert (found == [2 * len(ranks[0]), 2, 4]).all().all()
    assert (actions["compute_wall_s"] > 0).all()


def test_links_and_gradients_are_probed_together(ranks):
    """Every link candidate is priced with every replica method, and a stage averages the gradients of its own parameters."""
    results = load(ranks[1] / "both")
    assert results.problems == []
    size, runs = len(ranks[0]), results.runs.set_index("run")
    links, replicas = CANDIDATES_OF_RANKS[0], "ErrorFeedback(TopK(0.05))"
    assert sorted(zip(runs["forward"], runs["replica_gradient"], strict=True)) == sorted(
        (one, other) for one in ("Identity", links) for other in ("Identity", replicas)
    )
    assert (runs["num_stages"] == 2).all()
    assert (runs["num_replicas"] == size).all()
    rows = results.links.groupby(["run", "direction"], observed=True)[["replica", "step"]].nunique()
    assert (rows == [size, 3]).all().all()
    dense = results.links[(results.links["run"] == "0-Identity") & (results.links["direction"] == "replica_gradient")]
    values = 64 * 64 + 64  # of a stage's one linear layer
    assert dense.groupby("stage")["dense_bytes"].unique().tolist() == [[2 * (size - 1) * 4 * values // size]] * 2
    slow = replay(results, ["1mbps"], against="dense").set_index("run")["step_s"]
    names = {(row.forward != "Identity", row.replica_gradient != "Identity"): run for run, row in runs.iterrows()}
    assert slow[names[True, True]] < min(slow[names[True, False]], slow[names[False, True]])
    assert max(slow[names[True, False]], slow[names[False, True]]) < slow[names[False, False]]
    done = run_command("replay", ranks[1] / "both", "--network", "1mbps")
    assert done.exit_code == 0, done.output
    assert f"2 stages and {size} replicas of Sequential" in done.output
    (section,) = [one for one in compose(ranks[1] / "both", ["1mbps"]).sections if one.key == "probes"]
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    averaged = f"replicas {replicas}"
    assert sorted(table.frame["candidate"]) == sorted(["dense", links, averaged, f"{links}, {averaged}"])


def test_a_step_in_which_one_rank_finds_nan_is_left_out_by_all(ranks):
    results = load(ranks[1] / "spoiled")
    assert results.problems == []
    assert results.runs["steps_done"].tolist() == [2] * 4


def test_every_rank_is_told_the_same_sentence(ranks):
    for rank in ranks[0]:
        for said, sentence in zip(rank["refusals"], SENTENCES, strict=True):
            assert said is not None, sentence
            assert sentence in said


def run_command(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_replay_prices_all_candidates_and_says_what_a_probe_cannot(probed, tmp_path):
    done = run_command(
        "replay", probed[2], "--network", "1mbps", "--network", "free", "--json", tmp_path / "figures.json"
    )
    assert done.exit_code == 0, done.output
    assert "The probe sampled 4 steps, one in 1, and took " in done.output
    assert LIMIT in done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = {(row["candidate"], row["network"]): row for row in figures["candidates"]}
    assert {name for name, _ in rows} == {"dense", *CANDIDATES}
    for name in CANDIDATES:
        slow = rows[name, "1mbps"]
        assert slow["speedup"] == pytest.approx(rows["dense", "1mbps"]["step_s"] / slow["step_s"])
        assert slow["speedup"] > 1
        assert 0 < slow["forward_fidelity"] < 1
        assert rows[name, "free"]["verdict"] != "faster"


def test_the_commands_that_judge_candidates_are_valid(probed, ranks):
    for folder in (probed[2], ranks[1] / "replicas", ranks[1] / "both"):
        *commands, report = smaller_runs(load(folder).runs.to_dict("records"))
        assert len(commands) == len(load(folder).runs)
        assert report == "raysim report results/probed"
        for command in commands:
            words = shlex.split(command.partition("; do ")[2].partition("; done")[0])
            assert words[:2] == ["raysim", "train"]
            read_config(words[2], [word.replace("$s", "0") for word in words[3 : words.index("--out")]])


def test_options_of_one_run_are_refused_for_a_probe(probed):
    done = run_command("replay", probed[2], "--network", "1mbps", "--target", "loss=1")
    assert done.exit_code == 2
    assert "`--target` is for one run" in done.output
    assert "give one of its folders" in done.output


def test_the_report_has_a_section_on_the_probe(probed):
    page = compose(probed[2], ["1mbps"])
    assert page.problems == []
    (section,) = [one for one in page.sections if one.key == "probes"]
    texts = [block.text for block in section.blocks if isinstance(block, Text)]
    assert LIMIT in texts
    (lead,) = page.decisions(["1mbps"])
    assert "times as fast as dense" in lead
    assert lead.endswith("A probe does not say whether training stays sound under it.")
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    assert set(table.frame["candidate"]) == {"dense", *CANDIDATES}


def test_a_step_with_nan_is_left_out_and_the_training_goes_on(tmp_path):
    model = build()
    with probe(model, ["1"], ["Quantize(4)"], out=tmp_path / "probe", every=1) as probed:
        for step in range(3):
            x = torch.full((4, 32), float("nan") if step == 1 else 1.0)
            model(x).sum().backward()
    assert load(tmp_path / "probe").runs["steps_done"].tolist() == [2, 2]
    assert 0 < probed.overhead < 1


def test_a_probe_that_sampled_nothing_says_so(tmp_path):
    model = build()
    with (
        pytest.warns(UserWarning, match="sampled no whole step of 2 microbatches"),
        probe(model, ["1"], ["Quantize(4)"], out=tmp_path / "probe", num_microbatches=2),
    ):
        model(torch.ones(4, 32)).sum().backward()
