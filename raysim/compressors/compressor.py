"""`Compressor`: a codec with a memory; its methods are given the state and return the changes to it.

`encode` and `decode` are pure: they read the state and return its changes. The owner of the state commits the changes,
or discards them after a probe. State is a flat dict of tensors keyed by integers, so that a large memory, such as a
copy of every sample, is committed row by row, and a checkpoint needs no knowledge of the method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, TypeAlias

from raysim.codecs import Codec, Packet
from raysim.codecs.codec import DTYPES, Support, check_codec, check_finite
from raysim.codecs.message import CodecTable, Entry
from raysim.notation import Notation
from raysim.on_demand import torch

State: TypeAlias = (
    "dict[int, torch.Tensor]"  # memories of messages have keys of at least 0, a method's own state has keys below
)


class Context(NamedTuple):
    """The facts about one message that a method may use."""

    direction: str  # "forward" or "backward"
    boundary: int  # between stage `boundary` and `boundary + 1`
    step: int
    epoch: int
    microbatch: int
    sample_ids: tuple[int, ...]  # data set index of each row
    replica: int = 0
    num_stages: int = 1
    num_microbatches: int = 1
    phase: str = "steady"  # in which the schedule sends the message: warmup, steady or cooldown; the same at both ends
    key: int | None = None  # of a random codec, from (seed, replica, boundary, direction, step, microbatch)
    support: Support | None = None  # the positions in the forward packet of this microbatch, for shared indices
    learning_rate: float = 0.0
    step_s: float | None = None  # the clock's time of the last step, measured or simulated
    floor: float | None = None  # the fidelity that the link must keep, of a budget that it shares
    sensitivity: float | None = None  # of the receiving stage's gradients to errors, see `raysim.pipeline.sensitivity`
    batch_size: int = 1  # samples of the step, over all replicas


class Offer(NamedTuple):
    """An alternative to sending a link's messages uncompressed."""

    fidelity: float  # of the decoded tensor, at most 1
    factor: float  # dense bytes over wire bytes


class Decision(NamedTuple):
    """The decision of an adaptive method in a step, and its reason: a row of `decisions`."""

    branch: str  # "candidate", "minimum", "dense"; "mild", "strong"; "bounded"
    factor: float  # dense values over values sent, or bytes over bytes
    minimum: float | None = None  # factors between which the method explores
    candidate: float | None = None
    gain_minimum: float | None = None  # as the rule saw them
    gain_candidate: float | None = None
    gain: float | None = None  # of the sent messages
    throughput: float | None = None  # samples a second
    event: str | None = None  # "promote", "advance", "saturate", ...
    reason: str = ""
    layer: str | None = None
    offers: tuple[Offer, ...] = ()  # of a link on a budget; not recorded: gains and factors are


class Compressor(Notation, ABC):
    """A codec with a memory rule: a frozen dataclass, equal and hashed by its settings."""

    two_ended: ClassVar[bool] = False  # whether the receiver keeps a memory too, which must stay equal to the sender's
    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")  # in which it has a meaning
    needs_sensitivity: ClassVar[bool] = False  # whether the stage that receives must measure that, for `end_step`
    needs_schedule: ClassVar[bool] = False  # whether it depends on the phase of the schedule that sends a message
    message_varies: ClassVar[bool] = False  # whether it also sends packets of other codecs than `codec`
    commits_at: ClassVar[str] = "send"  # or "step": changes are published when the step ends
    carries_support: ClassVar[bool] = False  # whether every packet is one of `codec`, at positions of the tensor itself
    any_shape: ClassVar[bool] = False  # whether the messages of a link may change their shape from step to step
    evaluation_modes: ClassVar[tuple[str, ...]] = ("on",)  # that it has, see `evaluation`
    warmup_epochs: ClassVar[int] = 0  # in which it sends other packets than later

    codec: Codec

    @property
    def exact(self) -> bool:
        """True if tensors are sent as they are."""
        return False

    @property
    def shared_budget(self) -> float | None:
        """Fidelity that the product over all links of a direction must reach; None if each link decides by itself."""
        return None

    def forgets(self, num_samples: int) -> bool:
        """Return whether the memory holds fewer than `num_samples` samples, so that a sample may be forgotten between epochs."""
        return False

    def entries(self) -> tuple[Entry, ...]:
        """Return the codecs of packets that this compressor sends, for the link's table.

        `Identity` is in every table. Packets of codecs that are known only during the run are sent with their notation.
        """
        return (Entry.of(self.codec),)

    @property
    def table(self) -> CodecTable:
        """The table by which both ends of a link pack and unpack messages."""
        return _table(self)

    def array_bytes(self, shape: tuple[int, ...], dtype: str) -> int | None:
        """Return the bytes of the arrays of every packet for tensors of `shape` and `dtype`.

        None if the bytes depend on the values or the step: such packets need buffers of variable size.
        """
        if self.message_varies or not self.codec.fixed_size:
            return None
        return self.codec.encode(torch.zeros(shape, dtype=DTYPES[dtype]), key=0).array_bytes

    @abstractmethod
    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        """Return the packet of `x` and the changed rows of the sender's state; `state` itself is not modified.

        Raises NonFiniteError if the tensor to encode holds NaN or infinity.
        """

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, State]:
        """Return the receiver's tensor and the changed rows of its state; `state` itself is not modified."""
        return packet.decode(device), {}

    def commit(self, state: State, changes: State) -> None:
        """Apply `changes` to `state`, in place; both ends call it with changes in the same order."""
        state.update(changes)

    def end_step(self, state: State, context: Context) -> tuple[State, list[Decision]]:
        """Return the rows of the sender's state that change at the end of a step, and the decisions; `state` itself is not modified.

        `context`: the context of the last message, with the signals of the previous step.
        """
        return {}, []

    def evaluation(self, mode: str, state: State) -> Codec:
        """Return the codec that replaces this compressor in evaluations "on" or "on_direct", which use no memory.

        `state`: the sender's state, needed by adaptive methods.
        """
        return self.codec

    def remedy(self, direction: str) -> str:
        """Return a sentence with the setting to try if a link of `direction` has a fidelity below zero."""
        return "Try a milder codec."

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        """Return the maximum number of values in the memory of one end, by the message shape and the number of samples on the link."""
        return 0

    def memory_bytes(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        """Return the maximum bytes of one end's memory: `memory_values` in its dtype."""
        return 4 * self.memory_values(message, num_microbatches, num_samples)


@lru_cache(maxsize=1024)
def _table(compressor: Compressor) -> CodecTable:
    return CodecTable(compressor.entries())


@dataclass(frozen=True, repr=False)
class Plain(Compressor):
    """A codec without memory; written as the bare codec.

    >>> from raysim.codecs import TopK
    >>> Plain(TopK(0.1))
    TopK(0.1)
    """

    carries_support: ClassVar[bool] = True
    any_shape: ClassVar[bool] = True

    codec: Codec

    def __post_init__(self) -> None:
        check_codec("codec", self.codec)

    def __repr__(self) -> str:
        return repr(self.codec)

    @property
    def exact(self) -> bool:
        return self.codec.copies

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        return self.codec.encode(x, context.key), {}


@dataclass(frozen=True, repr=False)
class AtSupport(Compressor):
    """Sends the values at `context.support` by a codec, and no indices (Rudakov et al. 2023, shared-index TopK).

    The result is the exact gradient of the masked activation. Both ends know the support, from encoding or decoding the
    forward packet. This compressor has no notation: `shared_indices=true` wraps a backward codec in it.
    """

    codec: Codec

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        assert context.support is not None, "the forward packet of this microbatch was not seen"
        check_finite(x)  # even if nothing is sent
        positions = context.support.positions.to(x.device)
        return self.codec.encode(x.detach().reshape(-1)[positions], context.key), {}

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, State]:
        assert context.support is not None, "the forward packet of this microbatch was not sent"
        positions, shape = context.support
        if packet.shape != tuple(positions.shape):
            raise ValueError(
                f"A packet holds values of shape {packet.shape}, but its activation kept {tuple(positions.shape)}."
            )
        values = packet.decode(device)
        x = torch.zeros(shape, dtype=values.dtype, device=device)
        x.view(-1)[positions.to(device)] = values
        return x, {}


def share_indices(forward: Compressor, backward: Compressor, where: str = "") -> Compressor:
    """Return the compressor that sends gradients at the positions of their activations.

    Raises ValueError, with `where` at its end, if `forward` selects no positions, or `backward` is not a codec alone.
    """
    if not (forward.carries_support and forward.codec.selects):
        raise ValueError(
            f"`shared_indices` needs a forward TopK, alone or under ErrorFeedback, but got {forward!r}{where}."
        )
    if not isinstance(backward, Plain) or backward.codec.selects:
        raise ValueError(
            "With `shared_indices` the activation chooses the positions and `backward` is the bare codec of the values, "
            f"such as Identity or Quantize(8), but got {backward!r}."
        )
    return AtSupport(backward.codec)
