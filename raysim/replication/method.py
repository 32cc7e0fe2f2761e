"""`ReplicaMethod`: averages a stage's gradients over its replicas, in rounds.

A method is a generator: in each round it yields this replica's packets and receives those of the other replicas; at the
end it returns the average and its new memory. So a method of several rounds reads from top to bottom, and memory
changes only after the last round. `RoundDriver` advances the generator of one replica. Its callers transfer the
packets: between workers or within one process (`raysim.pipeline`), or over a process group (`raysim.distributed`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from raysim.codecs import Identity, Packet
from raysim.codecs.message import CodecTable, Entry
from raysim.compressors.compressor import Decision
from raysim.notation import Notation
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MISSING = "missing gradients"  # a packet's name
AGREED = "agreed"  # memory kind of the last agreed parameters, used for evaluation and export

Gradients: TypeAlias = "dict[str, Tensor]"  # of a stage, float32 by parameter name, in module order
Memory: TypeAlias = "dict[str, Tensor]"  # of a method at one replica, with names of its choice; saved in checkpoints
Packets = Mapping[str, Packet]


class RoundPackets(NamedTuple):
    """The packets sent by one replica in a round."""

    everyone: Packets = MappingProxyType({})  # to every other replica
    each: Mapping[int, Packets] = MappingProxyType({})  # to one other replica, by index


Received = Sequence[Packets]  # by replica: its packets to everyone and to this one; for this one, its own `everyone`
Rounds: TypeAlias = Generator[RoundPackets, Received, T]  # of one member, returning its result


class ReplicaContext(NamedTuple):
    """Information about a step, for methods."""

    replica: int
    num_replicas: int
    step: int
    epoch: int
    steps_per_epoch: int
    seed: int
    stage: int = 0
    batch_size: int = 1  # samples of the step, over all replicas
    learning_rate: float = 0.0
    momentum: float = 0.0  # of the optimiser
    step_s: float | None = None  # the clock's time of the last step, measured or simulated
    parameters: Gradients | None = None  # of this replica, for `decentralized` methods
    extra: Gradients | None = None  # from the method's own `stage_class`


@dataclass
class Averaged:
    """The result of a method at one replica."""

    gradients: Gradients
    memory: Memory
    decisions: list[Decision] = field(default_factory=list)
    with_momentum: frozenset[str] = frozenset()  # names of gradients that already include momentum
    parameters: Gradients = field(default_factory=dict)  # to replace this replica's


class ReplicaMethod(Notation, ABC):
    """Averages the gradients of one stage over its replicas, or their parameters after the optimiser's step.

    A frozen dataclass, equal and hashed by its settings.
    """

    compresses: ClassVar[bool] = True  # whether it is anything but an uncompressed mean
    decentralized: ClassVar[bool] = False  # whether each replica has its own parameters, updated by its own gradient

    after_update: ClassVar[bool] = (
        False  # whether replicas first update by their own gradients, then exchange parameters
    )
    works_alone: ClassVar[bool] = False  # whether it has an effect with a single replica
    optimizers: ClassVar[frozenset[str] | None] = None  # names of supported optimisers; None for all

    @property
    def exact(self) -> bool:
        """True if float32 values are sent, so that bytes and rounds depend only on shapes."""
        return not self.compresses

    @property
    def fixed_size(self) -> bool:
        """True if bytes, rounds and codec work depend only on shapes, from the first exchange on."""
        return self.exact

    @property
    def common_memory(self) -> bool:
        """True if the memory is the same at all replicas."""
        return False

    @property
    def by_bucket(self) -> bool:
        """True if tensors may be averaged in buckets, as in DDP, with the same bytes as in a single average."""
        return False

    @property
    def keeps_momentum(self) -> bool:
        """True if the method applies momentum itself, so the optimiser must not."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """The context that the method uses besides the gradients: "epochs", "learning_rate", "step_s", or its own "stage"."""
        return frozenset()

    @abstractmethod
    def num_rounds(self, num_replicas: int) -> int:
        """Return the maximum number of rounds in a step."""

    @abstractmethod
    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        """Return the rounds of one step at one replica, without modifying `gradients` or `memory`.

        All replicas yield the same number of rounds, and return bit-identical gradients unless the method is
        `decentralized`. A method with `after_update` gets the updated parameters as `gradients` and returns only
        `parameters`. Raises NonFiniteError on NaN or infinity.
        """

    def part(self, step: int) -> int | None:
        """Return the index of the part of the stage exchanged in a step; None if nothing is exchanged.

        Steps with the same part send the same kinds of packets. `average` is called in every step, and has no rounds if
        the part is None.
        """
        return 0

    @property
    def period(self) -> int:
        """The period of `part`, in steps."""
        return 1

    @property
    def steps_under_way(self) -> int:
        """The maximum number of steps by which an exchange may lag behind training, which hides its time."""
        return 0

    def begin(self, parameters: Gradients) -> Memory:
        """Return the memory before the first step, given the parameters, equal on all replicas."""
        return {}

    def check_steps(self, num_steps: int) -> None:
        """Raise ValueError if the method does not fit the length of a run."""

    def entries(self) -> tuple[Entry, ...]:
        """Return the codecs of this method's packets, for the group's table; see `Compressor.entries`."""
        return ()

    def table(self, names: Iterable[str]) -> CodecTable:
        """Return the table of a group with gradients of these names."""
        return CodecTable(self.entries(), names=names)

    def stage_class(self) -> type[Any] | None:
        """Return the subclass of `raysim.pipeline.stage.Stage` that all stages of a run must have; None if any will do."""
        return None

    def check_plan(self, plan: Any, modules: Sequence[Any]) -> None:
        """Raise ValueError if the method does not fit a run's `Plan`, or the modules of its stages."""

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        """Raise ValueError, naming field and rule, if the method cannot average gradients of these shapes.

        `momentum`: the optimiser's, None without momentum.
        """

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the maximum bytes of one replica's memory, for gradients of these shapes."""
        return 0

    def exchange_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return about the peak bytes of an exchange at one replica, besides gradients and memory.

        These are the averages, a temporary copy of the gradients, and the new memory beside the old.
        """
        return 2 * 4 * num_values(shapes) + self.memory_bytes(shapes)


def reduce_scatter(
    name: str, packets: Mapping[int, Packet], own: Tensor | None, me: int, device: torch.device
) -> Rounds[Tensor | None]:
    """Send each other member its chunk; return the sum of this member's chunks, added in the order of members.

    `own` is this member's own chunk, or None, with no packets, if it contributes nothing. The sum is None if no member
    contributes.
    """
    received = yield RoundPackets(each={other: {name: packet} for other, packet in packets.items()})
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
    name: str, values: Tensor | None, me: int, count: int, device: torch.device, out: Tensor | None = None
) -> Rounds[Tensor | None]:
    """Sum flat `values` over `count` members, bitwise equal on each; this is member `me`. Returns None if no member has values.

    Two rounds, a reduce-scatter and an all-gather: member i sums chunk i in the order of members, so each of D members
    sends 2 (D - 1) / D of the bytes, as in a ring. Members with values None also take part. `out` takes the sum; it may be `values`.
    """
    chunks = () if values is None else values.tensor_split(count)
    packets = {other: Identity().encode(chunk) for other, chunk in enumerate(chunks) if other != me}
    total = yield from reduce_scatter(name, packets, chunks[me] if chunks else None, me, device)
    received = yield RoundPackets(everyone={} if total is None else {name: Identity().encode(total)})
    sums = [sent[name].decode(device) for sent in received if name in sent]
    return torch.cat(sums, out=out) if sums else None


def sum_tensors(name: str, tensors: Gradients, context: ReplicaContext) -> Rounds[Gradients]:
    """Return the sums of float32 tensors over replicas, by a single all-reduce of this name."""
    flat = torch.cat([x.reshape(-1) for x in tensors.values()])
    total = yield from sum_over_members(name, flat, context.replica, context.num_replicas, flat.device, flat)
    assert total is not None
    parts = torch.split(total, [x.numel() for x in tensors.values()])
    return {name: part.view_as(x) for (name, x), part in zip(tensors.items(), parts, strict=True)}


def mean_dense(name: str, gradients: Gradients, context: ReplicaContext) -> Rounds[Gradients]:
    """Return the uncompressed means of `gradients`, by a single all-reduce."""
    if not gradients:
        return {}
    sums = yield from sum_tensors(name, {name: x.detach() for name, x in gradients.items()}, context)
    return {name: x.div_(context.num_replicas) for name, x in sums.items()}


def num_values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the total number of values in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


class RoundDriver:
    """Advances one member's generator, round by round, to its result."""

    def __init__(self, rounds: Rounds[Any]) -> None:
        self._rounds = rounds
        self.over = False
        self.result: Any = None

    def advance(self, received: Received | None) -> RoundPackets | None:
        """Consume the last round's received packets and return the next round's; None once `result` is set.

        `received` is None in the first round.
        """
        if self.over:
            return None
        try:
            return next(self._rounds) if received is None else self._rounds.send(received)
        except StopIteration as stop:
            self.result, self.over = stop.value, True
            return None


def run_together(*rounds: Rounds[Any]) -> Rounds[list[Any]]:
    """Run several generators as one, with their k-th rounds sent together, and return their results.

    Their packets must have different names.
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
        received = yield RoundPackets(everyone, each)


def agreed(parameters: Gradients, memory: Memory) -> Gradients:
    """Return the parameters for evaluation: the last agreed ones, if the method stores them."""
    return {name: memory.get(f"{AGREED}/{name}", x) for name, x in parameters.items()}


def average_given(rounds: Rounds[Averaged], missing: Collection[str], names: Sequence[str]) -> Rounds[Averaged]:
    """Run an average, and leave out gradients that are missing at every replica: weight decay then skips their parameters.

    `missing`: names of this replica's missing gradients, averaged as zeros, of the `names` of all replicas. Replicas with such
    gradients tell the others in the first round.
    """
    driver, received = RoundDriver(rounds), None
    everywhere = set(missing)
    while (sent := driver.advance(received)) is not None:
        if received is None and missing:
            numbers = torch.tensor([float(names.index(name)) for name in missing])
            sent = sent._replace(everyone={**sent.everyone, MISSING: Identity().encode(numbers)})
        first, received = received is None, (yield sent)
        if first:
            for packets in received:
                theirs = packets[MISSING].decode().tolist() if MISSING in packets else ()
                everywhere &= {names[int(number)] for number in theirs}
            received = [{name: x for name, x in packets.items() if name != MISSING} for packets in received]
    averaged: Averaged = driver.result
    kept = {name: x for name, x in averaged.gradients.items() if name not in everywhere or x.any()}
    return replace(averaged, gradients=kept)
