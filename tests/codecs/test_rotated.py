"""Rotated: distortion as of Max's quantiser, kept values, constant rows, the row that all share, and odd widths."""

from __future__ import annotations

import pytest
import torch
from codec_laws import assert_alike, error_of
from codec_variants import normal, student

from raysim.codecs import Rotated
from raysim.codecs.rotated import TILE, factors, tiles_of


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.002499)])
def test_a_normal_row_is_sent_with_the_distortion_of_max(bits: int, distortion: float) -> None:
    assert error_of(Rotated(bits, kept=0), normal(60, 512)) ** 2 == pytest.approx(distortion, rel=0.02)


def test_massive_values_do_not_affect_others() -> None:
    x = normal(50, 576)
    x[:, [3, 70, 71]] = torch.tensor([27_392.0, -800.0, 512.0])
    packet = Rotated(4, kept=3).encode(x)
    error = packet.decode() - x
    assert not error[:, [3, 70, 71]].any()
    assert float(error.square().sum() / (50 * 573)) == pytest.approx(0.0095, rel=0.05)
    assert error_of(Rotated(4, kept=0), x) > 0.05


@pytest.mark.parametrize("width", [1, 64, 128, 576])
def test_a_constant_row_stays_nearly_constant(width: int) -> None:
    assert torch.allclose(Rotated(3, kept=0).encode(torch.full((2, width), 0.7)).decode(), torch.tensor(0.7), rtol=0.02)


def test_signs_spread_a_constant_tile_evenly() -> None:
    from raysim.codecs.hadamard import hadamard

    signs = torch.from_numpy(factors(TILE)).view(1, -1).double()
    assert torch.allclose(hadamard(signs).abs(), torch.tensor(1.0, dtype=torch.float64))


def test_common_row_costs_only_its_bytes() -> None:
    x, shared = normal(200, 128) / 8, (normal(128, seed=9) * 64).round()
    error = Rotated(3).encode(x + shared).decode() - (x + shared)
    plain = Rotated(3).encode(x).decode() - x
    assert float(error.norm()) < 1.1 * float(plain.norm())
    few = x[:63] + shared
    assert float((Rotated(3).encode(few).decode() - few).norm()) > 5 * float(plain[:63].norm())


def test_bits_of_the_tokens_of_a_transformer() -> None:
    packet = Rotated(4).encode(torch.zeros(8, 128, 576))
    assert 8 * packet.array_bytes / packet.numel == pytest.approx(4 + (16 + 7 * (16 + 10)) / 576 + 16 / 1024)
    assert Rotated(4).encode(torch.zeros(0, 576)).array_bytes == 0


def test_tiles_fill_any_width() -> None:
    assert [tiles_of(width) for width in (0, 1, 64, 172)] == [(), (1,), (64,), (64, 64, 32, 8, 4)]


@pytest.mark.parametrize("shape", [(130, 173), (3, 40, 64), (70, 1), (65, 700), (2, 3, 4, 63)], ids=str)
def test_kernels_across_tiles(shape: tuple[int, ...]) -> None:
    for notation in (Rotated(3), Rotated(4, kept=1), Rotated(5, kept=0)):
        assert_alike(notation, student(*shape))
        assert_alike(notation, (student(*shape) * 1e38).clamp(-3.4e38, 3.4e38))
        assert_alike(notation, (student(*shape).relu() * 3.3).bfloat16())
