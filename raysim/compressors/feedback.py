"""Error feedback: the sender adds the error of one packet to its next tensor. The receiver keeps no memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs import Codec, Nonzero, Packet, TopK
from raysim.codecs.codec import check_codec
from raysim.codecs.draws import uniform
from raysim.codecs.message import Entry
from raysim.codecs.positions import kept_of, select_topk
from raysim.compressors.compressor import (
    KEYS,
    Compressor,
    Context,
    State,
    recall,
    remember,
)
from raysim.notation import check_choice, check_flag
from raysim.on_demand import torch
from raysim.random import derive_key


@dataclass(frozen=True, repr=False)
class Residual(Compressor):
    """A compressor with a float32 memory for each key: the microbatch's `slot`, the `sample`, or the `link`.

    Gradients and activations need different keys. A residual of gradients may be added to another sample's gradient:
    only the sum over samples reaches the weights, so `key="slot"`, the published form, works. An activation belongs to
    its sample. With shuffled data, `key="slot"` and `key="link"` add one sample's residual to another sample's
    activation, which acts as noise, and training may collapse. For activations use `key="sample"`, which adds the
    residual in the sample's next epoch and needs memory for every sample, or no feedback at all.
    """

    codec: Codec
    key: str = "slot"

    def __post_init__(self) -> None:
        check_choice("key", self.key, KEYS)
        check_codec("codec", self.codec)
        self.codec.check_feedback()

    def remedy(self, direction: str) -> str:
        suited = "sample" if direction == "forward" else "slot"
        if self.key == suited:
            return "Try a milder codec."
        if direction == "forward":
            return "Try `key='sample'`, which keeps a memory for each sample, or no feedback on activations."
        return "Try `key='slot'`, or a milder codec."

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        slots = {"slot": num_microbatches, "link": 1}.get(self.key, num_samples / max(1, message[0]))
        return round(slots * math.prod(message))


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Residual):
    """Sends C(x + e) and keeps e = x + e - C(x + e) (Seide et al. 2014; on boundaries Rudakov et al. 2023, 2401.07788).

    `key`: the residual is added to the same microbatch `slot` of the next step (as published; with shuffled data row i
    is then another sample), to the next message of the `sample`, or to the next microbatch on the `link` (Optimus-CC's
    lazy propagation). Use "slot" for gradients and "sample" for activations; `Residual` says why.

    >>> x, context = torch.tensor([[4.0, 3.0]]), Context("backward", 0, step=0, epoch=0, microbatch=0, sample_ids=(7,))
    >>> packet, state = ErrorFeedback(TopK(0.5)).encode(x, {}, context)
    >>> packet.decode(), state
    (tensor([[4., 0.]]), {0: tensor([[0., 3.]])})
    """

    carries_support: ClassVar[bool] = True

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        memory = recall(state, self.key, context, x.detach())
        packet, left = self.codec.encode_with_residual(x.detach(), x.dtype, context.key, memory)
        return packet, remember(self.key, context, left)


@dataclass(frozen=True, repr=False)
class NoiseFeedback(Residual):
    """Sends C(x + n), with noise n of the same norm as the last residual: a control experiment for `ErrorFeedback`.

    It separates the effect of the residual's content from that of equally large noise. n is uniform, drawn from each
    message's key. The residual is e = x + n - C(x + n), kept under `key` as in `ErrorFeedback`.

    >>> NoiseFeedback(TopK(0.1), key="sample")
    NoiseFeedback(TopK(0.1), key='sample')
    """

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        withheld = recall(state, self.key, context, x.detach())
        drawn = uniform(derive_key(context.key, "noise"), x.numel(), x.device).sub_(0.5).view(x.shape)
        scale = withheld.double().norm() / drawn.norm() if x.numel() else 0.0
        packet, left = self.codec.encode_with_residual(x.detach(), x.dtype, context.key, (drawn * scale).float())
        return packet, remember(self.key, context, left)


@dataclass(frozen=True, repr=False)
class MixedErrorFeedback(Residual):
    """Splits TopK's budget between the message and the residual (named in Rudakov et al. 2023; our reading, not verified).

    I = the first half of k of x (rounded up), J = the second half of e; sends x at I plus e at J, or with `union` x + e
    at both. The new e is x + e less the sent values. Positions in both are sent once, so a packet holds up to k values.

    >>> MixedErrorFeedback(TopK(0.1), key="sample")
    MixedErrorFeedback(TopK(0.1), key='sample')
    """

    message_varies: ClassVar[bool] = True

    union: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.codec, TopK):
            raise ValueError(f"`codec` must be a TopK, whose budget is split, but got {self.codec!r}.")
        if self.codec.index != "auto":
            raise ValueError(
                f"`index` of the TopK must be 'auto' here, as Nonzero sends positions, but got {self.codec.index!r}."
            )
        check_flag("union", self.union)

    def entries(self) -> tuple[Entry, ...]:
        assert isinstance(self.codec, TopK)
        return (*super().entries(), Entry.of(Nonzero(self.codec.values)))

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        assert isinstance(self.codec, TopK)
        residual = recall(state, self.key, context, x.detach())
        num_rows = 1 if self.codec.per == "tensor" or x.ndim == 0 else len(x)
        message, held = x.detach().float().reshape(num_rows, -1), residual.reshape(num_rows, -1)
        kept = kept_of(self.codec.density, message.shape[1]) if message.numel() else 0
        of_message = select_topk(message, kept - kept // 2)
        of_residual = select_topk(held, kept // 2)
        wanted = message + held
        sent = torch.zeros_like(wanted).view(-1)
        if self.union:
            both = torch.cat([of_message, of_residual])
            sent[both] = wanted.view(-1)[both]
        else:
            sent[of_message] += message.view(-1)[of_message]
            sent[of_residual] += held.view(-1)[of_residual]
        packet = Nonzero(self.codec.values).encode(sent.view(x.shape).to(x.dtype), context.key)
        left = wanted.view(x.shape) - packet.decode(x.device)
        return packet, remember(self.key, context, left)
