"""Messages and bundles: a short binary header followed by the arrays of packets.

Both ends derive the same table from the configuration, so a codec with all its settings is sent as one number. A codec
that is not in the table is sent in its notation. All integers are LEB128 varints:

    header of one packet  = description, lengths
    header of a round     = count, count x (name, description), lengths
    description           = 4 x number + dtype, [notation if number is 0], dimensions, sizes, absent arrays (a bit each)
    name                  = number, [text if number is 0]
    text and notation     = length, UTF-8
    lengths               = bytes of every array but the last, which is the rest of the message

A bundle holds the packets of several tensors, and exact tensors of integers and booleans; a single unnamed tensor is sent as a
plain message instead:

    header of a bundle    = count, count x packet, count, count x exact tensor
    packet                = name, length, header of the packet's message, number of its arrays
    exact tensor          = name, type, dimensions, sizes
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from raysim.codecs import CODECS, Codec, Identity, Packet
from raysim.codecs.codec import DTYPES
from raysim.notation import MAX_LENGTH, parse_notation
from raysim.on_demand import torch
from raysim.values import EXACT, UNNAMED, kind

Message: TypeAlias = "tuple[bytes, *tuple[np.ndarray, ...]]"  # a header and flat uint8 arrays

MAX_DIMENSIONS = 8
_DTYPES = tuple(DTYPES)


def wire_bytes(message: Message) -> int:
    """Return the bytes of a message: its header and its arrays."""
    header, *arrays = message
    return len(header) + sum(array.nbytes for array in arrays)


class Entry(NamedTuple):
    """A table entry: a codec and the names of its packets' arrays, in the order in which they are sent."""

    codec: Codec
    names: tuple[str, ...]

    @classmethod
    def of(cls, codec: Codec) -> Entry:
        """Return the entry of a codec with the array names of its packets."""
        return cls(codec, codec.array_names())


class CodecTable:
    """Packs packets into messages and unpacks them; both ends of a link, or all members of a group, need equal tables.

    `entries`: codecs sent as a number; every table starts with `Identity`. `names`: packet names sent as a number in
    rounds, such as the parameters of a stage.

    >>> import torch
    >>> from raysim.codecs import TopK
    >>> table = CodecTable([Entry.of(TopK(0.5))])
    >>> message = table.pack(TopK(0.5).encode(torch.tensor([[3.0, -5.0, 1.0, 5.0]])))
    >>> len(message[0]), wire_bytes(message)
    (6, 15)
    >>> table.unpack(message, max_values=4).decode()
    tensor([[ 0., -5.,  0.,  5.]])
    """

    def __init__(self, entries: Iterable[Entry] = (), *, names: Iterable[str] = ()) -> None:
        self.entries = tuple(dict.fromkeys((Entry.of(Identity()), *entries)))
        self.names = tuple(dict.fromkeys(names))
        self._number_of_name = {name: number for number, name in enumerate(self.names, 1)}
        self._numbers: dict[Codec, list[tuple[int, Entry]]] = {}
        for number, entry in enumerate(self.entries, 1):
            self._numbers.setdefault(entry.codec, []).append((number, entry))

    def pack(self, packet: Packet) -> Message:
        """Return the message of one packet, without copying its arrays."""
        header = bytearray()
        arrays = self._describe(packet, header)
        _write_lengths(header, arrays)
        return (bytes(header), *arrays)

    def pack_round(self, packets: Mapping[str, Packet]) -> Message:
        """Return one message with several named packets."""
        header, arrays = bytearray(), []
        write_number(header, len(packets))
        for name, packet in packets.items():
            number = self._number_of_name.get(name, 0)
            write_number(header, number)
            if not number:
                write_text(header, name)
            arrays += self._describe(packet, header)
        _write_lengths(header, arrays)
        return (bytes(header), *arrays)

    def unpack(self, message: Message, max_values: int) -> Packet:
        """Return the packet of a message from `pack`, with at most `max_values` values; it shares the message's arrays.

        Raises ValueError before allocating memory if the header is malformed or does not fit the arrays.
        """
        header, *arrays = message
        reader = Reader(header)
        codec, dtype, shape, present = self._read(reader, max_values)
        reader.check_arrays(arrays, len(present))
        return Packet(codec, dict(zip(present, arrays, strict=True)), shape, dtype)

    def unpack_round(self, message: Message, max_values: int) -> dict[str, Packet]:
        """Return the packets of a message from `pack_round`, each with at most `max_values` values; raises like `unpack`."""
        header, *arrays = message
        reader = Reader(header)
        described = {}
        for _ in range(reader.number()):
            number = reader.number()
            if number > len(self.names):
                raise ValueError(f"A message must name one of {len(self.names)} packets, but names codec {number}.")
            name = self.names[number - 1] if number else reader.text()
            if name in described:
                raise ValueError(f"A message must hold each packet once, but holds {name!r} twice.")
            described[name] = self._read(reader, max_values)
        reader.check_arrays(arrays, sum(len(present) for *_, present in described.values()))
        rest = iter(arrays)
        return {
            name: Packet(codec, {array: next(rest) for array in present}, shape, dtype)
            for name, (codec, dtype, shape, present) in described.items()
        }

    def _describe(self, packet: Packet, header: bytearray) -> list[np.ndarray]:
        """Append the description of a packet to `header`, and return its arrays in the order of their names."""
        number, names = self._entry_of(packet)
        write_number(header, 4 * number + _DTYPES.index(packet.dtype))
        if not number:
            write_text(header, repr(packet.codec))
        write_number(header, len(packet.shape))
        for size in packet.shape:
            write_number(header, size)
        write_number(header, sum(1 << i for i, name in enumerate(names) if name not in packet.arrays))
        return [packet.arrays[name] for name in names if name in packet.arrays]

    def _entry_of(self, packet: Packet) -> tuple[int, tuple[str, ...]]:
        """Return the table number of a packet's codec (0 if it is not in the table) and its array names."""
        for number, entry in self._numbers.get(packet.codec, ()):
            if packet.arrays.keys() <= set(entry.names):
                return number, entry.names
        names = packet.codec.array_names()
        if not packet.arrays.keys() <= set(names):
            raise ValueError(
                f"A packet of {packet.codec!r} may hold {', '.join(names)}, but holds {', '.join(packet.arrays)}."
            )
        return 0, names

    def _read(self, reader: Reader, max_values: int) -> tuple[Codec, str, tuple[int, ...], list[str]]:
        """Read a description: codec, dtype, shape and the names of the arrays in the packet."""
        number, dtype = divmod(reader.number(), 4)
        if number > len(self.entries):
            raise ValueError(f"A message must name one of {len(self.entries)} codecs, but names codec {number}.")
        codec, names = self.entries[number - 1] if number else _entry_of_notation(reader.text())
        dimensions = reader.number()
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"A message must have at most {MAX_DIMENSIONS} dimensions, but has {dimensions}.")
        shape = tuple(reader.number() for _ in range(dimensions))
        if math.prod(max(size, 1) for size in shape) > max_values:
            raise ValueError(f"A message must have at most {max_values} values, but has shape {shape}.")
        absent = reader.number()
        if absent >> len(names):
            raise ValueError(f"A message of {codec!r} must have at most {len(names)} arrays, but omits more.")
        return codec, _DTYPES[dtype], shape, [name for i, name in enumerate(names) if not absent >> i & 1]


@lru_cache(maxsize=256)
def _entry_of_notation(text: str) -> Entry:
    return Entry.of(parse_notation(text, CODECS))


def write_number(header: bytearray, number: int) -> None:
    """Append a number to a header."""
    while number > 127:
        header.append(number & 127 | 128)
        number >>= 7
    header.append(number)


def write_text(header: bytearray, text: str) -> None:
    """Append a text to a header."""
    data = text.encode()
    write_number(header, len(data))
    header += data


def _write_lengths(header: bytearray, arrays: Sequence[np.ndarray]) -> None:
    for array in arrays[:-1]:
        write_number(header, array.nbytes)


class Reader:
    """Reads a header from its start; raises ValueError if the header is malformed."""

    def __init__(self, header: bytes) -> None:
        self._header = header
        self._position = 0

    def number(self) -> int:
        """Return the next number, below 2^63."""
        number = shift = 0
        while True:
            if self._position >= len(self._header) or shift > 56:
                raise ValueError(
                    "The header of a message must hold integers below 2^63, but one of them is longer or cut off."
                )
            byte = self._header[self._position]
            self._position += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7

    def text(self) -> str:
        """Return the next text."""
        length = self.number()
        if length > min(MAX_LENGTH, len(self._header) - self._position):
            raise ValueError(f"A text in a header must have at most {MAX_LENGTH} bytes, but states {length}.")
        return self.take(length).decode()

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        if self._position + length > len(self._header):
            raise ValueError(f"A header must have the {length} bytes that it states, but ends earlier.")
        data = self._header[self._position : self._position + length]
        self._position += length
        return data

    def check_arrays(self, arrays: Sequence[np.ndarray], count: int) -> None:
        """Read the lengths; check that they match the arrays and that the header ends after them."""
        if len(arrays) != count:
            raise ValueError(f"A message of {count} arrays must have as many, but has {len(arrays)}.")
        for array in arrays:
            if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"An array of a message must be flat bytes, but is {array.dtype} of {array.shape}.")
        for array in arrays[:-1]:
            length = self.number()
            if length != array.nbytes:
                raise ValueError(f"An array of a message must have the stated {length} bytes, but has {array.nbytes}.")
        self.check_end()

    def check_end(self) -> None:
        """Check that nothing is left to read."""
        if self._position != len(self._header):
            raise ValueError(
                f"A header must have the {self._position} bytes that it states, but has {len(self._header)}."
            )


def bundle(messages: Mapping[str, Message], exact: Mapping[str, torch.Tensor]) -> Message:
    """Join packet messages and exact tensors, given by name, into one message."""
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
) -> tuple[dict[str, Message], dict[str, torch.Tensor]]:
    """Return the arguments of the `bundle` call that made a message; an exact tensor may have at most `max_values` values.

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


def _tensor(array: np.ndarray, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = math.prod(shape)
    expected = -(-values // 8) if kind == "bool" else values * np.dtype(kind).itemsize
    if array.dtype != np.uint8 or array.nbytes != expected:
        raise ValueError(f"`{name}` in a message must have {expected} bytes, but has {array.nbytes}.")
    data = np.unpackbits(array, count=values).astype(bool) if kind == "bool" else array.view(kind).copy()
    return torch.from_numpy(data).view(shape)
