"""Base of codecs with evenly spaced levels: a range for each group, rounding and packing, by kernels or by the torch reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels, transfers
from raysim.codecs.base import DTYPES, Codec, Key, NonFiniteError, Packet, cast_saturating, to_bytes, to_tensor
from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.layout import PER, Layout, check_block, layout_of
from raysim.codecs.random import uniform
from raysim.codecs.work import count_work
from raysim.notation import check_choice
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4096  # values; threads part a tensor at its multiples, as the kernels do


class UniformCodec(Codec):
    """Rounds (x - center) / step to a whole number, and sends it with the range of the group.

    Codes are computed in float64, so neither tiny nor huge ranges overflow.
    """

    bits: int
    per: str
    rounding: str
    block: int

    @property
    @abstractmethod
    def _absmax(self) -> bool:
        """True if the range is -a..a and the center zero; else it is least..greatest and the center the least."""

    @property
    @abstractmethod
    def _steps(self) -> int:
        """Steps from the center to the end of the range."""

    @property
    @abstractmethod
    def _center_code(self) -> int:
        """The code of the center."""

    @property
    @abstractmethod
    def _last_code(self) -> int:
        """The greatest code."""

    @property
    def random(self) -> bool:
        return self.rounding == "stochastic"

    def _check_groups(self) -> None:
        check_choice("per", self.per, PER)
        check_choice("rounding", self.rounding, ["nearest", "stochastic"])
        self._coerce(block=check_block(self.per, self.block))

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "high") if self._absmax else ("codes", "high", "low")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        layout = layout_of(tuple(x.shape), self.per, self.block)
        if layout.numel and kernels.serve(x):
            return self._encode_native(x.contiguous().float(), layout, key, None)
        if self._gpu_serves(x, layout):
            return self._encode_on_gpu(x.contiguous(), layout, key, None)
        low, high = self._ranges(x, layout)
        if layout.numel:
            wide = low.cpu().numpy(), high.cpu().numpy()
            self._widened(x, layout, *wide)
            low, high = (torch.from_numpy(end).to(x.device) for end in wide)
        if not torch.isfinite(low).all() or not torch.isfinite(high).all():
            raise self._not_finite()
        center, span = self._grid(low, high)
        scale = torch.where(span > 0, self._like(span) / span, 0.0)  # a constant group has one level: the center
        codes = (layout.view(x).double() - layout.spread(center)).mul_(layout.spread(scale))
        if key is not None and self.random:
            codes = layout.flat(codes).add_(uniform(key, x.numel(), x.device)).floor_()
        else:
            codes = layout.flat(codes.round_())
        codes.add_(self._center_code).clamp_(0, self._last_code)  # float64 input may pass its float32 range by a hair
        return self._arrays(to_bytes(pack(codes.to(torch.uint8), self.bits)), to_bytes(low), to_bytes(high))

    def encode_with_residual(
        self, x: Tensor, dtype: torch.dtype, key: Key | None = None, memory: Tensor | None = None
    ) -> tuple[Packet, Tensor]:
        layout = layout_of(tuple(x.shape), self.per, self.block)
        on_gpu = self._gpu_serves(x, layout)
        if not layout.numel or x.dtype != torch.float32 or dtype != torch.float32 or not (on_gpu or kernels.serve(x)):
            return super().encode_with_residual(x, dtype, key, memory)
        self._check(tuple(x.shape), key)
        x = x.detach().contiguous()
        count_work(2 * x.nbytes)  # encoded, and what it decodes to is withheld
        if on_gpu:
            residual = x if memory is None else torch.empty_like(x)
            arrays = self._encode_on_gpu(x, layout, key, residual, memory)
        else:
            residual = x if memory is None else torch.from_numpy(kernels.empty(x.numel(), np.float32)).view(x.shape)
            arrays = self._encode_native(x, layout, key, residual, memory)
        return Packet(self, arrays, tuple(x.shape), "float32"), residual

    def _encode_native(
        self, x: Tensor, layout: Layout, key: Key | None, residual: Tensor | None, memory: Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """Return the arrays of `x`. With `memory`, x + memory is written to `residual`; the decoded values are subtracted from it."""
        from raysim.codecs.kernels import uniform as native

        low, high = np.empty(layout.groups, np.float32), np.empty(layout.groups, np.float32)
        if memory is None or residual is None:
            self._find_ranges(kernels.bits_of(x), layout, low, high)
        else:
            self._add_and_find_ranges(x, memory.contiguous(), residual, layout, low, high)
            x = residual
        self._widened(x, layout, low, high)
        center, scale, step = np.empty((3, layout.groups))
        if not native.grid(low, high, self._absmax, self._steps, center, scale, step):
            raise self._not_finite()
        packed = kernels.empty(packed_bytes(layout.numel, self.bits), np.uint8)
        left = np.empty(0, np.float32) if residual is None else residual.view(-1).numpy()
        draw = np.uint64((key or 0) % 2**64)
        codes = self._center_code, self._last_code, self.bits, self.random, draw
        values, groups = x.view(-1).numpy(), (layout.groups, layout.inner, center, scale, step)

        def quantize(start: int, stop: int) -> None:
            out = packed[start * self.bits // 8 : packed_bytes(stop, self.bits)]
            native.quantize(values[start:stop], start, *groups, *codes, out, left[start:stop])

        kernels.in_parts(quantize, layout.numel, _BLOCK)
        return self._arrays(packed, low.view(np.uint8), high.view(np.uint8))

    def _gpu_serves(self, x: Tensor, layout: Layout) -> bool:
        """Return whether the kernels of GPUs make packets of `x`: not where a method has ranges of its own."""
        return layout.numel > 0 and type(self)._widened is UniformCodec._widened and kernels.gpu_serve(x)

    def _encode_on_gpu(
        self, x: Tensor, layout: Layout, key: Key | None, residual: Tensor | None, memory: Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """Return the arrays of `_encode_native`, for `x` on a GPU in any dtype but float64."""
        from raysim.codecs.kernels.triton import uniform as on_gpu

        held = None if memory is None else memory.contiguous()
        low, high = on_gpu.ranges(x, layout, held, residual if memory is not None else None)
        if memory is not None and residual is not None:
            x = residual
        levels, bad = on_gpu.grid(low, high, self._steps, self._absmax, ordered=True)
        packed = on_gpu.quantize(x, layout, levels, self._codes, (key or 0) if self.random else None, residual)
        transfers.check(bad, self._not_finite())
        return self._arrays(to_bytes(packed), to_bytes(low), to_bytes(high))

    @property
    def _codes(self) -> tuple[int, int, int]:
        """The code of the center, the greatest code, and the bits of a code."""
        return self._center_code, self._last_code, self.bits

    def _widened(self, x: Tensor, layout: Layout, low: np.ndarray, high: np.ndarray) -> None:
        """Replace the ends of the groups' ranges, float32, where a method's are not the least and greatest values."""

    def _find_ranges(self, bits: np.ndarray, layout: Layout, low: np.ndarray, high: np.ndarray) -> None:
        from raysim.codecs.kernels import uniform as native

        def find(start: int, stop: int) -> np.ndarray:
            ends = np.empty((2, layout.groups), np.float32)
            native.ranges(bits[start:stop], layout.groups, layout.inner, *ends.view(np.int32))
            return ends

        self._join_ranges(find, layout, low, high)

    def _add_and_find_ranges(
        self, x: Tensor, memory: Tensor, out: Tensor, layout: Layout, low: np.ndarray, high: np.ndarray
    ) -> None:
        """Write x + memory to `out`, and the ranges of that, in one pass."""
        from raysim.codecs.kernels import uniform as native

        values, held, total = (part.view(-1).numpy() for part in (x, memory, out))

        def find(start: int, stop: int) -> np.ndarray:
            ends = np.empty((2, layout.groups), np.float32)
            parts = kernels.opened(values)[start:stop], kernels.opened(held)[start:stop], total[start:stop]
            native.added_ranges(*parts, layout.groups, layout.inner, *ends.view(np.int32))
            return ends

        self._join_ranges(find, layout, low, high)

    def _join_ranges(
        self, find: Callable[[int, int], np.ndarray], layout: Layout, low: np.ndarray, high: np.ndarray
    ) -> None:
        parts = kernels.in_parts(find, layout.numel, _BLOCK) if layout.groups == 1 else [find(0, layout.numel)]
        found = np.stack(parts) if len(parts) > 1 else parts[0][None]
        low[:], high[:] = found[:, 0].min(axis=0), found[:, 1].max(axis=0)  # NaN in any is NaN in all

    def _arrays(self, codes: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, np.ndarray]:
        return {"codes": codes, "high": high} | ({"low": low} if not self._absmax else {})

    def _not_finite(self) -> NonFiniteError:
        return NonFiniteError(f"A tensor to send by {self!r} holds NaN or infinity.")

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        layout = layout_of(packet.shape, self.per, self.block)
        codes = packet.bytes_of("codes", packed_bytes(packet.numel, self.bits))
        high = packet.bytes_of("high", 4 * layout.groups)
        low = packet.bytes_of("low", 4 * layout.groups) if not self._absmax else high
        dtype = DTYPES[packet.dtype]
        if layout.numel and dtype != torch.float64 and kernels.serves(device):
            out = self._decode_native(codes, low, high, layout)
            return cast_saturating(out, dtype).view(packet.shape)
        if layout.numel and dtype != torch.float64 and kernels.gpu_serves(device, layout.numel):
            return self._decode_on_gpu(codes, low, high, layout, dtype, device).view(packet.shape)
        highs = to_tensor(high, torch.float32, device)
        center, span = self._grid(to_tensor(low, torch.float32, device), highs)
        unpacked = unpack(to_tensor(codes, torch.uint8, device), layout.numel, self.bits)
        if not torch.isfinite(span).all() or (span < 0).any() or (unpacked > self._last_code).any():
            raise self._out_of_bounds()
        step = span / self._like(span)
        values = (
            layout.view(unpacked - self._center_code).double().mul_(layout.spread(step)).add_(layout.spread(center))
        )
        # by way of float32, as the kernels go
        return cast_saturating(layout.flat(values if dtype == torch.float64 else values.float()), dtype).view(
            packet.shape
        )

    def _decode_native(self, codes: np.ndarray, low: np.ndarray, high: np.ndarray, layout: Layout) -> Tensor:
        from raysim.codecs.kernels import uniform as native

        center, scale, step = np.empty((3, layout.groups))
        high = high.copy().view(np.float32)
        low = low.copy().view(np.float32) if not self._absmax else -high
        limits = self._center_code, self._last_code, self.bits
        out = kernels.empty(layout.numel, np.float32)
        right = native.grid(low, high, self._absmax, self._steps, center, scale, step)
        data = kernels.opened(codes)

        def dequantize(start: int, stop: int) -> bool:
            part, groups = data[start * self.bits // 8 : packed_bytes(stop, self.bits)], (layout.groups, layout.inner)
            return bool(native.dequantize(part, start, *groups, center, step, *limits, out[start:stop]))

        if not right or not all(kernels.in_parts(dequantize, layout.numel, _BLOCK)):
            raise self._out_of_bounds()
        return torch.from_numpy(out)

    def _decode_on_gpu(
        self,
        codes: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        from raysim.codecs.kernels.triton import uniform as on_gpu

        least, greatest = (to_tensor(end, torch.int32, device) for end in (low, high))
        levels, bad = on_gpu.grid(least, greatest, self._steps, self._absmax, ordered=False)
        packed = to_tensor(codes, torch.uint8, device)
        out = on_gpu.dequantize(packed, layout, levels, self._codes, dtype, bad)
        transfers.check(bad, self._out_of_bounds())
        return out

    def _out_of_bounds(self) -> ValueError:
        return ValueError(f"A packet of {self!r} holds codes or ranges out of bounds.")

    def _ranges(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return least and greatest value of each group, flat float32 (absmax: -a and a); NaN and infinity pass through."""
        if not layout.numel:
            return torch.empty(0, device=x.device), torch.empty(0, device=x.device)
        viewed = layout.view(x)
        low, high = viewed.amin((0, 2)).float(), viewed.amax((0, 2)).float()
        if self._absmax:
            high = torch.maximum(low.abs(), high.abs())
            low = -high
        return low + 0.0, high + 0.0  # of the two zeros always the positive one

    def _like(self, span: Tensor) -> Tensor:
        """Return the number of steps as a tensor: divided by or into a plain number, torch multiplies by a reciprocal."""
        return torch.full_like(span, self._steps)

    def _grid(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the center of the grid (the least value, or zero) and its span up to the greatest, float64 a group."""
        low, high = low.double(), high.double()
        return (low, high - low) if not self._absmax else (torch.zeros_like(high), high)
