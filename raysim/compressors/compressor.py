"""`Compressor`: a codec with a memory, whose methods take the state and return changes to it.

`encode` and `decode` are pure: they read the state and return its changes. The owner of the state commits the changes,
or discards them after a probe. State is a flat dict of tensors keyed by integers, so a large memory, such as a copy of
every sample, can be committed row by row, and checkpoints are independent of the method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from raysim.codecs import Codec, Packet
from raysim.codecs.codec import DTYPES, Support, check_finite, check_is_codec
from raysim.codecs.message import CodecTable, Entry
from raysim.notation import Notation
from raysim.on_demand import torch

if TYPE_CHECKING:
    from raysim.values import BoundaryTensors

State: TypeAlias = "dict[int, torch.Tensor]"  # keys >= 0: memory of messages; keys < 0: the method's own state


class Context(NamedTuple):
    """Information about one message, for methods."""

    direction: str  # "forward" or "backward"
    step: int
    epoch: int
    microbatch: int
    sample_ids: tuple[int, ...]  # data set index of each row
    phase: str = "steady"  # of the schedule: warmup, steady or cooldown; the same at both ends
    key: int | None = None  # for random codecs, from (seed, replica, boundary, direction, step, microbatch)
    support: Support | None = None  # the positions in the forward packet of this microbatch, for shared indices


class StepFacts(NamedTuple):
    """Measurements of the previous step, for adaptive methods."""

    step_s: float | None = None  # by the clock, measured or simulated
    sensitivity: float | None = None  # measured by the receiving stage's `Meter` in the last step
    batch_size: int = 1  # samples of the step, over all replicas


class Decision(NamedTuple):
    """A decision of an adaptive method in one step, with its reason; a row of `decisions`."""

    branch: str  # "candidate", "minimum", "dense"; "mild", "strong"; "bounded"
    factor: float  # dense values over values sent, or bytes over bytes
    minimum: float | None = None  # the two factors being explored
    candidate: float | None = None
    gain_minimum: float | None = None  # the gains used by the rule
    gain_candidate: float | None = None
    gain: float | None = None  # of the sent messages
    throughput: float | None = None  # samples a second
    event: str | None = None  # "promote", "advance", "saturate", ...
    reason: str = ""
    layer: str | None = None


class Meter(Protocol):
    """Measures a stage during the passes of a step."""

    work: str  # its name in the records

    def take(self) -> float | None:
        """Return the measurement of the passes since the last call, before replicas average; None if there is none."""

    def clear(self) -> None:
        """Discard the measurements of an aborted step."""


class Compressor(Notation, ABC):
    """A codec with a memory rule: a frozen dataclass, equal and hashed by its settings."""

    two_ended: ClassVar[bool] = False  # whether the receiver also keeps a memory, always equal to the sender's
    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")  # in which the method is meaningful
    needs: ClassVar[frozenset[str]] = (
        frozenset()
    )  # facts about a step: the "schedule"'s phase, or the receiving "stage"
    message_varies: ClassVar[bool] = False  # whether it also sends packets of codecs other than `codec`
    commits_at: ClassVar[str] = "send"  # or "step": changes are published when the step ends
    adds_residual: ClassVar[bool] = False  # whether it adds to a message what earlier ones left out
    carries_support: ClassVar[bool] = False  # whether all packets are `codec`'s own, with the tensor's positions
    evaluation_modes: ClassVar[tuple[str, ...]] = ("on",)  # supported modes, see `evaluation`
    warmup_epochs: ClassVar[int] = 0  # epochs at the start with different packets

    codec: Codec

    @property
    def exact(self) -> bool:
        """True if tensors are sent uncompressed."""
        return False

    def forgets(self, num_samples: int) -> bool:
        """Return whether the memory is too small for `num_samples` samples, so that some are evicted between epochs."""
        return False

    def entries(self) -> tuple[Entry, ...]:
        """Return the codecs of this compressor's packets, for the link's table.

        `Identity` is in every table. Codecs chosen only during the run are sent by their notation.
        """
        return (Entry.of(self.codec),)

    @property
    def table(self) -> CodecTable:
        """The table for packing and unpacking messages at both ends of a link."""
        return _table(self)

    def array_bytes(self, shape: tuple[int, ...], dtype: str) -> int | None:
        """Return the array bytes of every packet for tensors of `shape` and `dtype`.

        None if they depend on the values or the step, so that packets need buffers of variable size.
        """
        if self.message_varies or not self.codec.fixed_size:
            return None
        return self.codec.encode(torch.zeros(shape, dtype=DTYPES[dtype]), key=0).array_bytes

    @abstractmethod
    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        """Return the packet of `x` and the changed rows of the sender's state; `state` itself is not modified.

        Raises NonFiniteError if the tensor to encode contains NaN or infinity.
        """

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, State]:
        """Return the receiver's tensor and the changed rows of its state; `state` itself is not modified."""
        return packet.decode(device), {}

    def commit(self, state: State, changes: State) -> None:
        """Apply `changes` to `state` in place; both ends commit changes in the same order."""
        state.update(changes)

    def end_step(self, state: State, context: Context, facts: StepFacts) -> tuple[State, list[Decision]]:
        """Return the changes to the sender's state at the end of a step, and the decisions; `state` itself is not modified.

        `context` belongs to the step's last message.
        """
        return {}, []

    def evaluation(self, mode: str, state: State) -> Codec:
        """Return the codec used for evaluation modes "on" and "on_direct", which have no memory.

        `state`: the sender's state, for adaptive methods.
        """
        return self.codec

    def meter(self, module: Any) -> Meter | None:
        """Return the meter of the receiving stage, hooks on its module, for `Context.sensitivity`."""
        return None

    def check(self, run: Any) -> None:
        """Raise ValueError, naming field and rule, if the compressor does not fit a run; `run`: its `RunConfig`."""

    def check_boundary(self, boundary: int, tensors: BoundaryTensors) -> None:
        """Raise ValueError if the compressor does not fit a boundary, given the tensors that cross it."""

    def remedy(self, direction: str) -> str:
        """Return a sentence that suggests a setting for a link of `direction` with negative fidelity."""
        return "Try a milder codec."

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        """Return the maximum number of values in one end's memory, given the message shape and the samples on the link."""
        return 0

    def memory_bytes(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        """Return the maximum bytes of one end's memory: `memory_values` in its dtype."""
        return 4 * self.memory_values(message, num_microbatches, num_samples)


@lru_cache(maxsize=1024)
def _table(compressor: Compressor) -> CodecTable:
    return CodecTable(compressor.entries())


@dataclass(frozen=True, repr=False)
class Plain(Compressor):
    """A codec without memory, written as the bare codec.

    >>> from raysim.codecs import TopK
    >>> Plain(TopK(0.1))
    TopK(0.1)
    """

    carries_support: ClassVar[bool] = True

    codec: Codec

    def __post_init__(self) -> None:
        check_is_codec("codec", self.codec)

    def __repr__(self) -> str:
        return repr(self.codec)

    @property
    def exact(self) -> bool:
        return self.codec.copies

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        return self.codec.encode(x, context.key), {}


@dataclass(frozen=True, repr=False)
class AtSupport(Compressor):
    """Sends the values at `context.support` by a codec, without indices (Rudakov et al. 2023, shared-index TopK).

    The result is the exact gradient of the masked activation. Both ends know the support from encoding or decoding the
    forward packet. This compressor has no notation; `shared_indices=true` wraps a backward codec in it.
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
    """Return a compressor that sends gradients at the positions of their activations.

    Raises ValueError, ending in `where`, if `forward` selects no positions or `backward` is not a bare codec.
    """
    if not (forward.carries_support and forward.codec.selects):
        raise ValueError(
            f"`shared_indices` needs a forward TopK, alone or under ErrorFeedback, but got {forward!r}{where}."
        )
    if forward.codec.scales:
        raise ValueError(
            f"`unbiased` must be left out with `shared_indices`, which sends gradients without its factor, but got {forward!r}{where}."
        )
    if not isinstance(backward, Plain) or backward.codec.selects:
        raise ValueError(
            "With `shared_indices` the activation chooses the positions and `backward` is the bare codec of the values, "
            f"such as Identity or Quantize(8), but got {backward!r}."
        )
    return AtSupport(backward.codec)
