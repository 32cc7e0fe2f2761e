"""Groups that exchange packets in rounds at the end of a step: replicas of a stage, or owners of a tied parameter."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raysim.codecs import Identity, Packet
from raysim.codecs.codec import work_bytes
from raysim.codecs.message import CodecTable, Message, wire_bytes
from raysim.compressors import Decision
from raysim.network.collectives import EXCHANGES, Transfer
from raysim.pipeline.messages import Parts
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    Packets,
    ReplicaContext,
    ReplicaMethod,
    RoundDriver,
    RoundPackets,
    Rounds,
)

_CONTROL_VALUES = 64  # upper bound of the numbers that replicas agree on, such as gains
TIED_TABLE = CodecTable(names=["sum"])


class Group(NamedTuple):
    """Members that exchange packets in rounds: owners of a tied parameter, or replicas of a stage if `tied` is None."""

    members: tuple[tuple[int, int], ...]  # (replica, stage)
    num_rounds: int = 0  # upper bound, set in the groups of a plan
    tied: int | None = None  # index in `Plan.tied`

    @property
    def direction(self) -> str:
        """The kind of exchange, as named in the records."""
        return EXCHANGES[self.tied is not None]

    @property
    def stage(self) -> int:
        """The first member's stage, which identifies the group in the records."""
        return self.members[0][1]

    def others(self, member: int) -> list[int]:
        return [other for other in range(len(self.members)) if other != member]


@dataclass(slots=True)
class GroupAccount:
    """Totals of one member of a group in one step."""

    stage: int
    tied: bool
    dense_bytes: int  # of an uncompressed all-reduce of the same gradients
    packets: int = 0
    transfers: list[Transfer] = field(default_factory=list)  # to other workers, by round and receiver
    num_rounds: int = 0
    codec_s: float = 0.0
    coded_bytes: int = 0  # the work of its codecs, see `raysim.codecs.codec`
    decisions: tuple[Decision, ...] = ()

    @property
    def wire_bytes(self) -> int:
        return int(sum(transfer.wire_bytes for transfer in self.transfers))


def ring_bytes(num_values: int, num_members: int) -> int:
    """Return the bytes that a member sends in a ring all-reduce of float32 values."""
    return 2 * (num_members - 1) * 4 * num_values // num_members


def chunk_bytes(name: str, num_values: int, num_members: int, table: CodecTable) -> list[float]:
    """Return the message bytes, header included, of each member's chunk of float32 values, without allocating it."""
    sizes = [num_values // num_members + (member < num_values % num_members) for member in range(num_members)]
    sent = []
    for size in sizes:
        values = np.broadcast_to(np.uint8(0), 4 * size)
        packet = Packet(Identity(), {"values": values}, (size,), "float32")
        sent.append(float(wire_bytes(table.pack_round({name: packet}))))
    return sent


class MemberRounds:
    """One member's rounds in one step, packed into messages, and the account of its transfers to other workers.

    `table`: the group's codecs and names, for packing. `num_values`: the number of values in the member's tensors; larger
    packets are refused, except the few numbers that methods agree on. `stages`: this worker's stages; transfers between them
    are not counted.
    """

    def __init__(
        self,
        group: Group,
        member: int,
        rounds: Rounds[Any],
        table: CodecTable,
        *,
        num_values: int,
        stages: Container[int] = (),
    ) -> None:
        self._far = [
            other
            for other in group.others(member)
            if group.members[other][0] != group.members[member][0] or group.members[other][1] not in stages
        ]
        self.group = group
        self.member = member
        dense_bytes = ring_bytes(num_values, len(group.members))
        self.account = GroupAccount(group.members[member][1], group.tied is not None, dense_bytes)
        self._driver = RoundDriver(rounds)
        self._table = table
        self._max_values = max(_CONTROL_VALUES, num_values)
        self._sent: RoundPackets | None = None

    def advance(self, received: Sequence[Parts]) -> list[Message | None]:
        """Receive the last round's messages and return this round's: one to everyone, then one to each other member.

        `received`: for each other member in order, its message to this member and its message to everyone; empty in the first
        round. A finished method sends nothing.
        """
        others, account = self.group.others(self.member), self.account
        start, work = time.perf_counter(), work_bytes()
        self._sent = self._driver.advance(None if self._sent is None else self._gather(received))
        account.coded_bytes += work_bytes() - work
        if self._sent is None:
            account.codec_s += time.perf_counter() - start
            return [None] * (1 + len(others))
        everyone = self._pack(self._sent.everyone)
        each = {other: self._pack(self._sent.each.get(other, {})) for other in others}
        account.codec_s += time.perf_counter() - start
        for other in self._far:
            account.packets += len(self._sent.everyone) + len(self._sent.each.get(other, {}))
            sent = [message for message in (everyone, each[other]) if message is not None]
            if sent:
                ends = (*self.group.members[self.member], *self.group.members[other])
                size = sum(wire_bytes(message) for message in sent)
                account.transfers.append(
                    Transfer(self.group.direction, self.group.stage, account.num_rounds, *ends, size)
                )
        account.num_rounds += 1
        return [everyone, *each.values()]

    @property
    def over(self) -> bool:
        """True if all rounds are done."""
        return self._driver.over

    @property
    def result(self) -> Any:
        """The method's result; None before the last round."""
        return self._driver.result

    def _pack(self, packets: Packets) -> Message | None:
        """Pack packets into a message, None if there are none."""
        return self._table.pack_round(packets) if packets else None

    def _unpack(self, message: Message | None) -> Packets:
        return {} if message is None else self._table.unpack_round(message, self._max_values)

    def _gather(self, received: Sequence[Parts]) -> list[Packets]:
        assert self._sent is not None
        pairs = iter(received)
        gathered: list[Packets] = []
        for member in range(len(self.group.members)):
            if member == self.member:
                gathered.append(self._sent.everyone)
            else:
                each, everyone = next(pairs)
                gathered.append({**self._unpack(everyone), **self._unpack(each)})
        return gathered


def exchange_together(
    group: Group, rounds: Sequence[Rounds[Any]], table: CodecTable, *, num_values: int
) -> list[MemberRounds]:
    """Run the rounds of all members of a group in one process; arguments as for `MemberRounds`.

    Raises AssertionError if members take different numbers of rounds, or more than the group states.
    """
    exchanges = [MemberRounds(group, member, each, table, num_values=num_values) for member, each in enumerate(rounds)]
    sent = [exchange.advance(()) for exchange in exchanges]
    while not all(exchange.over for exchange in exchanges):
        taken = {exchange.account.num_rounds for exchange in exchanges}
        assert len(taken) == 1, "all replicas must take equally many rounds"
        assert not group.num_rounds or taken <= {*range(group.num_rounds + 1)}, (
            f"a method took more rounds than the {group.num_rounds} that it states"
        )
        received = [
            [(sent[other][1 + group.others(other).index(me)], sent[other][0]) for other in group.others(me)]
            for me in range(len(exchanges))
        ]
        sent = [exchange.advance(parts) for exchange, parts in zip(exchanges, received, strict=True)]
    return exchanges


def average_together(
    method: ReplicaMethod,
    gradients: Sequence[Gradients],
    memories: Sequence[Memory],
    contexts: Sequence[ReplicaContext],
) -> tuple[list[Averaged], list[int]]:
    """Average in one process; return each replica's result and sent bytes."""
    rounds = [method.average(*each) for each in zip(gradients, memories, contexts, strict=True)]
    group = Group(tuple((replica, 0) for replica in range(len(rounds))), method.num_rounds(len(rounds)))
    count = sum(gradient.numel() for gradient in gradients[0].values())
    exchanges = exchange_together(group, rounds, method.table(gradients[0]), num_values=count)
    return [each.result for each in exchanges], [each.account.wire_bytes for each in exchanges]
