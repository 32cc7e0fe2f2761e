"""Bundles: the packets of several tensors, and exact tensors of integers and booleans, in one message.

header = count, count x packet, count, count x exact tensor
packet = name, length, header of the packet's message, number of its arrays
exact tensor = name, type, dimensions, sizes

The arrays follow in the same order. A single unnamed tensor is sent as a plain message, not as a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs.message import MAX_DIMENSIONS, Message, Reader, write_number, write_text
from raysim.on_demand import torch
from raysim.values import EXACT, UNNAMED, kind

if TYPE_CHECKING:
    from torch import Tensor


def bundle(messages: Mapping[str, Message], exact: Mapping[str, Tensor]) -> Message:
    """Join the messages of packets and exact tensors, by name, into one message."""
    if UNNAMED in messages:
        return messages[UNNAMED]
    header = bytearray()
    arrays: list[np.ndarray] = []
    write_number(header, len(messages))
    for name, (inner, *parts) in messages.items():
        write_text(header, name)
        write_number(header, len(inner))
        header += inner
        write_number(header, len(parts))
        arrays += parts
    write_number(header, len(exact))
    for name, x in exact.items():
        write_text(header, name)
        for number in (EXACT.index(kind(x)), x.ndim, *x.shape):
            write_number(header, number)
        data = x.detach().cpu().contiguous().numpy().reshape(-1)
        arrays.append(np.packbits(data) if data.dtype == np.bool_ else data.view(np.uint8))
    return (bytes(header), *arrays)


def unbundle(
    message: Message, max_values: int, device: torch.device | str = "cpu"
) -> tuple[dict[str, Message], dict[str, Tensor]]:
    """Split a message of `bundle` into its arguments; an exact tensor may have at most `max_values` values.

    Raises ValueError if the message is malformed.
    """
    header, *arrays = message
    reader = Reader(header)
    headers: dict[str, tuple[bytes, int]] = {}
    for _ in range(reader.number()):
        name = _new_name(reader, headers)
        headers[name] = reader.take(reader.number()), reader.number()
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for _ in range(reader.number()):
        name = _new_name(reader, {*headers, *described})
        number, ndim = reader.number(), reader.number()
        if number >= len(EXACT) or ndim > MAX_DIMENSIONS:
            raise ValueError(f"A tensor in a message must be of a known type and shape, but `{name}` is not.")
        shape = tuple(reader.number() for _ in range(ndim))
        if math.prod(shape) > max_values:
            raise ValueError(f"A tensor in a message must have at most {max_values} values, but `{name}` has {shape}.")
        described[name] = EXACT[number], shape
    reader.check_end()
    expected = sum(count for _, count in headers.values()) + len(described)
    if len(arrays) != expected:
        raise ValueError(f"A message must have {expected} arrays, but has {len(arrays)}.")
    rest = iter(arrays)
    messages: dict[str, Message] = {
        name: (inner, *(next(rest) for _ in range(count))) for name, (inner, count) in headers.items()
    }
    return messages, {name: _tensor(next(rest), name, *about).to(device) for name, about in described.items()}


def _new_name(reader: Reader, known: Collection[str]) -> str:
    name = reader.text()
    if name in known:
        raise ValueError(f"A message must hold each tensor once, but holds `{name}` twice.")
    return name


def _tensor(array: np.ndarray, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    values = math.prod(shape)
    expected = -(-values // 8) if kind == "bool" else values * np.dtype(kind).itemsize
    if array.dtype != np.uint8 or array.nbytes != expected:
        raise ValueError(f"`{name}` in a message must have {expected} bytes, but has {array.nbytes}.")
    data = np.unpackbits(array, count=values).astype(bool) if kind == "bool" else array.view(kind).copy()
    return torch.from_numpy(data).view(shape)
