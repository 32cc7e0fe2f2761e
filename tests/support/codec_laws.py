"""The laws of codecs: each takes a variant, and tests run all of them over the variants of raysim and of its plug-in.

Laws that hold for any codec of a user's own are those of `raysim.testing`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from codec_variants import KEY, LAW_TENSORS, Variant, normal
from packet_fuzz import fuzz
from torch import Tensor

from raysim.codecs import CODECS, Codec, NonFiniteError, Packet, kernels
from raysim.codecs.codec import work_bytes
from raysim.compressors import Plain
from raysim.compressors import parse as parse_compressor
from raysim.notation import parse_notation
from raysim.testing import check_codec

GOLDEN = Path(__file__).parents[1] / "golden" / "packets.json"

GOLDEN_TENSORS: dict[str, Tensor] = {
    "ramp": (torch.arange(-768, 768) / 7).view(4, 6, 64),
    "normal": normal(3, 17, 32),
    "relu": normal(4, 8, 6, 5, seed=4).relu(),
}

BEYOND = {
    "one": torch.zeros(8, 64, dtype=torch.float64)
    .index_fill_(0, torch.tensor([1]), 1.0)
    .index_fill_(1, torch.tensor([3]), 1e39),
    "1e39": 1e39 * normal(8, 64).double(),
    "-1e39": -1e39 * normal(8, 64).double().abs(),
    "1e300": 1e300 * normal(8, 64).double(),
}


def bits_of(x: Tensor) -> bytes:
    """The bytes of a tensor, in which negative zero differs from zero."""
    return x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def content(packet: Packet) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in packet.arrays.items()}


def assert_alike(codec: Codec, x: Tensor, name: str = "") -> None:
    """Kernel and torch reference make the same packet, and decode it to the same bits."""
    packet = codec.encode(x, KEY)
    with kernels.reference():
        expected = codec.encode(x, KEY)
        plain = expected.decode()
    assert content(packet) == content(expected), name
    assert bits_of(packet.decode()) == bits_of(plain), name


def carried(variant: Variant) -> dict[str, Tensor]:
    return {name: x for name, x in LAW_TENSORS.items() if variant.any_shape or x.ndim >= 2}


def digests(variant: Variant) -> dict[str, str]:
    found = {}
    for name, x in GOLDEN_TENSORS.items():
        digest = hashlib.blake2b(digest_size=8)
        for array_name, array in sorted(variant.codec.encode(x, KEY).arrays.items()):
            digest.update(f"{array_name}:{array.nbytes};".encode() + array.tobytes())
        found[name] = digest.hexdigest()
    return found


# Laws.


def is_written_as_it_is_parsed(variant: Variant) -> None:
    codec, notation = variant.codec, variant.notation
    assert repr(codec) == notation
    assert parse_notation(repr(codec), CODECS) == codec
    assert hash(parse_notation(repr(codec), CODECS)) == hash(codec)
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert parse_compressor(notation) == Plain(codec)  # a bare codec means Plain
    assert repr(Plain(codec)) == notation  # and is written bare
    assert parse_compressor(f"Plain({notation})") == Plain(codec)


def obeys_the_laws_of_any_codec(variant: Variant) -> None:
    """Shape and type, purity, pickling, read-only memory, messages, missing arrays, refusals, keys."""
    check_codec(variant.codec, carried(variant))


def packets_are_golden(variant: Variant) -> None:
    known = json.loads(GOLDEN.read_text()).get(variant.notation)
    assert known in (None, digests(variant))


def zero_stays_zero(variant: Variant) -> None:
    if variant.zero:
        for shape in [(3, 7), (1, 1), (2, 8, 64)]:
            assert not variant.codec.encode(torch.zeros(shape), KEY).decode().any()


def algebra_holds(variant: Variant) -> None:
    for name in ("normal", "post-ReLU", "heavy tail", "bfloat16", "tokens", "ties"):
        x = LAW_TENSORS[name]
        y = variant.codec.encode(x, KEY).decode()
        if variant.lossless:
            assert torch.equal(x, y), name
        if variant.scales:
            for power in (0.125, 4.0):
                assert torch.equal(variant.codec.encode(x * power, KEY).decode(), y * power), name
        if variant.odd:
            assert torch.equal(variant.codec.encode(-x, KEY).decode(), -y), name
        if variant.idempotent:
            assert torch.equal(variant.codec.encode(y, KEY).decode(), y), name


def array_bytes_are_the_formula(variant: Variant) -> None:
    if variant.array_bytes is not None:
        for name, x in carried(variant).items():
            expected = variant.array_bytes(tuple(x.shape), x.dtype.itemsize)
            assert variant.codec.encode(x, KEY).array_bytes == expected, name


def a_fixed_size_holds_for_any_values(variant: Variant) -> None:
    codec = variant.codec
    assert codec.fixed_size or variant.array_bytes is None  # its bytes are a formula of the shape
    if codec.fixed_size:
        for name, x in carried(variant).items():
            sized = Plain(codec).array_bytes(tuple(x.shape), str(x.dtype).removeprefix("torch."))
            assert codec.encode(x, KEY).array_bytes == sized, name


def unbiased_codecs_have_the_right_mean(variant: Variant) -> None:
    if variant.unbiased:
        x = normal(3, 64, seed=5)
        decoded = torch.stack([variant.codec.encode(x, key).decode() for key in range(1, 601)]).double()
        spread = decoded.std(dim=0).amax()  # a rarely kept value may show no spread of its own
        assert ((decoded.mean(dim=0) - x.double()).abs() <= 5.5 * spread / math.sqrt(600) + 1e-6).all()


def errors_are_below_the_stated_variance(variant: Variant) -> None:
    for name in ("normal", "heavy tail", "constant", "long", "ties"):
        x = LAW_TENSORS[name]
        if (bound := variant.codec.relative_variance(x.numel())) is not None:
            errors = [error_of(variant.codec, x, key) ** 2 for key in range(1, 41)]
            assert sum(errors) / len(errors) <= 1.1 * bound + 1e-6, name


def residuals_stay_bounded_unless_a_codec_expands(variant: Variant) -> None:
    try:
        variant.codec.check_feedback()
    except ValueError:
        return
    residual, norms = torch.zeros(8, 96), []
    for key in range(1, 81):
        _, residual = variant.codec.encode_with_residual(normal(8, 96, seed=key), torch.float32, key, residual)
        norms.append(float(residual.norm()))
    assert norms[-1] <= 2 * norms[39] + 1e-3


def kernels_are_the_reference(variant: Variant) -> None:
    for name, x in carried(variant).items():
        assert_alike(variant.codec, x, name)


def a_fused_residual_is_the_plain_one(variant: Variant) -> None:
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float64))
    for (name, x), dtype in zip(carried(variant).items(), dtypes, strict=False):
        wanted = x.float().clamp(-3e38, 3e38)  # what bfloat16 holds too
        packet = variant.codec.encode(wanted.to(dtype), KEY)
        expected = wanted - packet.decode()
        before = wanted.clone(memory_format=torch.contiguous_format)
        again, residual = variant.codec.encode_with_residual(before, dtype, KEY)
        assert content(packet) == content(again), name
        assert (again.codec, again.shape, again.dtype) == (packet.codec, packet.shape, packet.dtype), name
        assert residual.shape == wanted.shape, name
        assert bits_of(residual) == bits_of(expected.to(wanted.dtype)), name


def a_memory_is_added_on_the_way(variant: Variant) -> None:
    for (name, x), dtype in zip(
        carried(variant).items(), itertools.cycle((torch.bfloat16, torch.float32)), strict=False
    ):
        x = x.float().clamp(-1e38, 1e38).to(dtype)
        memory = x.float().flip(0) / 3 if x.ndim else x.float() / 3
        before = x.clone(), memory.clone()
        packet, residual = variant.codec.encode_with_residual(x, dtype, KEY, memory)
        again, expected = variant.codec.encode_with_residual(memory + x.float(), dtype, KEY)
        assert content(packet) == content(again), name
        assert packet.dtype == again.dtype, name
        assert residual.shape == x.shape, name
        assert bits_of(residual) == bits_of(expected), name
        assert (bits_of(x), bits_of(memory)) == (bits_of(before[0]), bits_of(before[1])), name
        assert not x.numel() or residual.data_ptr() not in (x.data_ptr(), memory.data_ptr()), name


def work_is_the_same_however_a_residual_is_found(variant: Variant) -> None:
    """The kernels that encode and withhold in one pass count what encoding and decoding do."""
    x, codec, work = normal(8, 6, 4, 4), variant.codec, []
    for memory in (None, torch.zeros_like(x)):
        before = work_bytes()
        codec.encode_with_residual(x.clone(), x.dtype, key=1, memory=memory)
        work.append(work_bytes() - before)
    before = work_bytes()
    codec.encode(x, 1).decode()
    assert work == [work_bytes() - before] * 2
    assert (work[0] == 0) == codec.copies


def damaged_packets_are_refused_or_decode(variant: Variant) -> None:
    assert fuzz(variant, 12) == []


def claims_of_too_many_values_are_refused(variant: Variant) -> None:
    packet = variant.codec.encode(normal(4, 60), KEY)
    for shape in [(1 << 40,), (1 << 20, 1 << 20), (0, 1 << 40)]:
        with pytest.raises(ValueError, match="must hold at most 2147483647 values"):
            packet._replace(shape=shape).decode()


def arrays_of_objects_are_refused(variant: Variant) -> None:
    packet = variant.codec.encode(normal(4, 60), KEY)
    for name, array in packet.arrays.items():
        odd: Any
        for odd in (np.empty(len(array), object), [0] * len(array), array.astype("U1")):
            with pytest.raises(ValueError, match=f"must hold arrays of numbers, but `{name}` is"):
                packet._replace(arrays=packet.arrays | {name: odd}).decode()


def values_beyond_float32_decode_to_finite_values(variant: Variant) -> None:
    for name, x in BEYOND.items():
        try:
            packet = variant.codec.encode(x, KEY)
        except NonFiniteError:
            continue
        assert packet.decode().isfinite().all(), name


LAWS: tuple[Callable[[Variant], None], ...] = (
    is_written_as_it_is_parsed,
    obeys_the_laws_of_any_codec,
    packets_are_golden,
    zero_stays_zero,
    algebra_holds,
    array_bytes_are_the_formula,
    a_fixed_size_holds_for_any_values,
    unbiased_codecs_have_the_right_mean,
    errors_are_below_the_stated_variance,
    residuals_stay_bounded_unless_a_codec_expands,
    kernels_are_the_reference,
    a_fused_residual_is_the_plain_one,
    a_memory_is_added_on_the_way,
    work_is_the_same_however_a_residual_is_found,
    damaged_packets_are_refused_or_decode,
    claims_of_too_many_values_are_refused,
    arrays_of_objects_are_refused,
    values_beyond_float32_decode_to_finite_values,
)


def keeps_all_laws(variant: Variant) -> None:
    for law in LAWS:
        law(variant)


# Helpers of single laws.


def groups_of(x: Tensor, per: str) -> list[Tensor]:
    if per == "tensor" or x.ndim == 0:
        return [x.reshape(-1)]
    axis = 0 if per == "sample" else 2 if x.ndim == 3 else min(1, x.ndim - 1)
    return list(x.movedim(axis, 0).reshape(x.shape[axis], -1))


def error_of(codec: Codec, x: Tensor, key: int = KEY) -> float:
    """The relative error, as a share of the norm."""
    return float((codec.encode(x, key).decode() - x).double().norm() / x.double().norm())


def check_unbiased(codec: Codec, x: Tensor, variance: Tensor, *, draws: int = 4000) -> None:
    """Check |mean - x| <= 5 sqrt(variance / draws) for each value, with the exact variance."""
    decoded = torch.stack([codec.encode(x, key).decode() for key in range(1, draws + 1)]).double()
    slack = 5 * (variance / draws).sqrt() + 1e-6 * x.abs().max()
    assert ((decoded.mean(dim=0) - x.double()).abs() <= slack).all()
    measured = (decoded - x.double()).square().sum(dim=tuple(range(1, decoded.ndim))).mean()
    assert measured == pytest.approx(float(variance.sum()), rel=0.15, abs=1e-9)
