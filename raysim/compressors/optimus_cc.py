"""Optimus-CC on links (Song et al. 2023, 2301.09830): low rank with warm start, lazy error propagation, and epilogue-only
compression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs import Codec, Identity, LowRank, Packet
from raysim.codecs.lowrank import orthonormal
from raysim.codecs.message import Entry
from raysim.compressors.compressor import Compressor, Context, Decision, Plain, State, StepFacts
from raysim.compressors.memory import ErrorFeedback
from raysim.notation import check_choice, check_flag
from raysim.on_demand import torch

RESIDUAL = 1 << 62  # key of the residual; the inner compressor's keys (slots, samples) are smaller


class Around(Compressor):
    """Base of compressors that change some messages of another, `inner`, and otherwise behave like it."""

    inner: Compressor

    def _check_inner(self) -> None:
        inner: object = self.inner
        if isinstance(inner, Codec):
            self._coerce(inner=Plain(inner))
        elif not isinstance(inner, Compressor) or inner.directions != Compressor.directions:
            raise ValueError(f"`inner` must be a codec or a compressor of both directions, but got {inner!r}.")

    @property
    def codec(self) -> Codec:  # type: ignore[override]
        return self.inner.codec

    @property
    def two_ended(self) -> bool:  # type: ignore[override]
        return self.inner.two_ended

    @property
    def commits_at(self) -> str:  # type: ignore[override]
        return self.inner.commits_at

    def entries(self) -> tuple[Entry, ...]:
        return self.inner.entries()

    def commit(self, state: State, changes: State) -> None:
        self.inner.commit(state, changes)

    def end_step(self, state: State, context: Context, facts: StepFacts) -> tuple[State, list[Decision]]:
        return self.inner.end_step(state, context, facts)

    def evaluation(self, mode: str, state: State) -> Codec:
        return self.inner.evaluation(mode, state)


@dataclass(frozen=True, repr=False)
class LazyErrorPropagation(Around):
    """Sends C(g + e) and adds the new error e to the next microbatch, in the same step or the next (Song et al. 2023,
    2301.09830).

    `inner`: a codec, or a one-ended compressor without a residual. The error in a layer's weight gradient over a step is then
    a sum of products of e_i with differences of consecutive activations, which is small if the two are uncorrelated.
    `reset="step"` discards e at the end of every step; a change of message shape always discards it.

    >>> from raysim.codecs import LowRank
    >>> from raysim.compressors import WarmStart
    >>> LazyErrorPropagation(WarmStart(LowRank(16)))  # Optimus-CC's compressed backpropagation
    LazyErrorPropagation(WarmStart(LowRank(16)))
    """

    adds_residual: ClassVar[bool] = True

    inner: Compressor
    reset: str = "never"

    def __post_init__(self) -> None:
        self._check_inner()
        check_choice("reset", self.reset, ["never", "step"])
        if self.inner.two_ended:
            raise ValueError(f"`inner` must keep its memory at the sender only, but got {self.inner!r}.")
        if self.inner.adds_residual:
            raise ValueError(f"`inner` must keep no residual, or errors would be sent twice, but got {self.inner!r}.")
        if isinstance(self.inner, Plain):
            _feedback(self.inner)  # rejects codecs that diverge with a residual

    @property
    def message_varies(self) -> bool:  # type: ignore[override]
        return self.inner.message_varies

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        if isinstance(self.inner, Plain):
            kept = self._kept(x, state)
            packet, changes = _feedback(self.inner).encode(x, {} if kept is None else {0: kept}, context)
            return packet, {RESIDUAL: changes[0]}
        wanted = self.wanted(x, state)
        packet, changes = self.inner.encode(wanted.to(x.dtype), state, context)
        received, _ = self.inner.decode(packet, state, context, x.device)
        return packet, {**changes, RESIDUAL: wanted - received}

    def wanted(self, x: torch.Tensor, state: State) -> torch.Tensor:
        """Return the sum of the message and the residual, in float32."""
        kept = self._kept(x, state)
        return x.detach().float() + (0.0 if kept is None else kept.to(x.device))

    def _kept(self, x: torch.Tensor, state: State) -> torch.Tensor | None:
        kept = state.get(RESIDUAL)
        return kept if kept is not None and kept.shape == x.shape else None

    def end_step(self, state: State, context: Context, facts: StepFacts) -> tuple[State, list[Decision]]:
        changes, decisions = super().end_step(state, context, facts)
        if self.reset == "step" and RESIDUAL in state:
            changes = {**changes, RESIDUAL: torch.zeros_like(state[RESIDUAL])}
        return changes, decisions

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        return math.prod(message) + self.inner.memory_values(message, num_microbatches, num_samples)


@dataclass(frozen=True, repr=False)
class Epilogue(Around):
    """Compresses only backward messages of the schedule's cool-down, which no compute hides (Song et al. 2023,
    2301.09830).

    A worker's cool-down starts after its last forward: under 1F1B, stage s of P sends the last min(P - s, M) of its M
    gradients in it. Other messages are sent dense and do not change the memory.

    `flush`: adds the residual of LazyErrorPropagation to the next dense message.

    >>> message = Context("backward", step=0, epoch=0, microbatch=0, sample_ids=())
    >>> [Epilogue.compresses(message._replace(phase=phase)) for phase in ("steady", "cooldown")]
    [False, True]
    """

    directions: ClassVar[tuple[str, ...]] = ("backward",)
    needs: ClassVar[frozenset[str]] = frozenset({"schedule"})
    message_varies: ClassVar[bool] = True

    inner: Compressor
    flush: bool = False

    def __post_init__(self) -> None:
        self._check_inner()
        check_flag("flush", self.flush)
        if self.flush and not isinstance(self.inner, LazyErrorPropagation):
            raise ValueError(f"`flush` sends the residual of a LazyErrorPropagation, but got {self.inner!r}.")

    @staticmethod
    def compresses(context: Context) -> bool:
        """Return whether this message is sent in the schedule's cool-down."""
        return context.phase == "cooldown"

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        if self.compresses(context):
            return self.inner.encode(x, state, context)
        if not (self.flush and isinstance(self.inner, LazyErrorPropagation) and RESIDUAL in state):
            return Identity().encode(x), {}
        wanted = self.inner.wanted(x, state)
        packet = Identity().encode(wanted.to(x.dtype))
        return packet, {RESIDUAL: wanted - packet.decode(x.device)}

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, State]:
        if self.compresses(context):
            return self.inner.decode(packet, state, context, device)
        return packet.decode(device), {}

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        return self.inner.memory_values(message, num_microbatches, num_samples)

    def memory_bytes(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        return self.inner.memory_bytes(message, num_microbatches, num_samples)


def _feedback(inner: Plain) -> ErrorFeedback:
    return ErrorFeedback(inner.codec, key="link")


_Q_KEY = -1  # key of Q in the state, shared by all messages of a link


@dataclass(frozen=True, repr=False)
class WarmStart(Compressor):
    """Sends P = orth(M Q) and M^T P, and orthonormalises M^T P as the Q of the link's next message (PowerSGD, Vogels et al. 2019,
    1905.13727; on links Optimus-CC, Song et al. 2023, 2301.09830).

    If messages change slowly, this converges to the best approximation of this rank. Only the sender keeps Q. Q is drawn from the
    key for the first message and after a change of shape; zero columns are redrawn. For all of Optimus-CC, wrap this in
    `LazyErrorPropagation`.

    >>> WarmStart(LowRank(16))
    WarmStart(LowRank(16))
    """

    codec: LowRank

    def __post_init__(self) -> None:
        if not isinstance(self.codec, LowRank):
            raise ValueError(f"`codec` must be a LowRank, to keep its Q, but got {self.codec!r}.")

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        matrices = self.codec.matrices(tuple(x.shape))
        if matrices is None or context.key is None:
            return self.codec.encode(x, context.key), {}
        number, _, columns, rank = matrices
        start = self.codec.start(context.key, columns, rank, x.device)
        held = state.get(_Q_KEY)
        if held is not None and held.shape == (number, columns, rank):
            kept = orthonormal(held.to(x.device))
            start = torch.where(kept.any(dim=1, keepdim=True), kept, start)
        packet, right = self.codec.encode_from(x, start)
        return packet, {_Q_KEY: right}

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        matrices = self.codec.matrices(message)
        return 0 if matrices is None else math.prod(matrices) // matrices[1]
