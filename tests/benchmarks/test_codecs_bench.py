"""The bench of codecs runs on little, and what it says adds up."""

from __future__ import annotations

import json

import pytest
from raysim_benchmarks.bench.codecs import DEFAULTS, KINDS, bench_codecs, break_even_bps, draw, table
from raysim_benchmarks.bench.recorded import record_tensors
from rich.console import Console

from raysim.codecs import CODECS
from raysim.notation import parse_notation


@pytest.mark.slow
def test_rows_add_up_and_print() -> None:
    result = bench_codecs([1 << 12], ["normal", "relu"], DEFAULTS, seconds=0.01, rounds=(1, 2))
    json.dumps(result)
    names = {row["codec"] for row in result["rows"]}
    assert {"TopK(0.1)", "torch.topk 10 %, int32 indices", "torch PowerSGD rank 4"} <= names
    for row in result["rows"]:
        assert row["factor"] == row["dense_bytes"] / row["wire_bytes"]
        assert row["encode_memcpys"] > 0
        codec_s = row["encode_s"] + row["decode_s"]
        assert row["break_even_bps"] == break_even_bps(row["dense_bytes"], row["wire_bytes"], codec_s)
    errors = {row["codec"]: row["relative_error"] for row in result["rows"] if row["tensor"].startswith("normal")}
    assert errors["Identity"] == 0
    assert errors["TopK(0.1)"] == pytest.approx(errors["torch.topk 10 %, int32 indices"], rel=0.01)
    assert errors["Quantize(4)"] == pytest.approx(errors["torch min-max 4 bit, not packed"], rel=0.01)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(result))
    assert "TopK(0.01)" in capture.get()


def test_every_codec_is_measured() -> None:
    assert {type(parse_notation(text, CODECS)) for text in DEFAULTS} >= set(CODECS.values())


@pytest.mark.slow
def test_own_tensors_and_shapes() -> None:
    recorded = {"mine": draw("heavy tail", (4, 100))}
    result = bench_codecs(
        codecs=["TopK(0.1)"], shapes=[(2, 64)], kinds=["relu"], recorded=recorded, others=False, rounds=(1, 1)
    )
    assert [row["tensor"] for row in result["rows"]] == ["relu 2x64", "mine"]


def test_tensors_of_a_recipe() -> None:
    tensors = record_tensors("topics-gpt", 2, ["data.train_samples=64", "model.width=32", "batch_size=8"])
    assert list(tensors) == ["topics-gpt 1 -> 2", "topics-gpt 1 <- 2"]
    activation, gradient = tensors.values()
    assert activation.shape == gradient.shape
    assert activation.shape[0] == 8
    assert activation.shape[2] == 32
    assert float(gradient.abs().max()) < 0.1 * float(activation.abs().max())  # one is of a mean loss
    result = bench_codecs([], codecs=["Quantize(8)"], recorded=tensors, others=False, rounds=(1, 1))
    assert [row["tensor"] for row in result["rows"]] == list(tensors)
    assert all(row["relative_error"] < 0.1 for row in result["rows"])


def test_process_kinds_are_recognised() -> None:
    assert float(draw("relu", (10, 1000)).min()) == 0
    assert float(draw("heavy tail", (10, 10000)).abs().max()) > 2 * float(draw("normal", (10, 10000)).abs().max())
    with pytest.raises(ValueError) as caught:
        draw("flat", (1,))
    assert str(caught.value) == f"`kinds` must be among {', '.join(KINDS)}, but got 'flat'."
