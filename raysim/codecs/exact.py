"""Messages that carry tensors of integers and booleans beside a packet, see `raysim.values`; they are sent as they are.

header = length, header of the packet, number of its arrays, its name, count, count x (name, type, dimensions, sizes)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs.message import MAX_DIMENSIONS, Message, Reader, write_number, write_text
from raysim.on_demand import torch
from raysim.values import EXACT

if TYPE_CHECKING:
    from torch import Tensor


def attach(message: Message, name: str, beside: Mapping[str, Tensor]) -> Message:
    """Return the message of a packet, of the tensor `name`, with the tensors beside it; the message itself without a name."""
    if not name:
        return message
    header = bytearray()
    write_number(header, len(message[0]))
    header += message[0]
    write_number(header, len(message) - 1)
    write_text(header, name)
    write_number(header, len(beside))
    arrays = list(message[1:])
    for other, x in beside.items():
        write_text(header, other)
        for number in (EXACT.index(str(x.dtype).removeprefix("torch.")), x.ndim, *x.shape):
            write_number(header, number)
        data = x.detach().cpu().contiguous().numpy().reshape(-1)
        arrays.append(np.packbits(data) if data.dtype == np.bool_ else data.view(np.uint8))
    return (bytes(header), *arrays)


def detach(
    message: Message, max_values: int, device: torch.device | str = "cpu"
) -> tuple[Message, str, dict[str, Tensor]]:
    """Return the arguments of `attach`; a tensor beside the packet may have at most `max_values` values.

    Raises ValueError where the message is malformed.
    """
    header, *arrays = message
    reader = Reader(header)
    inner = reader.take(reader.number())
    count, name = reader.number(), reader.text()
    described = []
    for _ in range(reader.number()):
        other, kind, ndim = reader.text(), reader.number(), reader.number()
        if kind >= len(EXACT) or ndim > MAX_DIMENSIONS:
            raise ValueError(f"A tensor in a message must be of a known type and shape, but `{other}` is not.")
        shape = tuple(reader.number() for _ in range(ndim))
        if math.prod(shape) > max_values:
            raise ValueError(f"A tensor in a message must have at most {max_values} values, but `{other}` has {shape}.")
        described.append((other, EXACT[kind], shape))
    reader.check_end()
    if len(arrays) != count + len(described):
        raise ValueError(f"A message must have {count + len(described)} arrays, but has {len(arrays)}.")
    found = {
        other: _tensor(array, other, kind, shape).to(device)
        for array, (other, kind, shape) in zip(arrays[count:], described, strict=True)
    }
    return (inner, *arrays[:count]), name, found


def _tensor(array: np.ndarray, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    values = math.prod(shape)
    expected = -(-values // 8) if kind == "bool" else values * np.dtype(kind).itemsize
    if array.dtype != np.uint8 or array.nbytes != expected:
        raise ValueError(f"`{name}` in a message must have {expected} bytes, but has {array.nbytes}.")
    data = np.unpackbits(array, count=values).astype(bool) if kind == "bool" else array.view(kind).copy()
    return torch.from_numpy(data).view(shape)
