"""The fast Walsh-Hadamard transform in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from raysim.codecs.kernels.triton import blocks, launch

_VALUES = 4096  # values per program


@triton.jit
def _turn(x, out, held, count, factor, limit, TILES: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr):
    """Write the product of tiles, Sylvester's matrix and `factor`, in float64 and clamped to +-limit; x is zero-padded."""
    index = (tl.program_id(0) * TILES + tl.arange(0, TILES))[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(x + index, mask=index < held, other=0.0).to(tl.float64)
    for s in tl.static_range(LEVELS):
        pairs = tl.permute(tl.reshape(values, [TILES, TILE // (2 << s), 2, 1 << s]), (0, 1, 3, 2))
        left, right = tl.split(pairs)
        values = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2)), [TILES, TILE])
    bound = tl.load(limit)
    values = tl.minimum(tl.maximum(values * tl.load(factor), -bound), bound)
    tl.store(out + index, values.to(tl.float32), mask=index < count)


def turn(x: Tensor, tile: int, factor: float, limit: float, count: int) -> Tensor:
    """Transform the tiles of flat `x`, zero-padded; return `count` float32, scaled by `factor` and clamped to +-`limit`."""
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    numbers = [torch.full((1,), number, dtype=torch.float64, device=x.device) for number in (factor, limit)]
    tiles = max(1, _VALUES // tile)
    launch(
        _turn, blocks(count, tiles * tile), x, out, x.numel(), count, *numbers,
        TILES=tiles, TILE=tile, LEVELS=tile.bit_length() - 1,
    )  # fmt: skip
    return out
