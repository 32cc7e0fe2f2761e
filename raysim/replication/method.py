"""`ReplicaMethod`: how the replicas of a stage average its gradients, in rounds.

A method is a generator. It yields the packets of this replica in a round, receives the packets of the other replicas,
and returns the average and its new memory. So a method of several rounds reads from top to bottom, and memory changes
only after the last round. `RoundDriver` advances the generator of one replica. Its callers carry the packets: between
workers (`raysim.pipeline`), over a process group (`raysim.distributed`), or within one process (`average_together`
here).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from raysim.codecs import Identity, Packet
from raysim.codecs.message import CodecTable, Entry, wire_bytes
from raysim.compressors.compressor import Decision
from raysim.notation import Notation
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

AGREED = "agreed"  # kind of a memory: the parameters on which replicas agreed last, which are evaluated and exported

Gradients: TypeAlias = "dict[str, Tensor]"  # of a stage, by parameter name, in the order of its module; float32
Memory: TypeAlias = "dict[str, Tensor]"  # memory of a method at one replica, by any names; checkpoints keep it
Packets = Mapping[str, Packet]


class Round(NamedTuple):
    """The packets that one replica sends in a round."""

    everyone: Packets = MappingProxyType({})  # to every other replica
    each: Mapping[int, Packets] = MappingProxyType({})  # to one other, by its index

    def wire_bytes(self, num_replicas: int, table: CodecTable) -> int:
        """Return the bytes sent by this replica; a message counts once for each receiver."""
        sent = [(num_replicas - 1, self.everyone), *((1, packets) for packets in self.each.values())]
        return sum(copies * wire_bytes(table.pack_round(packets)) for copies, packets in sent if packets)


Received = Sequence[Packets]  # by replica: its packets to everyone and to this replica; of this replica, `everyone`
Rounds: TypeAlias = Generator[Round, Received, T]  # of one member, to its result


class ReplicaContext(NamedTuple):
    """The facts about a step that a method may use."""

    replica: int
    num_replicas: int
    step: int
    epoch: int
    steps_per_epoch: int
    seed: int
    stage: int = 0
    num_stages: int = 1
    batch_size: int = 1  # samples of the step, over all replicas
    learning_rate: float = 0.0
    momentum: float = 0.0  # of the optimiser
    step_s: float | None = None  # the clock's time of the last step, measured or simulated
    parameters: Gradients | None = None  # of this replica, for a method that is `decentralized`
    previous: Gradients | None = (
        None  # at the parameters of the step before, on this step's samples: if `needs_previous_gradients`
    )


@dataclass
class Averaged:
    """The result of a method at one replica."""

    gradients: Gradients
    memory: Memory
    decisions: list[Decision] = field(default_factory=list)
    with_momentum: frozenset[str] = frozenset()  # of these the optimiser's momentum is part already
    parameters: Gradients = field(default_factory=dict)  # in place of this replica's


class ReplicaMethod(Notation, ABC):
    """Averages the gradients of one stage over its replicas, or their parameters after the optimiser's step.

    A frozen dataclass, equal and hashed by its settings.
    """

    compresses: ClassVar[bool] = True  # whether anything but an uncompressed mean is computed
    uses_previous_gradients: ClassVar[bool] = False  # whether some steps do, see `needs_previous_gradients`
    decentralized: ClassVar[bool] = (
        False  # whether each replica keeps parameters of its own, stepped by its own gradient
    )

    after_update: ClassVar[bool] = (
        False  # whether replicas step by gradients of their own, and exchange parameters then
    )
    works_alone: ClassVar[bool] = False  # whether it changes the training of a single replica
    optimizers: ClassVar[frozenset[str] | None] = None  # names of the optimisers that it is for; None for all

    @property
    def by_bucket(self) -> bool:
        """True if averaging part of the tensors after another sends what one average of all sends, as DDP's buckets do."""
        return False

    @property
    def keeps_momentum(self) -> bool:
        """True if the method applies momentum itself, so that the optimiser must apply none."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """The parts of the context that the method uses beside the gradients: "epochs", "learning_rate" or "step_s"."""
        return frozenset()

    @abstractmethod
    def num_rounds(self, num_replicas: int) -> int:
        """Return the maximum number of rounds in a step."""

    @abstractmethod
    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        """Return the rounds of one step at one replica; neither `gradients` nor `memory` is changed in place.

        All replicas yield the same number of rounds, and return bit-identical gradients unless the method is
        `decentralized`. A method with `after_update` is given the updated parameters as `gradients`, and returns only
        `parameters`. Raises NonFiniteError at NaN or infinity.
        """

    def part(self, step: int) -> int | None:
        """Return the part of the stage that replicas exchange in a step, counted from 0; None if they exchange nothing.

        Steps with the same part send the same kinds of packets. `average` is called in every step; without a part it
        has no rounds.
        """
        return 0

    @property
    def period(self) -> int:
        """The number of steps after which `part` repeats."""
        return 1

    @property
    def steps_under_way(self) -> int:
        """The number of steps by which an exchange may lag behind training, which hides its time."""
        return 0

    def begin(self, parameters: Gradients) -> Memory:
        """Return the memory before the first step, given the parameters, which are equal at all replicas."""
        return {}

    def check_steps(self, num_steps: int) -> None:
        """Raise ValueError if the method does not fit the length of a run."""

    def entries(self) -> tuple[Entry, ...]:
        """Return the codecs of the packets that this method sends, for the table of its group, see `Compressor.entries`."""
        return ()

    def table(self, names: Iterable[str]) -> CodecTable:
        """Return the table of a group whose gradients have these names."""
        return CodecTable(self.entries(), names=names)

    def needs_previous_gradients(self, step: int, seed: int) -> bool:
        """Return whether a step also needs the gradients at the previous step's parameters, which doubles the compute."""
        return False

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        """Raise ValueError, by field and rule, if the method cannot average gradients of these shapes.

        `momentum`: momentum of the optimiser, None for an optimiser without momentum.
        """

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the maximum bytes of one replica's memory, for gradients of these shapes."""
        return 0


def reduce_scatter(
    name: str, packets: Mapping[int, Packet], own: Tensor | None, me: int, device: torch.device
) -> Rounds[Tensor | None]:
    """Send every other member its chunk; return the sum of the chunks for this member, added in the order of members.

    `own` is this member's own chunk; None, with no packets, if it contributes nothing. The sum is None if no member
    contributes.
    """
    received = yield Round(each={other: {name: packet} for other, packet in packets.items()})
    chunks = [
        own if other == me else sent[name].decode(device) if name in sent else None
        for other, sent in enumerate(received)
    ]
    given = [chunk for chunk in chunks if chunk is not None]
    if not given:
        return None
    total = torch.zeros_like(given[0])
    for chunk in given:
        total += chunk
    return total


def sum_over_members(
    name: str, values: Tensor | None, me: int, count: int, device: torch.device
) -> Rounds[Tensor | None]:
    """Return the sum of flat `values` over `count` members, the same bits at each; this is member `me`. None if no member has values.

    Two rounds, a reduce-scatter and an all-gather: member i sums chunk i in the order of members, so each of D members
    sends 2 (D - 1) / D of the bytes, as in a ring. A member whose values are None takes part.
    """
    chunks = () if values is None else values.tensor_split(count)
    packets = {other: Identity().encode(chunk) for other, chunk in enumerate(chunks) if other != me}
    total = yield from reduce_scatter(name, packets, chunks[me] if chunks else None, me, device)
    received = yield Round(everyone={} if total is None else {name: Identity().encode(total)})
    sums = [sent[name].decode(device) for sent in received if name in sent]
    return torch.cat(sums) if sums else None


def all_reduce(name: str, values: Tensor, me: int, count: int) -> Rounds[Tensor]:
    """Return the sum of flat float32 `values` over `count` members, see `sum_over_members`."""
    total = yield from sum_over_members(name, values, me, count, values.device)
    assert total is not None
    return total


def sum_tensors(name: str, tensors: Gradients, context: ReplicaContext) -> Rounds[Gradients]:
    """Return the sums of float32 tensors over replicas, all in one all-reduce of this name."""
    flat = torch.cat([x.reshape(-1) for x in tensors.values()])
    total = yield from all_reduce(name, flat, context.replica, context.num_replicas)
    parts = torch.split(total, [x.numel() for x in tensors.values()])
    return {name: part.view_as(x) for (name, x), part in zip(tensors.items(), parts, strict=True)}


def mean_dense(name: str, gradients: Gradients, context: ReplicaContext) -> Rounds[Gradients]:
    """Return the uncompressed means of `gradients`, by a single all-reduce."""
    if not gradients:
        return {}
    sums = yield from sum_tensors(name, {name: x.detach() for name, x in gradients.items()}, context)
    return {name: x / context.num_replicas for name, x in sums.items()}


def num_values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of values of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


class RoundDriver:
    """Advances the generator of one member of a group, round by round, to its result."""

    def __init__(self, rounds: Rounds[Any]) -> None:
        self._rounds = rounds
        self.over = False
        self.result: Any = None

    def advance(self, received: Received | None) -> Round | None:
        """Consume the packets of the last round and return those of the next round; None once `result` is set.

        `received` is None in the first round.
        """
        if self.over:
            return None
        try:
            return next(self._rounds) if received is None else self._rounds.send(received)
        except StopIteration as stop:
            self.result, self.over = stop.value, True
            return None


def together(*rounds: Rounds[Any]) -> Rounds[list[Any]]:
    """Run several generators as one, the k-th rounds of all sent together, and return their results.

    The names of their packets must differ.
    """
    drivers = [RoundDriver(each) for each in rounds]
    received: Received | None = None
    while True:
        sent = [part for driver in drivers if (part := driver.advance(received)) is not None]
        if not sent:
            return [driver.result for driver in drivers]
        everyone = {name: packet for part in sent for name, packet in part.everyone.items()}
        each: dict[int, dict[str, Packet]] = {}
        for part in sent:
            for other, packets in part.each.items():
                each.setdefault(other, {}).update(packets)
        received = yield Round(everyone, each)


def agreed(parameters: Gradients, memory: Memory) -> Gradients:
    """Return the parameters for evaluation: the last agreed parameters, if the method stores them."""
    return {name: memory.get(f"{AGREED}/{name}", x) for name, x in parameters.items()}


def exchange(sent: Sequence[Round]) -> list[Received]:
    """Return the packets that each replica receives in a round."""
    return [[{**part.everyone, **part.each.get(replica, {})} for part in sent] for replica in range(len(sent))]


def average_together(
    method: ReplicaMethod,
    gradients: Sequence[Gradients],
    memories: Sequence[Memory],
    contexts: Sequence[ReplicaContext],
) -> tuple[list[Averaged], list[int]]:
    """Average in one process: return each replica's result and the bytes that it sent."""
    count = len(gradients)
    drivers = [RoundDriver(method.average(*each)) for each in zip(gradients, memories, contexts, strict=True)]
    sent_bytes = [0] * count
    table = method.table(gradients[0])
    received: Sequence[Received | None] = [None] * count
    for _ in range(method.num_rounds(count) + 1):
        advanced = [driver.advance(packets) for driver, packets in zip(drivers, received, strict=True)]
        sent = [part for part in advanced if part is not None]
        if len(sent) < count:
            assert not sent, "all replicas must take equally many rounds"
            return [driver.result for driver in drivers], sent_bytes
        sent_bytes = [total + part.wire_bytes(count, table) for total, part in zip(sent_bytes, sent, strict=True)]
        received = exchange(sent)
    raise AssertionError(f"{method!r} took more rounds than the {method.num_rounds(count)} that it states")
