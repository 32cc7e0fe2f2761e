"""Small vectors, bit packing and byte formulas, and the texts of refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_variants import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.codecs import CODECS, Codec, Quantize, TopK, kernels
from raysim.codecs.bits import pack, pack_bits, packed_bytes, unpack, unpack_bits
from raysim.codecs.positions import (
    FORMS,
    decode_positions,
    encode_positions,
    index_bytes,
    kept_of,
    select_topk,
    smallest_form,
)
from raysim.notation import parse_notation


@pytest.mark.parametrize(
    ("codec", "values", "expected"),
    [
        (Quantize(2), [0, 1, 2, 3], [0, 1, 2, 3]),
        (Quantize(2), [-1, 0, 1], [-1, 1 / 3, 1]),
        (Quantize(2), [-3, -1, 0, 0.4, 5], [-3, -1 / 3, -1 / 3, -1 / 3, 5]),
        (TopK(0.5), [3, -5, 1, 5], [0, -5, 0, 5]),
        (TopK(0.5), [1, 1, 1, 1], [1, 1, 0, 0]),
    ],
    ids=str,
)
def test_small_vectors(codec: Codec, values: list[float], expected: list[float]) -> None:
    y = codec.encode(torch.tensor([values], dtype=torch.float32)).decode()
    assert torch.allclose(y, torch.tensor([expected], dtype=torch.float32), rtol=1e-7, atol=0)


def test_kept_value_counts() -> None:
    counts = {0.5: 32768, 0.3: 19661, 0.2: 13108, 0.1: 6554, 0.05: 3277, 0.02: 1311, 0.01: 656}
    assert {density: kept_of(density, 65536) for density in counts} == counts
    assert [kept_of(0.1, 786432), kept_of(0.07, 100), kept_of(1e-9, 10)] == [78644, 7, 1]


def test_packing_vectors() -> None:
    assert pack(torch.tensor([1, 2, 3, 0, 3]), 2).tolist() == [108, 192]
    assert pack(torch.tensor([5, 2, 7]), 3).tolist() == [171, 128]
    counts = {(10, 3): 4, (7, 5): 5, (65536, 4): 32768, (1000, 2): 250, (1000, 6): 750}
    assert {pair: packed_bytes(*pair) for pair in counts} == counts


@settings(max_examples=200)
@given(data=st.data(), width=st.integers(0, 31))
def test_packing_is_the_concatenation_of_fields(data: st.DataObject, width: int) -> None:
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=50))
    packed = pack(torch.tensor(values, dtype=torch.int64), width)
    stream = "".join(f"{value:0{width}b}" for value in values) if width else ""
    stream += "0" * (-len(stream) % 8)
    assert packed.tolist() == [int(stream[i : i + 8], 2) for i in range(0, len(stream), 8)]
    assert unpack(packed, len(values), width).tolist() == values


@given(flags=st.lists(st.booleans(), max_size=60))
def test_bitmaps(flags: list[bool]) -> None:
    packed = pack_bits(torch.tensor(flags, dtype=torch.bool))
    assert packed.tolist() == np.packbits(np.array(flags, dtype=bool)).tolist()
    assert unpack_bits(packed, len(flags)).tolist() == flags


@settings(max_examples=200)
@given(total=st.integers(1, 5000), data=st.data(), form=st.sampled_from(FORMS))
def test_positions(total: int, data: st.DataObject, form: str) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=60)))
    positions = torch.tensor(chosen, dtype=torch.int64)
    arrays = encode_positions(positions, total, form)
    with kernels.reference():
        plain = encode_positions(positions, total, form)
    assert {name: array.tolist() for name, array in arrays.items()} == {name: x.tolist() for name, x in plain.items()}
    assert sum(array.nbytes for array in arrays.values()) == index_bytes(form, len(chosen), total)
    packet = CODECS["Identity"]().encode(torch.zeros(total))._replace(arrays=arrays)
    assert decode_positions(packet, len(chosen)).tolist() == chosen
    assert index_bytes(smallest_form(len(chosen), total), len(chosen), total) == min(
        index_bytes(form, len(chosen), total) for form in FORMS
    )


@pytest.mark.parametrize(
    ("shape", "density", "index", "expected"),
    [
        ((1, 65536), 0.1, "int32", 52432),
        ((1, 65536), 0.1, "bitmap", 34408),
        ((1, 32768), 0.1, "int32", 26216),
        ((1, 32768), 0.1, "bitmap", 17204),
        ((1, 16384), 0.1, "bitmap", 8604),
        ((1, 786432), 0.1, "int32", 629152),
        ((1, 786432), 0.1, "bitmap", 412880),
    ],
)
def test_bytes_of_topk(shape: tuple[int, int], density: float, index: str, expected: int) -> None:
    x = normal(1, 1024).repeat(1, shape[1] // 1024)
    assert TopK(density, index=index).encode(x).array_bytes == expected
    assert TopK(density).encode(x).array_bytes <= expected


def test_selection_keeps_at_most_all_values() -> None:
    assert select_topk(torch.tensor([[1.0, -1.0, 2.0]]), 3).tolist() == [0, 1, 2]
    assert select_topk(torch.empty(2, 0), 0).tolist() == []
    assert select_topk(torch.tensor([[1.0, 2.0]]), 0).tolist() == []


def test_numbers_are_coerced() -> None:
    assert repr(parse_notation("TopK(1)", CODECS)) == "TopK(1.0)"
    assert repr(parse_notation("Quantize(4.0, per='tensor')", CODECS)) == "Quantize(4)"
    assert parse_notation(" TopK( density = 0.1 ) ", CODECS) == TopK(0.1)
