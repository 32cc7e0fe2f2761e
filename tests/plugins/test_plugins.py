"""Codecs, compressors and schedules of the user's own: written by import path or entry point, checked, run like ours."""

from importlib import metadata
from typing import Any

import own_methods
import pytest
from own_methods import Half

from raysim import plugins, train
from raysim.codecs import CODECS
from raysim.compressors import Plain
from raysim.compressors import parse as parse_compressor
from raysim.config import ConfigError
from raysim.notation import parse_notation
from raysim.replication import parse_replica_method
from raysim.schedules.families import parse_schedule
from raysim.testing import check_codec, check_compressor, check_replica_method, check_schedule


@pytest.mark.parametrize(
    "text",
    [
        "own_methods:Half",
        "own_methods:Half(skip=2)",
        "ErrorFeedback(own_methods:Half(skip=2), key='sample')",
        "own_methods:Forgetful(TopK(0.1))",
        "own_methods:Forgetful(own_methods:Half)",
    ],
)
def test_import_path_notation_round_trips(text):
    found = parse_compressor(text)
    assert repr(found) == text
    assert parse_compressor(repr(found)) == found
    check_compressor(found)


def test_a_class_is_found_wherever_a_notation_is_read():
    assert parse_notation("own_methods:Half(2)", CODECS) == Half(2)
    assert parse_compressor("own_methods:Half(2)") == Plain(Half(2))
    plain: Any = parse_replica_method("own_methods:Half(2)")
    feedback: Any = parse_replica_method("ErrorFeedback(own_methods:Half)")
    assert (plain.compressor, feedback.compressor.codec) == (Plain(Half(2)), Half())
    assert repr(parse_schedule("own_methods:Backwards")) == "own_methods:Backwards"


def test_custom_codecs_pass_laws():
    check_codec(Half(skip=1))
    check_schedule(own_methods.Backwards())
    check_replica_method(own_methods.Median())


@pytest.mark.parametrize(
    "text", ["Identity", "PowerSGD(2)", "EF21(TopK(0.1))", "DGC(0.05)", "GTopK(0.05)", "PowerGossip"]
)
def test_custom_replica_methods_pass_laws(text):
    check_replica_method(parse_replica_method(text))


def test_a_replica_method_that_does_not_agree_is_named():
    with pytest.raises(AssertionError, match=r"Median\(selfish=True\) lets replicas step differently"):
        check_replica_method(own_methods.Median(selfish=True))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no_such_module:Half", "`no_such_module:Half` cannot be imported: ModuleNotFoundError: No module named"),
        ("own_methods:Hafl", "`own_methods:Hafl` cannot be imported: `own_methods` has no class `Hafl`."),
        (
            "own_methods:NoCodec",
            "`own_methods:NoCodec` is not a compressor: it must be a class that derives from raysim.codecs.Codec",
        ),
        ("own_methods:torch", "`own_methods:torch` cannot be imported: `own_methods` has no class `torch`"),
        ("own_methods:Written", "must be declared with `@dataclass(frozen=True, repr=False)`"),
        ("own_methods:Half(skip=-1)", "`skip` must be an integer of at least 0, but got -1"),
        ("own_methods:Half(jump=1)", "takes (skip=0)"),
        ("raises:Codec", "`raises:Codec` cannot be imported: RuntimeError: not today."),
        ("own_methods::Half", "is not a compressor: expected a name with arguments"),
    ],
)
def test_unusable_plugins_are_refused_in_one_sentence(text, sentence, tmp_path, monkeypatch):
    (tmp_path / "raises.py").write_text("raise RuntimeError('not today.')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        train("digits-cnn", f"forward={text}", "steps=1", engine="inline", out=tmp_path / "run")
    assert sentence in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_shows_the_name_and_counts_the_bytes(small, tmp_path):
    run = train(
        small(forward="own_methods:Half(skip=1)", schedule="own_methods:Backwards"),
        engine="inline",
        out=tmp_path / "run",
    )
    assert run.status == "finished"
    links = run.links[run.links["direction"] == "forward"]
    assert set(links["codec"]) == {"own_methods:Half(skip=1)"}
    assert run.row["schedule"] == "own_methods:Backwards"
    assert (links["wire_bytes"] - links["dense_bytes"] / 2).between(1, 16 * links["packets"]).all()


@pytest.mark.slow
def test_ray_workers_load_plugins(ray, small, tmp_path):
    config = small(forward="tests.support.own_methods:Half(skip=2)", steps=2, checkpoint_every_steps=0)
    here = train(config, engine="inline", out=tmp_path / "inline")
    there = train(config, out=tmp_path / "ray")
    assert there.steps["loss"].tolist() == here.steps["loss"].tolist()


def test_an_entry_point_is_written_by_its_name(monkeypatch):
    points = [metadata.EntryPoint("Halved", "own_methods:Half", "raysim.codecs")]
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [p for p in points if p.group == group])
    plugins.entry_points.cache_clear()
    try:
        assert parse_notation("Halved(3)", CODECS) == Half(3)
        assert repr(Half(3)) == "Halved(skip=3)"
        assert parse_notation(repr(Half(3)), CODECS) == Half(3)
    finally:
        plugins.entry_points.cache_clear()


def test_a_law_that_is_broken_is_named():
    class Leaky(Half):
        def decode(self, packet, device="cpu"):
            return super().decode(packet, device).reshape(-1)

    own_methods.Leaky = Leaky  # type: ignore[attr-defined]
    Leaky.__module__, Leaky.__qualname__ = "own_methods", "Leaky"
    with pytest.raises(
        AssertionError, match=r"own_methods:Leaky on the tensor 'zeros': the shape \(3, 7\) becomes \(21,\)"
    ):
        check_codec(Leaky())
    delattr(own_methods, "Leaky")
