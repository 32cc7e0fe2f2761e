"""`Packet` and `Codec`: a compressed tensor, and the stateless map that encodes and decodes it.

A packet's arrays are numpy, so Ray transfers them out of band and without a copy; it pickles torch tensors in band.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from raysim.codecs import kernels, transfers
from raysim.codecs.bits import packed_bytes, unpack_bytes
from raysim.notation import Notation
from raysim.on_demand import torch


class _Dtypes(Mapping[str, "torch.dtype"]):
    """The dtypes supported on links, by name, each looked up in torch on first use."""

    _NAMES = ("float32", "bfloat16", "float16", "float64")

    def __getitem__(self, name: str) -> torch.dtype:
        if name not in self._NAMES:
            raise KeyError(name)
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._NAMES)

    def __len__(self) -> int:
        return len(self._NAMES)


DTYPES = _Dtypes()

_MAX_VALUES = 2**31 - 1  # per packet: 8 GB in float32
Key = int  # a 64-bit random seed, see `raysim.codecs.draws`

_work = [0]


def count_work(num_bytes: int) -> None:
    """Count a pass of a codec over `num_bytes` bytes of dense tensors."""
    _work[0] += num_bytes


def work_bytes() -> int:
    """Return the bytes of dense tensors processed by codecs in this process so far; subtract two readings to measure work.

    Measured seconds vary between runs and do not transfer to other devices. These bytes do: divided by a device's speed
    they predict codec times there. Every pass counts: each encode and decode, a nested codec's pass over its input, a
    selection, and a product with a thin matrix. Copies (`Identity`) and sums are free.

    >>> from raysim.codecs import TopK
    >>> before = work_bytes()
    >>> packet = TopK(0.1).encode(torch.ones(1000))
    >>> work_bytes() - before
    4000
    """
    return _work[0]


class NonFiniteError(ValueError):
    """A tensor to encode contains NaN or infinity, which packets cannot represent."""


class Support(NamedTuple):
    """Positions in a sparse packet for a tensor of `shape`: flat indices, increasing in each row, shape (rows, kept)."""

    positions: torch.Tensor
    shape: tuple[int, ...]


class Packet(NamedTuple):
    """The result of encoding one tensor. It is self-describing, so sender and receiver cannot disagree about settings.

    >>> from raysim.codecs import TopK
    >>> packet = TopK(0.5).encode(torch.tensor([[3.0, -5.0, 1.0, 5.0]]))
    >>> packet.array_bytes, packet.dense_bytes  # two 4-byte values and a 1-byte bitmap
    (9, 16)
    >>> packet.decode()
    tensor([[ 0., -5.,  0.,  5.]])
    """

    codec: Codec
    arrays: dict[str, np.ndarray]  # flat, uint8
    shape: tuple[int, ...]
    dtype: str  # of the encoded tensor and of the result of `decode`

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays, without the header that a message adds; see `raysim.codecs.message`."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def numel(self) -> int:
        """Number of values of the encoded tensor."""
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the encoded tensor, in its own dtype."""
        return self.numel * DTYPES[self.dtype].itemsize

    def decode(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the decoded tensor, which may be a read-only view of the packet's memory.

        Raises ValueError before allocating memory if the arrays do not fit the shape or each other, or if the shape has more than
        `_MAX_VALUES` values.
        """
        if self.dtype not in DTYPES or any(size < 0 for size in self.shape):
            raise ValueError(f"A packet of {self.codec!r} cannot hold {self.dtype} of shape {self.shape}.")
        if math.prod(max(size, 1) for size in self.shape) > _MAX_VALUES:
            raise ValueError(f"A packet must hold at most {_MAX_VALUES} values, but has shape {self.shape}.")
        for name, array in self.arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iufb":
                kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise ValueError(f"A packet of {self.codec!r} must hold arrays of numbers, but `{name}` is {kind}.")
        transfers.land()  # the arrays may still be in transfer from the GPU
        x = self.codec.decode(self, device)
        if not self.codec.copies:
            count_work(x.nbytes)
        return x

    def bytes_of(self, name: str, num_bytes: int) -> np.ndarray:
        """Return the array `name` as bytes; raises ValueError if its size is not `num_bytes`."""
        array = self.arrays.get(name)
        if array is None or array.nbytes != num_bytes or not array.flags.c_contiguous:
            held = "none" if array is None else f"{array.nbytes}"
            raise ValueError(
                f"A packet of {self.codec!r} for shape {self.shape} needs {num_bytes} bytes of `{name}`, but got {held}."
            )
        return array.reshape(-1).view(np.uint8)

    def fields_of(self, name: str, count: int, width: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the array `name` unpacked into `count` integers of `width` bits; raises ValueError if its size differs."""
        return unpack_bytes(
            to_tensor(self.bytes_of(name, packed_bytes(count, width)), torch.uint8, device), count, width
        )

    def integer_of(self, name: str) -> int:
        """Return the integer that `integer_bytes` wrote to the array `name`; raises ValueError if it is malformed."""
        return int(self.bytes_of(name, 8).copy().view(np.int64)[0])

    def floats_of(self, name: str, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read `count` float32 values from the array `name` as float64; raises ValueError on a wrong size, NaN or infinity."""
        values = to_tensor(self.bytes_of(name, 4 * count), torch.float32, device)
        if not torch.isfinite(values).all():
            raise ValueError(f"A packet of {self.codec!r} holds `{name}` that are not finite.")
        return values.double()

    def part(self, name: str, codec: Codec, shape: tuple[int, ...]) -> Packet:
        """Return the packet of `codec` and `shape` that `nest` stored under `name.*`."""
        prefix = f"{name}."
        arrays = {key[len(prefix) :]: array for key, array in self.arrays.items() if key.startswith(prefix)}
        return Packet(codec, arrays, shape, self.dtype)


class Codec(Notation, ABC):
    """A stateless map tensor -> packet -> tensor: a frozen dataclass, equal and hashed by its settings."""

    copies: ClassVar[bool] = False  # whether packets are the tensor's memory unchanged, at no cost
    size_varies: ClassVar[bool] = False  # whether a packet's size depends on the tensor's values
    selects: ClassVar[bool] = False  # whether packets are sparse, with positions given by `support`

    # Capabilities of a codec. Methods query these instead of keeping lists of codecs.

    @property
    def random(self) -> bool:
        """True if `encode` draws random numbers and needs a key; by default, if a nested codec does."""
        return any(codec.random for codec in self._inner())

    @property
    def linear(self) -> bool:
        """True if packets with equal key and shape can be summed, as their floats are at the same positions."""
        return False

    @property
    def scales(self) -> bool:
        """True if selected values are scaled, so that the mean of decoded tensors over keys is the tensor."""
        return False

    @property
    def by_matrix(self) -> bool:
        """True if rows or columns are coded separately, so weights must be reshaped to (first axis, the rest)."""
        inner = getattr(self, "codec", None)
        return getattr(self, "per", None) in ("channel", "row") or (isinstance(inner, Codec) and inner.by_matrix)

    @property
    def whole_range(self) -> bool:
        """True if one range or scale covers a whole tensor, so that one outlier coarsens all other values."""
        return any(codec.whole_range for codec in self._inner())

    @property
    def kept_share(self) -> float | None:
        """The share of values sent in a packet; None if all are sent or the share depends on the values."""
        return None

    def relative_variance(self, numel: int) -> float | None:
        """Return a bound on E||C(x) - x||^2 / ||x||^2 for tensors of `numel` values; None for a biased codec.

        >>> from raysim.codecs import RandomK, TopK
        >>> [codec.relative_variance(1000) for codec in (RandomK(0.25, unbiased=True), TopK(0.1))]
        [3.0, None]
        """
        return None

    @property
    def expands(self) -> bool:
        """True if the error may exceed the tensor's norm, so that a residual grows; by default if `relative_variance` does."""
        variance = self.relative_variance(_MAX_VALUES)
        return variance is not None and variance >= 1

    def check_feedback(self) -> None:
        """Raise ValueError if this codec or a nested one `expands`, which rules out a memory of residuals or copies."""
        if self.expands:
            remedy = (
                "Leave `unbiased` out" if self.scales else "Use more bits or smaller blocks, or leave the memory out"
            )
            raise ValueError(
                f"`codec` of a memory must have an error below the tensor's norm, or the residual grows, but got {self!r}. {remedy}."
            )
        for codec in self._inner():
            codec.check_feedback()

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError if a setting has no effect on weights of these shapes, given by name."""

    def support(self, packet: Packet, device: torch.device | str = "cpu") -> Support:
        """Return the positions of the values in a packet, for a codec that `selects`."""
        raise TypeError(f"Only codecs that select values, such as TopK, have positions, but got {self!r}.")

    def rehearsed(self) -> tuple[Codec, ...]:
        """Return codecs that run all kernels of this one on as few as 192 values, to compile them in advance."""
        return (self, *(each for codec in self._inner() for each in codec.rehearsed()))

    @property
    def fixed_size(self) -> bool:
        """True if a packet's size depends only on shape and dtype, not on the values."""
        return not self.size_varies and all(codec.fixed_size for codec in self._inner())

    def _inner(self) -> Iterator[Codec]:
        """Yield the nested codecs."""
        return (value for value in vars(self).values() if isinstance(value, Codec))

    def encode(self, x: torch.Tensor, key: Key | None = None) -> Packet:
        """Return the packet of `x`, without modifying `x`.

        Raises NonFiniteError if `x` contains NaN or infinity, or float64 values beyond float32's range that the codec would
        send in float32; ValueError if a random codec gets no key. Every returned packet can be decoded.
        """
        dtype = dtype_name(x)
        self._check(tuple(x.shape), key)
        if not self.copies:
            count_work(x.nbytes)
        return Packet(self, self._encode(x.detach(), key), tuple(x.shape), dtype)

    def encode_with_residual(
        self, x: torch.Tensor, dtype: torch.dtype, key: Key | None = None, memory: torch.Tensor | None = None
    ) -> tuple[Packet, torch.Tensor]:
        """Return the packet of `x` in `dtype`, and the residual x - decode(packet) in the dtype of `x`.

        Overwrites `x`, as the residual may use its memory. With `memory` (float32, same shape), x + memory is sent, the
        residual is float32, and both inputs are left unchanged. Error feedback costs one additional pass over memory;
        codecs with a faster implementation override this, with bitwise equal results.
        """
        if memory is not None:
            x = kernels.added(memory, x)
        packet = self.encode(x.to(dtype), key)
        # not in place: a dense packet may share the memory of `x`
        return packet, (x.detach() - packet.decode(x.device)).to(x.dtype)

    @abstractmethod
    def array_names(self) -> tuple[str, ...]:
        """Return the names of all arrays that a packet may hold, in the order in which messages send them."""

    @abstractmethod
    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        """Return the arrays for `x`, whose dtype links support; raises NonFiniteError."""

    def _check(self, shape: tuple[int, ...], key: Key | None) -> None:
        """Raise ValueError if a tensor of `shape` is too large, or a random codec got no key."""
        if self.random and key is None:
            raise ValueError(f"{self!r} draws random numbers: `encode` needs a key.")

    @abstractmethod
    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        """Decode a packet of this codec; see `Packet.decode`."""


def check_is_codec(field: str, value: object) -> None:
    """Raise ValueError with the field and the value if `value` is not a codec."""
    if not isinstance(value, Codec):
        raise ValueError(f"`{field}` must be a codec, but got {value!r}.")


def nest(name: str, packet: Packet) -> dict[str, np.ndarray]:
    """Return the arrays of a packet under `name.*`, to be carried inside another packet."""
    return {f"{name}.{key}": array for key, array in packet.arrays.items()}


def nested_names(name: str, codec: Codec) -> tuple[str, ...]:
    """Return the array names of a codec's packets nested under `name`."""
    return tuple(f"{name}.{key}" for key in codec.array_names())


def dtype_name(x: torch.Tensor) -> str:
    """Return the name of the dtype of `x`; raises ValueError if links do not support it."""
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"A link carries {', '.join(DTYPES)}, but got a tensor of {x.dtype}.")
    return name


def to_bytes(x: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor as a flat uint8 array; a view if `x` is contiguous and in host memory.

    Bytes of a GPU tensor are valid once the open flight has landed, see `raysim.codecs.transfers`.
    """
    if not x.numel():
        return np.empty(0, np.uint8)
    return transfers.to_host(x.detach().contiguous().reshape(-1).view(torch.uint8)).numpy()


def to_tensor(data: np.ndarray, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a flat tensor over the bytes of `data`: on the CPU a view, read-only if `data` is."""
    if data.size == 0:  # an empty byte array cannot be viewed as a wider dtype
        return torch.empty(0, dtype=dtype, device=device)
    # arrays from the object store are read-only, but decoding never writes to them
    return transfers.to_device(torch.from_numpy(kernels.opened(data)), device).view(dtype)


def integer_bytes(number: int) -> np.ndarray:
    """Return an integer below 2^63 as 8 bytes."""
    return np.array([number], dtype=np.int64).view(np.uint8)


def check_finite(x: torch.Tensor) -> None:
    """Raise NonFiniteError if `x` contains NaN or infinity, in one pass without a copy."""
    if not x.numel():
        return
    ends, error = torch.aminmax(x), NonFiniteError("A tensor to send holds NaN or infinity.")
    if not kernels.serves(x.device):
        transfers.check(~torch.isfinite(torch.stack(ends)), error)
    elif not all(math.isfinite(end.item()) for end in ends):
        raise error


def cast_float64(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast float64 `x` to `dtype` with saturation; 16-bit types are rounded via float32, as in the kernels."""
    return cast_saturating(x if dtype == torch.float64 else cast_saturating(x, torch.float32), dtype)


def cast_saturating(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `x` to `dtype`, rounding to nearest even; values beyond its range saturate, so finite values stay finite."""
    limit = torch.finfo(dtype).max
    narrower = x.numel() and limit < torch.finfo(x.dtype).max
    # on a GPU, clamping costs less than checking whether it is needed
    if narrower and (not kernels.serves(x.device) or float(torch.stack(torch.aminmax(x)).abs().amax()) > limit):
        x = x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-limit, limit)  # bfloat16 cannot represent 65504
    if x.dtype == dtype or x.device.type != "cpu" or not x.numel():
        return x.to(dtype)
    out = torch.from_numpy(kernels.empty(x.numel() * dtype.itemsize, np.uint8)).view(dtype).view(x.shape)
    return out.copy_(x)
