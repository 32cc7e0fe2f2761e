"""Rounds of a replica method over a torch process group: messages of any size from every rank to every other one.

Gloo and NCCL move tensors whose size the receiver knows. So each message begins with a part of the size that the message had the
last time, which both ends know, behind the length in 8 bytes. The rest follows in a second part. Where sizes do not change from
step to step, a round costs one message to each rank and no padding.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from raysim.codecs.message import CodecTable, Message
from raysim.replication.base import Packets, RoundDriver, Rounds

_LENGTH = struct.Struct("<q")  # negative where an error sentence takes the place of messages
_COUNTS = struct.Struct("<IH")  # bytes of a header, and arrays of the message
_ARRAY = struct.Struct("<I")
_FIRST = 64  # bytes of the first part before the size is known


class ReplicaError(RuntimeError):
    """A replica could not average its gradients: the same sentence at all of them."""


class Channel:
    """Sends bytes from every rank of a group to every other rank, and counts the bytes that leave this rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0
        self._global = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        self._parts: dict[tuple[Hashable, int, bool], int] = {}  # bytes of first parts, by slot, peer and whether sent

    def swap(self, slot: Hashable, outgoing: Mapping[int, bytes], *, failed: bool = False) -> dict[int, bytes]:
        """Send bytes to every other rank and return the bytes received from each; all ranks call it in the same order.

        `slot` names the place in a step; the sizes of the last step's messages there are expected again. `failed`: the bytes are an
        error sentence. Raises ReplicaError with the sentence of a rank that failed.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        received, lengths = self._first_parts(slot, outgoing, others, failed)
        rest_out, rest_in = {}, {}
        for other in others:
            rest = outgoing[other][self._part(slot, other, sent=True) :]
            if rest:
                rest_out[other] = np.frombuffer(rest, np.uint8)
            missing = abs(lengths[other]) - len(received[other])
            if missing > 0:
                rest_in[other] = missing
        arrived = self._transfer(rest_out, rest_in)
        for other in others:
            received[other] += arrived.get(other, b"")
            self._parts[slot, other, True] = len(outgoing[other])
            self._parts[slot, other, False] = abs(lengths[other])
        for other in others:
            if lengths[other] < 0:
                raise ReplicaError(received[other].decode())
        return received

    def _first_parts(
        self, slot: Hashable, outgoing: Mapping[int, bytes], others: list[int], failed: bool
    ) -> tuple[dict[int, bytes], dict[int, int]]:
        sending = {}
        for other in others:
            part, data = self._part(slot, other, sent=True), outgoing[other]
            length = _LENGTH.pack(-len(data) if failed else len(data))
            sending[other] = np.frombuffer(length + data[:part].ljust(part, b"\0"), np.uint8)
        sizes = {other: _LENGTH.size + self._part(slot, other, sent=False) for other in others}
        received = self._transfer(sending, sizes)
        lengths = {other: int(_LENGTH.unpack_from(received[other])[0]) for other in others}
        content = {other: received[other][_LENGTH.size :][: abs(lengths[other])] for other in others}
        return content, lengths

    def _part(self, slot: Hashable, other: int, *, sent: bool) -> int:
        return self._parts.get((slot, other, sent), _FIRST)

    def _transfer(self, sending: Mapping[int, np.ndarray], sizes: Mapping[int, int]) -> dict[int, bytes]:
        """Return bytes of the given sizes from others, while sending to others."""
        operations, arriving = [], {}
        for other in range(self.size):  # the same order at both ends
            if other in sending:
                outgoing = torch.from_numpy(sending[other].copy()).to(self.device)
                operations.append(dist.P2POp(dist.isend, outgoing, self._global[other], self.group))
                self.sent_bytes += outgoing.numel()
            if other in sizes:
                arriving[other] = torch.empty(sizes[other], dtype=torch.uint8, device=self.device)
                operations.append(dist.P2POp(dist.irecv, arriving[other], self._global[other], self.group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return {other: data.cpu().numpy().tobytes() for other, data in arriving.items()}


def run_rounds(rounds: Rounds, table: CodecTable, channel: Channel, place: Hashable, *, max_values: int) -> Any:
    """Run all rounds of a replica method and return its result.

    `place` names the averaged tensors; `max_values` bounds the packets that are accepted. Raises ReplicaError where a method
    fails, at this rank or another.
    """
    driver = RoundDriver(rounds)
    received: list[Packets] | None = None
    number = 0
    while True:
        slot = (place, number)
        try:
            sent = driver.advance(received)
            if sent is None:
                return driver.result
            outgoing = {
                other: _packed(sent.everyone, table) + _packed(sent.each.get(other, {}), table)
                for other in range(channel.size)
                if other != channel.rank
            }
        except Exception as error:
            sentence = f"Replica {channel.rank} could not average its gradients: {error}"
            said = sentence.encode()
            channel.swap(slot, {other: said for other in range(channel.size) if other != channel.rank}, failed=True)
            raise ReplicaError(sentence) from error
        arrived = channel.swap(slot, outgoing)
        received = [
            sent.everyone if rank == channel.rank else _unpacked(arrived[rank], table, max_values)
            for rank in range(channel.size)
        ]
        number += 1


def _packed(packets: Packets, table: CodecTable) -> bytes:
    """Return the message of packets behind its lengths; only the lengths where there are no packets."""
    header, *arrays = table.pack_round(packets) if packets else (b"",)
    lengths = b"".join(_ARRAY.pack(array.nbytes) for array in arrays)
    return b"".join([_COUNTS.pack(len(header), len(arrays)), lengths, header, *(array.data for array in arrays)])


def _unpacked(data: bytes, table: CodecTable, max_values: int) -> Packets:
    """Return the packets of two messages, to everyone and to this rank; raises ValueError where they are malformed."""
    found: dict[str, Any] = {}
    place = 0
    for _ in range(2):
        header_bytes, count = _COUNTS.unpack_from(data, place)
        place += _COUNTS.size
        lengths = [_ARRAY.unpack_from(data, place + _ARRAY.size * index)[0] for index in range(count)]
        place += _ARRAY.size * count
        parts = []
        for length in (header_bytes, *lengths):
            parts.append(data[place : place + length])
            place += length
        if header_bytes:
            message: Message = (parts[0], *(np.frombuffer(part, np.uint8) for part in parts[1:]))
            found.update(table.unpack_round(message, max_values))
    return found
