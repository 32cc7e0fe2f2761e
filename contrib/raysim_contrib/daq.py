"""DAQ: uniform levels around the mean of each feature map, scaled by its deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import Identity, Quantize
from raysim.codecs.bits import pack
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    Packet,
    cast_float64,
    cast_saturating,
    check_finite,
    nest,
    nested_names,
    to_bytes,
)
from raysim.codecs.groups import Layout, channel_axis, group_sums
from raysim.notation import check_integer
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

# the best uniform step for a normal distribution of deviation 1, for 1 to 8 bits
_STEPS = (1.596, 0.996, 0.586, 0.335, 0.188, 0.104, 0.057, 0.031)


@dataclass(frozen=True, repr=False)
class DAQ(Codec):
    """Rounds to 2**bits levels, D apart, around the mean m of each channel of each sample (Hong et al. 2022, WACV, "DAQ").

    D is the best step for a normal distribution times the deviation s of the group. x is decoded to
    m + (round((x - m)/D + 1/2) - 1/2) D, clipped to m +- (2^(b-1) - 1/2) D. m and s take 8 bytes a group; `deviation_bits` 4 or 8
    quantises s over the channels of a sample. For vectors a group is a sample. The published code takes the step of one bit less,
    and does not clip after a ReLU.

    Use: Few bits for convolutional features with different channels.

    >>> DAQ(1).encode(torch.tensor([[1.0, -1.0, 1.0, -1.0]])).decode()
    tensor([[ 0.7980, -0.7980,  0.7980, -0.7980]])
    """

    variants: ClassVar[tuple[str, ...]] = ("DAQ(4)",)

    bits: int
    deviation_bits: int | None = None

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, 1, 8))
        if self.deviation_bits not in (None, 4, 8):
            raise ValueError(f"`deviation_bits` must be 4, 8 or None, but got {self.deviation_bits!r}.")

    @property
    def _deviations(self) -> Codec:
        return Identity() if self.deviation_bits is None else Quantize(self.deviation_bits, per="sample")

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "means", *nested_names("deviations", self._deviations))

    def _groups(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of samples, and of groups in each."""
        return (shape[0] if shape else 1), (shape[channel_axis(shape)] if len(shape) > 2 else 1)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        samples, channels = self._groups(tuple(x.shape))
        if not x.numel():
            return {"codes": np.empty(0, np.uint8), "means": np.empty(0, np.uint8)}
        x = (x.movedim(channel_axis(tuple(x.shape)), 1) if x.ndim > 2 else x).contiguous()
        groups, size = samples * channels, x.numel() // (samples * channels)
        layout = Layout(x.numel(), groups, size)
        means = cast_saturating(group_sums(x, layout, "sum") / size, torch.float32)
        means += 0.0  # -0.0 becomes 0.0
        halves = ((x.view(groups, size).double() - means.double()[:, None]) / 2).float()  # halves stay within float32
        deviations = (4 * group_sums(halves, layout, "squares") / size).sqrt()
        sent = self._deviations.encode(cast_saturating(deviations, torch.float32).view(samples, channels))
        center, step = self._grid(means.double(), sent.decode(x.device).reshape(-1).double())
        scale = torch.where(step > 0, 1 / step, 0.0)
        last = (1 << self.bits) - 1
        rounded = (x.view(groups, size).double() - center[:, None]).mul_(scale[:, None]).round_().clamp_(0, last)
        codes = to_bytes(pack(rounded.to(torch.uint8).view(-1), self.bits))
        return {"codes": codes, "means": to_bytes(means), **nest("deviations", sent)}

    def _grid(self, means: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest level of each group and the step between its levels, float64."""
        step = _STEPS[self.bits - 1] * deviations
        return means - (2.0 ** (self.bits - 1) - 0.5) * step, step

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        shape, dtype = packet.shape, DTYPES[packet.dtype]
        samples, channels = self._groups(shape)
        codes = packet.fields_of("codes", packet.numel, self.bits, device)
        means = packet.floats_of("means", samples * channels if packet.numel else 0, device)
        if not packet.numel:
            return torch.empty(shape, dtype=dtype, device=device)
        part = packet.part("deviations", self._deviations, (samples, channels))._replace(dtype="float32")
        deviations = part.decode(device).reshape(-1).double()
        if not torch.isfinite(deviations).all():
            raise ValueError(f"A packet of {self!r} holds deviations that are not finite.")
        groups, size = samples * channels, packet.numel // (samples * channels)
        center, step = self._grid(means, deviations)
        values = codes.view(groups, size).double().mul_(step[:, None]).add_(center[:, None])
        values = cast_float64(values.view(-1), dtype)
        if len(shape) <= 2:
            return values.view(shape)
        axis = channel_axis(shape)
        first = (shape[0], shape[axis], *(size for i, size in enumerate(shape) if i not in (0, axis)))
        return values.view(first).movedim(1, axis).contiguous()
