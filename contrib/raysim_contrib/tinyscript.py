"""TinyScript: random rounding to the levels of least variance for a fitted Weibull distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs.bits import pack
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes
from raysim.codecs.draws import uniform
from raysim.codecs.fitted import bucket_of
from raysim.codecs.groups import total
from raysim.notation import check_integer
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_SHAPES = np.geomspace(0.25, 8, 64)  # of the Weibull distributions that can be fitted
_SWEEPS = 50


@dataclass(frozen=True, repr=False)
class TinyScript(Codec):
    """Rounds magnitudes at random to a neighbouring level, with mean x (TinyScript, Fu et al. 2020, ICML).

    |x| is modelled as Weibull with the moments of the tensor (our reading). Levels l_0 = 0 to l_K, the greatest magnitude,
    K = 2^(bits-1) - 1, minimise the variance sum E[(|x| - l_i)(l_(i+1) - |x|)], by 50 sweeps. A value takes `bits` bits, one of them
    its sign, and a tensor 12 bytes more, from which the receiver computes the same levels.

    Use: Unbiased rounding for heavy-tailed values.

    >>> packet = TinyScript(3).encode(torch.tensor([0.0, 0.5, -4.0, 0.25]), key=1)
    >>> packet.decode()[[0, 2]], packet.array_bytes
    (tensor([ 0., -4.]), 14)
    """

    variants: ClassVar[tuple[str, ...]] = ("TinyScript(4)",)

    bits: int

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, 2, 8))

    @property
    def random(self) -> bool:
        return True

    @property
    def expands(self) -> bool:
        return self.bits == 2

    @property
    def _count(self) -> int:
        return 1 << (self.bits - 1)

    def levels(self, x: Tensor) -> Tensor:
        """Return the levels of a tensor, float32 and not decreasing, which cover all its magnitudes."""
        return self._levels_of(self._fit(x))

    def _fit(self, x: Tensor) -> np.ndarray:
        """Return shape and scale of the distribution, and the greatest magnitude, float32; zeros for a tensor of zeros."""
        greatest = float(torch.stack(torch.aminmax(x)).abs().amax())
        if not greatest:
            return np.zeros(3, np.float32)
        mean, squares = (total(x, of) / x.numel() for of in ("magnitudes", "squares"))
        shape = _shape_of(squares / mean / mean)
        scale = mean / math.gamma(1 + 1 / _SHAPES[shape])
        limits = np.finfo(np.float32)
        greatest = min(greatest, float(limits.max))
        # rounding a float64 down to float32 would leave the greatest value out
        last = (
            np.float32(greatest)
            if np.float32(greatest) >= greatest
            else np.nextafter(np.float32(greatest), np.float32(np.inf))
        )
        sent = [
            _SHAPES[shape],
            min(max(scale, float(limits.smallest_subnormal)), float(limits.max)),
            min(last, limits.max),
        ]
        return np.array(sent, np.float32)

    def _levels_of(self, fit: np.ndarray) -> Tensor:
        """Return the levels of a fitted distribution, float32."""
        if not fit[2]:
            return torch.zeros(self._count)
        shape, scale, greatest = (float(value) for value in fit)
        reach = round(16 * math.log2(greatest / scale))  # in sixteenths of a doubling
        levels = scale * _unit_levels(self._count, int(np.abs(np.log(_SHAPES / shape)).argmin()), reach)
        levels[-1] = greatest
        return torch.from_numpy(np.minimum(levels, greatest).astype(np.float32))

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "fit")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        if not x.numel():
            return {"codes": np.empty(0, np.uint8), "fit": np.empty(0, np.uint8)}
        fit = self._fit(x)
        flat, levels = x.reshape(-1), self._levels_of(fit)
        wide, magnitudes = levels.double().to(x.device), flat.double().abs()
        below = bucket_of(magnitudes, wide[1:]).long()
        above = (below + 1).clamp_max(self._count - 1)
        up = uniform(key or 0, len(flat), x.device) * (wide[above] - wide[below]) < magnitudes - wide[below]
        codes = torch.where(up, above, below) + self._count * (flat < 0)
        return {"codes": to_bytes(pack(codes.to(torch.uint8), self.bits)), "fit": fit.view(np.uint8)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        codes = packet.fields_of("codes", packet.numel, self.bits, device)
        fit = packet.floats_of("fit", 3 if packet.numel else 0, "cpu")
        dtype = DTYPES[packet.dtype]
        if not packet.numel:
            return torch.empty(packet.shape, dtype=dtype, device=device)
        if fit[2] and not (fit > 0).all():
            raise ValueError(f"A packet of {self!r} holds a distribution with scales that are not positive.")
        levels = self._levels_of(fit.float().numpy()).double().to(device)
        table = torch.cat([levels, 0.0 - levels])
        return cast_saturating(table[codes.long()], dtype).view(packet.shape)


def _shape_of(ratio: float) -> int:
    """Return the index of the shape in `_SHAPES` whose E[x^2]/E[x]^2 is nearest to `ratio`, which falls with the shape."""
    ratios = [math.exp(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)) for shape in _SHAPES]
    return int(np.abs(np.log(ratios) - math.log(max(ratio, 1.0))).argmin())


@lru_cache(maxsize=4096)
def _unit_levels(count: int, shape_index: int, reach: int) -> np.ndarray:
    """Return `count` levels from 0 to 2^(reach/16) for magnitudes of a Weibull distribution of scale 1."""
    shape = float(_SHAPES[shape_index])
    levels = np.linspace(0, 2 ** (reach / 16), count)
    for _ in range(_SWEEPS):
        for first in (1, 2):  # every other level, given those between
            middle = np.arange(first, count - 1, 2)
            if not len(middle):
                continue
            low, high = levels[middle - 1], levels[middle + 1]
            share = _share(high, shape), _share(low, shape)
            mean = _partial_mean(high, shape) - _partial_mean(low, shape)
            wanted = (high * share[0] - low * share[1] - mean) / np.maximum(high - low, 1e-300)
            best = (-np.log1p(-np.clip(wanted, 0, 1 - 1e-16))) ** (1 / shape)
            levels[middle] = np.clip(best, low, high)
    levels.flags.writeable = False
    return levels


def _share(t: np.ndarray, shape: float) -> np.ndarray:
    """Return P(x < t)."""
    return -np.expm1(-(t**shape))


def _partial_mean(t: np.ndarray, shape: float) -> np.ndarray:
    """Return E[x; x < t]."""
    order = torch.full((len(t),), 1 + 1 / shape, dtype=torch.float64)
    lower: np.ndarray = torch.special.gammainc(order, torch.from_numpy(t**shape)).numpy()
    return math.gamma(1 + 1 / shape) * lower
