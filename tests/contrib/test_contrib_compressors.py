"""Compressors of the plug-in raysim-contrib: the laws of compressors hold, and each is its paper's formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from codec_variants import normal
from compressor_laws import keeps_all_laws
from compressor_variants import Pair, bits_of, context, same_packet
from contrib_variants import CLASSES as ALL
from contrib_variants import COMPRESSORS
from pipelines import few_of_each
from raysim_contrib.residual_vq import ResidualVQ

from raysim.compressors import Compressor

CLASSES = [cls for cls in ALL.values() if issubclass(cls, Compressor)]
VECTORS = [variant for variant in COMPRESSORS if isinstance(variant.method, ResidualVQ)]


@pytest.mark.parametrize(
    "turn",
    few_of_each(range(len(COMPRESSORS)), 2, lambda turn: type(COMPRESSORS[turn].method)),
    ids=lambda turn: COMPRESSORS[turn].notation,
)
def test_all_laws(turn: int) -> None:
    keeps_all_laws(COMPRESSORS[turn], turn)


def test_every_class_has_a_variant() -> None:
    assert {type(variant.method) for variant in COMPRESSORS} == set(CLASSES)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ResidualVQ)])
def test_an_option_is_varied_and_changes_what_is_sent(field: str) -> None:
    methods = [variant.method for variant in VECTORS]
    values = {getattr(method, field) for method in methods}
    assert len(values) > 1
    for method in methods:
        for value in values - {getattr(method, field)}:
            one, other = Pair(method), Pair(dataclasses.replace(method, **{field: value}))  # type: ignore[type-var]
            sent = [
                [pair.send(normal(16, 40, seed=step), context(step))[0] for step in range(2)] for pair in (one, other)
            ]
            if not all(same_packet(a._replace(codec=b.codec), b) for a, b in zip(*sent, strict=True)):
                return
    pytest.fail(f"`{field}` changes nothing")


# Residual vector quantisation.


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).double().norm() / x.double().norm())


def test_the_codes_are_the_nearest_by_hand() -> None:
    method, x = ResidualVQ(bits=3, rounds=2, dim=2, fresh=0), normal(7, 3)  # 21 values: the last vector is filled up
    packet, _ = method.encode(x, {}, context(0))
    rest = torch.cat([x.view(-1).double(), torch.zeros(1, dtype=torch.float64)]).view(-1, 2)
    sent, found = torch.zeros_like(rest), []
    for book in method.codec.books.double():  # type: ignore[attr-defined]
        scale = (rest.square().sum() / 21).sqrt()
        places = [min(range(8), key=lambda k, r=r: float((r / scale - book[k]).norm())) for r in rest]  # type: ignore[misc]
        found += places
        sent, rest = sent + scale * book[places], rest - scale * book[places]
    bits = "".join(f"{place:03b}" for place in found)
    assert packet.arrays["codes"].tobytes() == bytes(
        int(bits[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(bits), 8)
    )
    received, _ = method.decode(packet, {}, context(0))
    torch.testing.assert_close(received, sent.view(-1)[:21].view(7, 3).float())


def test_fresh_codes_are_means_of_their_vectors_or_what_was_worst_coded() -> None:
    method = ResidualVQ(bits=2, rounds=1, dim=1, fresh=3, pace=0.5)
    pair, x = Pair(method), torch.tensor([[-3.0, 0.1, 0.2, 5.0, 5.2, 0.05]])
    start = method.codec.books[0, :, 0].double()  # type: ignore[attr-defined]
    values = x[0].double() / x.double().square().mean().sqrt().float().double()
    codes = (values[:, None] - start).abs().argmin(dim=1)
    expected = start.clone()
    errors = (values - start[codes]).abs()
    furthest = iter(errors.argsort(descending=True))
    used = [code for code in range(1, 4) if (codes == code).any()]
    assert 0 < len(used) < 3
    for code in method._turn({}, "cpu"):
        own = values[codes == code]
        expected[code] = (start[code] + own.mean()) / 2 if len(own) else values[next(furthest)]
    pair.send(x, context(0))
    learnt = pair.receiver.state[-1][0, :, 0]
    assert learnt[0] == 0
    assert bits_of(learnt[1:]) == bits_of(expected[1:].to(torch.bfloat16).float())


@pytest.mark.parametrize("fresh", [1, 3, 5, 7])
def test_every_code_except_zero_is_refreshed(fresh: int) -> None:
    method, pair, seen = ResidualVQ(bits=3, rounds=1, dim=2, fresh=fresh), Pair(ResidualVQ(3, 1, 2, fresh)), []
    for step in range(-(-7 // fresh)):
        seen += method._turn(pair.sender.state, "cpu").tolist()
        pair.send(normal(4, 6, seed=step), context(step))
    assert set(seen) == set(range(1, 8))


def test_every_round_learns_from_its_residual() -> None:
    """Five vectors of two values: means of what each code stands for, and the worst coded ones for codes that stand for none."""
    method, x = ResidualVQ(bits=3, rounds=2, dim=2, fresh=7, pace=0.25), normal(2, 5, seed=1)
    pair, rest = Pair(method), x.view(-1, 2).double()
    pair.send(x, context(0))
    for start, learnt in zip(method.codec.books.double(), pair.receiver.state[-1], strict=True):  # type: ignore[attr-defined]
        scale = (rest.square().sum() / 10).sqrt().float().double()
        vectors = rest / scale
        places = [min(range(8), key=lambda k, v=v: float((v - start[k]).norm())) for v in vectors]  # type: ignore[misc]
        worst = sorted(range(5), key=lambda i: -float((vectors[i] - start[places[i]]).norm()))
        unused = [code for code in method._turn({}, "cpu").tolist() if code not in places]
        assert len(unused) >= 2
        expected = {code: vectors[i] for code, i in zip(unused, worst, strict=False)}
        for code in {*places} - {0}:
            own = torch.stack([vector for vector, place in zip(vectors, places, strict=True) if place == code])
            expected[code] = 0.75 * start[code] + 0.25 * own.mean(dim=0)
        for code in range(8):
            assert bits_of(learnt[code]) == bits_of(expected.get(code, start[code]).to(torch.bfloat16).float())
        rest = rest - scale * start[places]


def test_a_message_of_zeros_teaches_nothing() -> None:
    method = ResidualVQ(bits=3, rounds=2, dim=2, fresh=7)
    pair = Pair(method)
    pair.send(torch.zeros(3, 4), context(0))
    assert bits_of(pair.receiver.state[-1]) == bits_of(method.codec.books.to(torch.bfloat16).float())  # type: ignore[attr-defined]


def test_the_first_codebooks_are_uniform_values_of_unit_variance() -> None:
    codes = ResidualVQ(bits=12, rounds=2, dim=16).codec.books[:, 1:].double()  # type: ignore[attr-defined]
    assert codes.abs().max() <= 3**0.5
    assert codes.mean().abs() < 0.02
    assert codes.square().mean() == pytest.approx(1, abs=0.02)


def test_code_refresh_order_is_redrawn() -> None:
    method, orders = ResidualVQ(bits=6, rounds=1, dim=1, fresh=63), []
    pair = Pair(method)
    for step in range(3):
        orders.append(method._turn(pair.sender.state, "cpu").tolist())
        pair.send(normal(4, 6, seed=step), context(step))
    assert all(sorted(order) == list(range(1, 64)) != order for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_more_rounds_err_less_and_none_adds_to_the_error() -> None:
    x = normal(64, 32, seed=3)
    errors = []
    for rounds in range(1, 7):
        method = ResidualVQ(bits=6, rounds=rounds, dim=4, fresh=0)
        errors.append(far(x, method.decode(method.encode(x, {}, context(0))[0], {}, context(0))[0]))
    for before, after in zip([1.0, *errors], errors, strict=False):  # 1.5 bits a value: at best by 2^-1.5 = 0.35
        assert 0.35 * before < after < before
    sparse = torch.zeros(1, 400)
    sparse[0, 7] = 1e4  # no code is near, and still the error is not above the tensor
    for value in (sparse, -sparse, torch.zeros(5, 5)):
        packet, _ = method.encode(value, {}, context(0))
        received = method.decode(packet, {}, context(0))[0]
        assert (received - value).norm() <= value.norm()


def test_codebooks_learn_the_messages_of_a_link() -> None:
    """Vectors from 40 clusters: a codebook of 64 codes that learns errs less than a quarter of one that does not."""
    centres = 3 * normal(40, 4, seed=5)
    errors = {}
    for fresh in (0, 16):
        pair = Pair(ResidualVQ(bits=6, rounds=1, dim=4, fresh=fresh))
        for step in range(60):
            chosen = torch.randint(40, (500,), generator=torch.Generator().manual_seed(step))
            x = (centres[chosen] + 0.05 * normal(500, 4, seed=step)).view(25, 80)
            errors[fresh] = far(x, pair.send(x, context(step))[1])
    assert errors[16] < 0.25 * errors[0]


def test_evaluations_are_coded_by_the_codebooks_as_they_are() -> None:
    pair, x = Pair(ResidualVQ(bits=4, rounds=2, dim=2, fresh=7)), normal(6, 8)
    for step in range(5):
        pair.send(normal(6, 8, seed=step), context(step))
    evaluated = pair.receiver.receive_evaluation(pair.sender.send_evaluation(x, "on", 0))
    assert bits_of(evaluated) == bits_of(pair.send(x, context(5))[1])


@pytest.mark.parametrize("shape", [(0,), (1,), (5, 3), (2, 7, 9), (2, 3, 4, 5), (3000, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_bytes_are_as_planned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (1e3 * normal(*shape)).to(dtype)
    for method in (variant.method for variant in VECTORS):
        packet, changes = method.encode(x, {}, context(0))
        assert packet.array_bytes == method.array_bytes(shape, str(dtype).removeprefix("torch."))
        received, learnt = method.decode(packet, {}, context(0))
        assert received.shape == x.shape
        assert received.dtype == dtype
        assert all(bits_of(changes[key]) == bits_of(learnt[key]) for key in changes)


def test_damaged_packets_are_refused() -> None:
    method = ResidualVQ(bits=4, rounds=2, dim=2, fresh=3)
    packet, _ = method.encode(normal(4, 4), {}, context(0))
    for name in packet.arrays:
        for array in (packet.arrays[name][:-1], packet.arrays[name] * 0 + 255):
            damaged = packet._replace(arrays={**packet.arrays, name: array})
            if name == "codes" and len(array) == len(packet.arrays[name]):
                assert torch.isfinite(method.decode(damaged, {}, context(0))[0]).all()
                continue
            with pytest.raises(ValueError, match=name):
                method.decode(damaged, {}, context(0))
