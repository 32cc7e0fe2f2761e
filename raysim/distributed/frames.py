"""Frames: messages in float32 tensors of a fixed size, as `torch.distributed.pipelining` sends between stages.

    frame   = magic, check, setting, number, bytes of the header, number of arrays, bytes of each array, header, arrays, zeros
    check   = CRC-32 of everything between it and the zeros

All integers are little endian. `setting` identifies the compressors of the boundary, which must be the same at both ends;
`number` counts the messages of the boundary.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raysim.codecs.message import Message
from raysim.compressors import Compressor

_MAGIC = b"rsim"
_HEAD = struct.Struct("<4sIIIHH")
_CHECKED_FROM = 8  # after magic and check
_LENGTH = struct.Struct("<Q")
_HEADER_BYTES = 64  # upper bound for a message's header, with dimensions and lengths
_WORD = 4


class FrameError(RuntimeError):
    """A tensor does not hold the expected packet."""


class Frame(NamedTuple):
    """The content of a frame."""

    message: Message
    setting: int
    number: int


def frame_words(field: str, method: Compressor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the frame size, in float32 words, for any message of a compressor for tensors of `shape` and `dtype`.

    Raises ValueError if the packet size depends on the values or the step.
    """
    arrays = method.array_bytes(shape, str(dtype).removeprefix("torch."))
    if arrays is None:
        raise ValueError(
            f"`{field}` cannot be {method!r} between stages of torch.distributed.pipelining, which carries tensors of a fixed "
            "size: its packets have no bound below the dense tensor. Use a codec whose packets have one size, such as TopK or "
            "Quantize."
        )
    count = max(len(entry.names) for entry in method.table.entries)
    return -(-(_HEAD.size + _LENGTH.size * count + _HEADER_BYTES + arrays) // _WORD)


def setting_of(*parts: object) -> int:
    """Hash the settings that must be the same at both ends of a boundary."""
    return zlib.crc32(repr(parts).encode())


def write_frame(frame: Frame, words: int, device: torch.device) -> Tensor:
    """Write a message to a flat float32 tensor of `words`; raises FrameError if the message is too long."""
    header, *arrays = frame.message
    start = _HEAD.size + _LENGTH.size * len(arrays)
    end = start + len(header) + sum(array.nbytes for array in arrays)
    if end > words * _WORD:
        raise FrameError(f"A message must fit into a frame of {words * _WORD} bytes, but takes {end}.")
    data = np.zeros(words * _WORD, np.uint8)
    lengths = b"".join(_LENGTH.pack(array.nbytes) for array in arrays)
    head = _HEAD.pack(_MAGIC, 0, frame.setting, frame.number & 0xFFFFFFFF, len(header), len(arrays))
    np.concatenate([np.frombuffer(head + lengths + header, np.uint8), *arrays], out=data[:end])
    data[4:8] = np.frombuffer(struct.pack("<I", zlib.crc32(data[_CHECKED_FROM:end].data)), np.uint8)
    return torch.from_numpy(data).view(torch.float32).to(device)


def read_frame(tensor: Tensor) -> Frame:
    """Return the frame in a tensor of `write_frame`, with copies of its arrays.

    Raises FrameError if it holds no packet, or its bytes are corrupted.
    """
    if tensor.dtype != torch.float32:
        raise FrameError(
            f"A packet must arrive as it was sent, in float32, but arrives in {str(tensor.dtype).removeprefix('torch.')}: "
            "something casts the inputs of the stage. With FSDP set `cast_forward_inputs=False`."
        )
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()
    changed = FrameError(
        "A packet must arrive as it was sent, but its check word does not fit: something casts or changes the inputs of the "
        "stage. With FSDP set `cast_forward_inputs=False`."
    )
    if len(data) < _HEAD.size:
        raise changed
    magic, check, setting, number, header_bytes, count = _HEAD.unpack_from(data.data)
    start = _HEAD.size + _LENGTH.size * count
    if magic != _MAGIC or start > len(data):
        raise changed
    lengths = [_LENGTH.unpack_from(data.data, _HEAD.size + _LENGTH.size * index)[0] for index in range(count)]
    end = start + header_bytes + sum(lengths)
    if end > len(data) or zlib.crc32(data[_CHECKED_FROM:end].data) != check:
        raise changed
    header, *arrays = np.split(data[start:end], np.cumsum([header_bytes, *lengths])[:-1])
    return Frame((header.tobytes(), *arrays), setting, number)
