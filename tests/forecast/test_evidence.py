"""Verdicts of the findings are about models: those of small ones say nothing good about trained or large transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from raysim.config import read_config
from raysim.config.identity import Setting
from raysim.forecast.advise import PER_TENSOR, PER_TOKEN, advise
from raysim.forecast.answer import answer
from raysim.forecast.evidence import ELSEWHERE, Known, Scope, known
from raysim.forecast.fleet import Fleet, HostLayout
from raysim.forecast.inputs import make_job
from raysim.forecast.shapes import ModelShape
from raysim.forecast.structure import RecipeModel
from raysim.network.presets import parse_network

EVIDENCE = json.loads(resources.files("raysim.forecast").joinpath("evidence.json").read_text(encoding="utf-8"))
SMALL = Scope("transformer", 867_072, model="gpt")
LARGE = Scope("transformer", 8_030_261_248, model="llama")
TRAINED = Scope("transformer", 5_627_136, "trained elsewhere", "gpt2")
CODECS = sorted({(row["forward"], row["backward"], row["replica_gradient"]) for row in EVIDENCE})
SHAPE = ModelShape(layers=30, width=576, length=512, vocabulary=49_152, heads=9, kv_heads=3, hidden=1536, gated=True)


def advised(model: Any, tried: Any = (), layout: HostLayout | None = None) -> Any:
    fields: dict[str, Any] = {"batch": 32, "microbatch": 8, "efficiency": 0.4, "transport": "nccl", "recompute": False}
    job = make_job(model, Fleet.parse("4xT4"), schedule="1F1B", **fields)
    return advise(job, [parse_network("100mbps")], layout=layout, tried=tried)


@pytest.mark.parametrize("asked", [LARGE, TRAINED], ids=str)
def test_small_model_evidence_calls_nothing_safe_for_large_transformers(asked: Scope) -> None:
    for setting in CODECS:
        verdict, scope = known(Setting(*setting), asked)
        assert verdict in ("harmful", "untried") or not isinstance(scope, Scope) or not scope.small, setting


@pytest.mark.parametrize("scope", list({str(row["scope"]): row["scope"] for row in EVIDENCE}.values()))
def test_every_verdict_states_its_scope(scope: dict[str, Any]) -> None:
    assert scope["kind"] in ("transformer", "convolutional", "recurrent")
    assert scope["origin"] in ("from scratch", "fine-tuned", "trained elsewhere")
    assert scope["parameters"] > 10_000
    assert scope["peak"] is None or scope["peak"] > 1


def test_per_tensor_range_verdicts_differ_by_model() -> None:
    eight = Setting("Quantize(8)", "Quantize(8)")
    assert known(eight, SMALL).verdict == "safe"
    for asked in (LARGE, TRAINED):
        verdict = known(eight, asked)
        assert (verdict.verdict, str(verdict)) == ("hopeless at once", "hopeless at once: SmolLM2, 135 M")
    one_way = Setting("Quantize(8)", "Quantize(4, per='row')", "DiLoCo(100)")  # harm of a part is harm of the whole
    assert known(one_way, TRAINED).verdict == "hopeless at once"


def test_combination_of_safe_parts_is_untested() -> None:
    """Eight bits on links and `PowerSGD(8)` are each safe for a small GPT, and harmful together."""
    links, method = Setting("Quantize(8)", "Quantize(8)"), Setting(replica_gradient="PowerSGD(8)")
    assert {known(part, SMALL).verdict for part in (links, method)} == {"safe"}
    assert known(links._replace(replica_gradient="PowerSGD(8)"), SMALL).verdict == "harmful"
    assert known(links._replace(replica_gradient="PowerSGD(9)"), SMALL) == Known("untried")
    other = Setting("Hadamard(Quantize(4))", "Hadamard(Quantize(4))")
    assert known(other, SMALL).verdict == "safe"
    assert known(other._replace(replica_gradient="PowerSGD(8)"), SMALL) == Known("untried")


def test_other_model_kinds_transfer_only_harm() -> None:
    mine = Scope("unknown", 100_000, model="mine")
    pictures = Scope("convolutional", 100_000, model="cnn")
    for codecs in CODECS:
        setting = Setting(*codecs)
        assert known(setting, mine).verdict in ("harmful", "untried", "")
        scope = known(setting, pictures).scope
        assert (
            not isinstance(scope, Scope)
            or scope.kind == "convolutional"
            or known(setting, pictures).verdict == "harmful"
        )


@pytest.mark.parametrize("trained", [False, True])
def test_headline_never_recommends_a_harmful_setting(trained: bool) -> None:
    tried = [
        Setting("Quantize(8)", "Quantize(8)"),
        Setting("Quantize(3)", "Quantize(6)"),
        Setting("TopK(0.1)", "TopK(0.1)"),
    ]
    advice = advised(replace(SHAPE, trained=trained, name="mine"), tried, HostLayout(4, 1))
    words = " ".join(answer(advice))
    assert not any(setting.forward + " " in words for setting in tried)
    assert not any(row.known.breaks for row in [*advice.paying(), *advice.remedies(), advice.fastest()])
    known_of = {row.way.forward: row.known.verdict for row in advice.rows if row.way.layout == advice.layout}
    assert [known_of[setting.forward] for setting in tried] == ["hopeless at once", "hopeless at once", "harmful"]
    assert known_of["Quantize(8, per='row')"] == "safe"  # five seeds of a study of the same model


def test_what_training_says_of_a_model_replaces_its_screen_up_to_the_reach_of_its_size():
    rotated = Setting("Rotated(4)", "Rotated(4)")
    verdicts = [
        known(rotated, Scope("transformer", round(factor * 134_515_008), ELSEWHERE)) for factor in (0.1, 1, 3, 4, 50)
    ]
    assert [each.verdict for each in verdicts] == ["safe"] * 3 + ["worth training"] * 2
    assert {str(each.scope) for each in verdicts} == {"SmolLM2, 135 M"}
    assert (
        known(Setting("Rotated(3)", "Rotated(4)"), Scope("transformer", 134_515_008, ELSEWHERE)).verdict == "undecided"
    )


@pytest.mark.slow
def test_transformers_are_offered_ranges_of_tokens_and_convolutions_those_of_tensors() -> None:
    for model, pairs in (
        (RecipeModel(read_config("topics-gpt")), PER_TOKEN),
        (RecipeModel(read_config("digits-cnn")), PER_TENSOR),
    ):
        advice = advised(model, layout=HostLayout(4, 1))
        coded = [row.way for row in advice.rows if row.way.layout == HostLayout(4, 1) and not row.way.dense]
        assert [(way.forward, way.backward) for way in coded if way.schedule is None] == list(pairs)
        ahead = {(way.forward, way.backward) for way in coded if way.schedule is not None}
        assert ahead == ({pairs[-1]} if pairs is PER_TOKEN else set())


@pytest.mark.parametrize(
    ("recipe", "changes", "kind", "origin"),
    [
        ("topics-gpt", [], "transformer", "from scratch"),
        ("topics-gpt", ["start=results/dense@100"], "transformer", "trained elsewhere"),
        ("gpt2-wikitext2", [], "transformer", "trained elsewhere"),
        ("topics-lstm", [], "recurrent", "from scratch"),
        ("resnet18-cifar10", [], "convolutional", "from scratch"),
        (
            "hf",
            ['model.config={ model_type = "gpt2", n_embd = 32, n_layer = 2, n_head = 2 }'],
            "transformer",
            "from scratch",
        ),
    ],
)
def test_recipe_scope(recipe: str, changes: list[str], kind: str, origin: str) -> None:
    scope = RecipeModel(read_config(recipe, changes)).scope
    assert (scope.kind, scope.origin) == (kind, origin)


def test_published_local_steps_are_judged_by_a_law_of_size() -> None:
    setting = Setting(replica_gradient="DiLoCo(30)")
    asked = Scope("transformer", 1_300_000_000)
    four, eight, far = (known(setting, asked, replicas) for replicas in (3, 8, 16))
    assert (four.verdict, eight.verdict) == ("safe", "harmful")  # published: +0.5 and +1.3 %
    assert str(four) == "safe: by a law from 35 M to 10 B: +0.5 % (+0.4 to +0.6) at 1.3 B"
    assert "law" not in str(far)
    assert "law" not in str(known(setting, asked._replace(origin=ELSEWHERE), 4))
    assert "law" not in str(known(setting, asked._replace(parameters=10**13), 4))
