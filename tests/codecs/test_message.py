"""Messages: packets come back from them whole, headers stay short, and what is malformed is refused."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from codec_variants import KEY, LAW_TENSORS, VARIANTS, Variant, normal
from compressor_variants import same_packet
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.codecs import Identity, Packet, Quantize, TopK
from raysim.codecs.message import CodecTable, Entry, Message, wire_bytes

BOUNDARIES = [(16,), (16, 10), (32, 64), (8, 128, 256), (16, 32, 14, 14), (32, 64, 8, 8), (64, 16, 7, 7)]
LONGEST_HEADER = 24

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)


@functools.cache
def all_codecs() -> CodecTable:
    return CodecTable(Entry.of(variant.codec) for variant in VARIANTS)


@variants
def test_packets_come_back_whole_under_a_number_and_by_their_notation(variant: Variant) -> None:
    """Each tensor by one of three tables: of this codec, of none, and of all."""
    tables = [CodecTable([Entry.of(variant.codec)]), CodecTable(), all_codecs()]
    ends = itertools.cycle([(table, CodecTable(table.entries)) for table in tables])
    for (name, x), (sender, receiver) in zip(LAW_TENSORS.items(), ends, strict=False):
        packet = variant.codec.encode(x, KEY)
        message = sender.pack(packet)
        assert wire_bytes(message) == len(message[0]) + packet.array_bytes
        again = receiver.unpack(pickle.loads(pickle.dumps(message)), 10_000)
        assert same_packet(again, packet), name


@variants
def test_headers_are_short(variant: Variant) -> None:
    """Every codec stays within the bound at every boundary, where its table numbers up to 31 codecs."""
    table = CodecTable([Entry.of(variant.codec)])
    for shape in BOUNDARIES:
        message = table.pack(variant.codec.encode(normal(*shape).relu() - 0.1, KEY))
        assert len(message[0]) <= LONGEST_HEADER, (shape, len(message[0]))


def test_arrays_are_not_copied() -> None:
    packet = TopK(0.1).encode(normal(4, 300))
    _, *arrays = CodecTable().pack(packet)
    assert {array.ctypes.data for array in arrays} == {array.ctypes.data for array in packet.arrays.values()}


def test_rounds_hold_many_packets_and_number_the_names_that_are_known() -> None:
    packets = {
        "0.weight": TopK(0.1).encode(normal(1, 2000)),
        "1.weight": Quantize(4).encode(normal(30, 20)),
        "all layers": Identity().encode(normal(7)),
    }
    known = CodecTable([Entry.of(TopK(0.1)), Entry.of(Quantize(4))], names=["0.weight", "1.weight"])
    message, spelled = known.pack_round(packets), CodecTable().pack_round(packets)
    assert len(message[0]) + len("0.weight1.weight") + len("TopK(0.1)Quantize(4)") + 4 == len(spelled[0])
    for table, sent in ((known, message), (CodecTable(), spelled)):
        again = table.unpack_round(sent, 2000)
        assert list(again) == list(packets)
        assert all(same_packet(again[name], packet) for name, packet in packets.items())
    assert known.unpack_round(known.pack_round({}), 1) == {}
    with pytest.raises(ValueError, match="one of 1 packets, but names codec 2"):
        CodecTable(known.entries, names=["0.weight"]).unpack_round(message, 2000)
    with pytest.raises(ValueError, match=r"each packet once, but holds '0\.weight' twice"):
        CodecTable().unpack_round((spelled[0].replace(b"1.weight", b"0.weight"), *spelled[1:]), 2000)


def claiming(shape: tuple[int, ...]) -> Message:
    """Return a message of a few bytes that claims a shape."""
    x = torch.ones(4)
    packet = TopK(0.5).encode(x)
    return CodecTable([Entry.of(TopK(0.5))]).pack(packet._replace(shape=shape))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda header: b"", "longer or cut off"),
        (lambda header: header[:-1], "longer or cut off"),
        (lambda header: header + b"\0", "that it states"),
        (lambda header: bytes([4 * 9]) + header[1:], "one of 2 codecs, but names codec 9"),
        (lambda header: bytes([header[0], 99]) + header[2:], "at most 8 dimensions, but has 99"),
        (lambda header: header[:4] + b"\x7f" + header[5:], "at most 5 arrays, but omits more"),
        (lambda header: header[:-1] + bytes([header[-1] + 1]), "must have the stated"),
        (lambda header: b"\xff" * 12, "longer or cut off"),
        (lambda header: b"\0\x09TopK(9.9)" + header[1:], "`density` must be in"),
        (lambda header: b"\0\xff\xff\x03" + header[1:], "a text in a header".capitalize()),
    ],
)
def test_malformed_headers_are_refused(damage, sentence: str) -> None:
    table = CodecTable([Entry.of(TopK(0.5))])
    header, *arrays = table.pack(TopK(0.5).encode(torch.ones(1, 16)))
    with pytest.raises(ValueError, match=sentence):
        table.unpack((damage(header), *arrays), 16)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (1 << 62, 0), (17,), (4, 5)])
def test_oversized_claims_are_refused_before_allocation(shape: tuple[int, ...]) -> None:
    message = claiming(shape)
    tracemalloc.start()
    with pytest.raises(ValueError, match="at most 16 values"):
        CodecTable([Entry.of(TopK(0.5))]).unpack(message, 16)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_arrays_of_a_message_are_flat_bytes(dtype: type) -> None:
    table = CodecTable()
    header, *arrays = table.pack(Identity().encode(torch.ones(4)))
    (array,) = arrays
    for wrong in (array.view(dtype), array.reshape(2, 8), np.repeat(array, 2)[::2]):
        with pytest.raises(ValueError, match="must be flat bytes"):
            table.unpack((header, wrong), 4)
    with pytest.raises(ValueError, match="must have as many, but has 2"):
        table.unpack((header, array, array), 4)


@settings(max_examples=300, database=None, deadline=None)
@given(header=st.binary(max_size=40), sizes=st.lists(st.integers(0, 40), max_size=6), rounds=st.booleans())
def test_random_headers_are_refused_or_decode_within_the_bound(header: bytes, sizes: list[int], rounds: bool) -> None:
    table = CodecTable([Entry.of(TopK(0.5)), Entry.of(Quantize(4))], names=["a"])
    message: Message = (header, *(np.zeros(size, np.uint8) for size in sizes))
    try:
        packets = table.unpack_round(message, 64).values() if rounds else [table.unpack(message, 64)]
        decoded = [packet.decode() for packet in packets]
    except ValueError:
        return
    assert all(y.numel() <= 64 for y in decoded)


@settings(max_examples=200, database=None, deadline=None)
@given(data=st.data())
def test_damaged_headers_are_refused_or_consistent(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(VARIANTS)).codec
    x = normal(*data.draw(st.sampled_from([(4, 60), (3, 7, 8), (2, 3, 5, 4)])))
    table = CodecTable([Entry.of(codec)])
    header, *arrays = table.pack(codec.encode(x, KEY))
    place = data.draw(st.integers(0, len(header) - 1))
    damaged = header[:place] + bytes([data.draw(st.integers(0, 255))]) + header[place + 1 :]
    try:
        packet: Packet = table.unpack((damaged, *arrays), 1000)
        y = packet.decode()
    except ValueError:
        return
    assert math.prod(y.shape) <= 1000
