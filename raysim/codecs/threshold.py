"""Codecs that keep all values above a threshold, which is zero, given or estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs.codec import Codec, Key, Packet, check_finite, check_is_codec, integer_bytes, nest, nested_names
from raysim.codecs.draws import bits64
from raysim.codecs.floats import Identity
from raysim.codecs.groups import total
from raysim.codecs.positions import (
    INDEX_ARRAYS,
    count_at_least,
    encode_positions,
    expand,
    kept_of,
    select_at_least,
    select_topk,
    select_with_values,
    smallest_form,
)
from raysim.codecs.sparse import TopK
from raysim.notation import check_choice, check_real
from raysim.on_demand import torch

STAGES = 30  # most thresholds tried by SIDCo: a tensor whose mean is 1,000 times its deviation takes 16


class Counted(Codec):
    """Base of codecs whose packets store the number of kept values (8 bytes) and their positions."""

    size_varies: ClassVar[bool] = True

    values: Codec

    def rehearsed(self) -> tuple[Codec, ...]:
        return (self, *TopK(0.5).rehearsed())  # for positions in each form

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("values", self.values), "count", *INDEX_ARRAYS)

    def arrays_of(
        self, positions: torch.Tensor, kept: torch.Tensor, numel: int, key: Key | None
    ) -> dict[str, np.ndarray]:
        """Return a packet's arrays for the values `kept` at flat increasing `positions` of a tensor of `numel` values."""
        arrays = nest("values", self.values.encode(kept, key)) | {"count": integer_bytes(len(positions))}
        return arrays | encode_positions(positions, numel, smallest_form(len(positions), numel))

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        kept = packet.integer_of("count")
        if not 0 <= kept <= packet.numel:
            raise ValueError(f"A packet of {self!r} holds {kept} of {packet.numel} values.")
        values = packet.part("values", self.values, (kept,)).decode(device)
        return expand(packet, values).view(packet.shape)


@dataclass(frozen=True, repr=False)
class Nonzero(Counted):
    """Sends all non-zero values and their positions: lossless if the codec `values` is.

    Shrinks sparse tensors, such as activations after ReLU. The count is sent in 8 bytes.

    >>> packet = Nonzero().encode(torch.tensor([0.0, 2.0, 0.0, 0.0]))
    >>> packet.decode(), packet.array_bytes
    (tensor([0., 2., 0., 0.]), 13)
    """

    values: Codec = Identity()  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        check_is_codec("values", self.values)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        positions, kept = select_at_least(x.contiguous().view(-1), 0.0)  # NaN is non-zero: `values` detects it
        return self.arrays_of(positions, kept, x.numel(), key)


@dataclass(frozen=True, repr=False)
class EstimatedTopK(Counted):
    """Keeps about the share `density`: all values above an estimated threshold, as published methods do for speed.

    The largest value is kept if none passes. `policy` names the estimate, for a = |x| and a target of k values of the whole tensor:
    "sampled"      DGC (Lin et al. 2018, 1712.01887): a quantile of a random 1 % (at least 4,096 values), corrected to 0.8 k to 1.3 k
    "bisect"       RedSync (Fang et al. 2019, 1808.04357): bisection between mean and maximum, at most 20 probes, until k to 2k pass
    "gaussian"     GaussianK (Shi et al. 2019, 1911.08772): a normal's quantile, of the tensor's mean and deviation; three corrections
    "exponential"  SIDCo (M Abdelmoniem et al. 2021, 2101.10761): -mean(a) ln(density), then the same of what exceeds the last
                   threshold, each stage to a quarter, until 0.8 k to 1.2 k pass (a stage that is too high is halved: ours)

    >>> EstimatedTopK(0.25, "exponential").encode(torch.tensor([1.0, -2.0, 9.0, 0.0])).decode()
    tensor([0., 0., 9., 0.])
    """

    density: float
    policy: str
    values: Codec = Identity()  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_choice("policy", self.policy, ["sampled", "bisect", "gaussian", "exponential"])
        check_is_codec("values", self.values)

    @property
    def random(self) -> bool:
        return self.policy == "sampled" or super().random

    @property
    def kept_share(self) -> float:
        return self.density

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        flat = x.contiguous().view(-1)
        positions, kept = self.select(flat, key)
        return self.arrays_of(positions, kept, len(flat), key)

    def select(self, x: torch.Tensor, key: Key | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the increasing positions and the kept values of flat `x`."""
        if not x.numel():
            return torch.empty(0, dtype=torch.int64), x
        check_finite(x)
        wanted = kept_of(self.density, len(x))
        estimates = {
            "sampled": self._sampled,
            "bisect": self._bisect,
            "gaussian": self._gaussian,
            "exponential": self._exponential,
        }
        tau, most = estimates[self.policy](x, wanted, key or 0)
        positions, kept = select_at_least(x, tau)
        if len(positions) > most:
            chosen, kept = select_with_values(kept.view(1, -1), most)
            positions = positions[chosen]
        return (positions, kept) if len(positions) else select_with_values(x.view(1, -1), 1)

    def _sampled(self, x: torch.Tensor, wanted: int, key: Key) -> tuple[float, int]:
        size = min(len(x), max(4096, len(x) // 100))
        drawn = x if size == len(x) else x[(bits64(key, size, x.device) & (2**62 - 1)) % len(x)]
        rank = max(1, round(size * wanted / len(x)))
        tau = float(drawn[select_topk(drawn.view(1, -1), rank)].abs().amin())
        for _ in range(10):
            if count_at_least(x, tau) >= 0.8 * wanted:
                break
            tau *= 0.8
        return tau, wanted if count_at_least(x, tau) > 1.3 * wanted else len(x)

    def _bisect(self, x: torch.Tensor, wanted: int, key: Key) -> tuple[float, int]:
        mean, greatest = total(x, "magnitudes") / len(x), float(torch.stack(torch.aminmax(x)).abs().amax())
        low, high, tau = 0.0, 1.0, mean
        for _ in range(20):
            share = (low + high) / 2
            tau = mean + share * (greatest - mean)
            passing = count_at_least(x, tau)
            if wanted <= passing <= 2 * wanted:
                break
            low, high = (low, share) if passing < wanted else (share, high)
        return tau, 2 * wanted

    def _gaussian(self, x: torch.Tensor, wanted: int, key: Key) -> tuple[float, int]:
        mean = min(abs(total(x, "sum")) / len(x), 1e150)  # whose square is finite
        variance = total(x, "squares") / len(x) - mean**2
        tau = _quantile_of_magnitudes(self.density, mean, math.sqrt(min(max(variance, 5e-324), 1e300)))
        for _ in range(3):
            passing = count_at_least(x, tau)
            if 2 * wanted / 3 <= passing <= 4 * wanted / 3:
                break
            tau += abs(tau - mean) * (-0.5 if passing < wanted else 0.5)
        return tau, len(x)

    def _exponential(self, x: torch.Tensor, wanted: int, key: Key) -> tuple[float, int]:
        if count_at_least(x, 0.0) <= wanted:
            return 0.0, wanted
        low, above = 0.0, x  # the values that the last stage kept
        tau = -total(x, "magnitudes") / len(x) * math.log(self.density)
        for _ in range(STAGES):
            _, kept = select_at_least(above, tau)
            if 0.8 * wanted <= len(kept) <= 1.2 * wanted:
                return tau, len(x)
            if len(kept) < wanted:
                tau = (low + tau) / 2
            else:
                low, above = tau, kept
                tau += (total(kept, "magnitudes") / len(kept) - tau) * math.log(min(len(kept) / wanted, 4))
        return low, wanted


def _quantile_of_magnitudes(share: float, mean: float, deviation: float) -> float:
    """Return the threshold that the share `share` of a normal's magnitudes reaches; `deviation` is above zero."""
    low, high, unit = 0.0, mean + 40 * deviation, deviation * math.sqrt(2)
    for _ in range(64):
        tau = (low + high) / 2
        if math.erfc((tau - mean) / unit) + math.erfc((tau + mean) / unit) > 2 * share:
            low = tau
        else:
            high = tau
    return low
