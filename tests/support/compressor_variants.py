"""The one list of compressor variants, and the messages over which the laws of compressors run.

A compressor that is in `COMPRESSORS` but not here fails a test; what is said of a variant here is what the laws hold it to.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from codec_variants import normal
from torch import Tensor

from raysim.codecs import Packet, derive_key
from raysim.compressors import (
    Compressor,
    Context,
    Epilogue,
    Plain,
    State,
    StepFacts,
    parse,
)
from raysim.pipeline.link import Link
from raysim.pipeline.state import pack_state, pack_tensors, unpack_state, unpack_tensors

ROW = (3, 7)  # of a sample
ROWS = 2  # samples of a message
MICROBATCHES = 2
SAMPLES = 8  # two steps an epoch
STEPS_PER_EPOCH = SAMPLES // (ROWS * MICROBATCHES)


@dataclass(frozen=True)
class Variant:
    notation: str
    plain: str | None = None  # "bitwise" or "rounded" where the codec inside is the identity

    @property
    def method(self) -> Compressor:
        return parse(self.notation)

    @property
    def feedback(self) -> bool:
        """Whether what is withheld is remembered, and nothing is ever lost."""
        return "ErrorFeedback" in self.notation

    @property
    def key(self) -> str:
        """Under what it remembers messages; "none" where it does not."""
        return key_of(self.method)

    @property
    def at_most(self) -> bool:
        """Whether some messages are never remembered, so that what is held is less than what may be."""
        return isinstance(self.method, Epilogue)


def key_of(method: Compressor) -> str:
    match method:
        case _ if isinstance(method, Plain) or "stage" in method.needs:  # no memory of messages
            return "none"
        case Epilogue():
            return key_of(method.inner)
    return str(getattr(method, "key", None) or getattr(method, "memory", "link") or "none")


VARIANTS = [
    Variant("Identity", "bitwise"),
    Variant("TopK(0.1)"),
    Variant("Quantize(4)"),
    Variant("Quantize(2, rounding='stochastic')"),
    Variant("Nonzero(values=Cast('bfloat16'))"),
    *(
        Variant(f"ErrorFeedback({codec}, key='{key}')".replace(", key='slot'", ""))
        for codec, key in [
            ("TopK(0.1)", "slot"),
            ("TopK(0.3)", "sample"),
            ("TopK(0.2, per='tensor')", "link"),
            ("Quantize(2)", "slot"),
            ("Quantize(3, rounding='stochastic')", "sample"),
            ("Quantize(4, range='absmax', per='channel')", "link"),
            ("Cast('bfloat16')", "slot"),
            ("TopK(0.3, values=Quantize(4))", "slot"),
            ("TopK(0.5, values=Quantize(2, rounding='stochastic'))", "link"),
            ("Nonzero(values=Quantize(8))", "sample"),
        ]
    ),
    *(
        Variant(f"ErrorFeedback(Identity, key='{key}')".replace(", key='slot'", ""), "bitwise")
        for key in ("slot", "sample", "link")
    ),
    Variant("MixedErrorFeedback(TopK(0.1))"),
    Variant("MixedErrorFeedback(TopK(0.1), union=True)"),
    Variant("MixedErrorFeedback(TopK(0.3), key='sample')"),
    Variant("MixedErrorFeedback(TopK(0.3, per='tensor'), key='link', union=True)"),
    Variant("MixedErrorFeedback(TopK(0.4, values=Quantize(4)), key='link')"),
    Variant("NoiseFeedback(TopK(0.1))"),
    Variant("NoiseFeedback(TopK(0.3), key='sample')"),
    Variant("EF21(TopK(0.2))"),
    Variant("EF21(TopK(0.2), key='sample')"),
    Variant("EF21(TopK(0.2, values=Cast('bfloat16')), key='link')"),
    Variant("EF21(Quantize(4))"),
    Variant("EF21(Quantize(3, rounding='stochastic'), key='sample')"),
    Variant("EF21(Nonzero(values=Quantize(4)), key='link')"),
    *(
        Variant(f"EF21(Identity, key='{key}')".replace(", key='slot'", ""), "rounded")
        for key in ("slot", "sample", "link")
    ),
    Variant("AQSGD(Quantize(4))"),
    Variant("AQSGD(TopK(0.2), warmup=0)"),
    Variant("AQSGD(Quantize(3, rounding='stochastic'), key='slot')"),
    Variant("AQSGD(TopK(0.2), key='slot', warmup=0, first='compressed')"),
    Variant("AQSGD(Quantize(4), warmup=0, dtype='bfloat16')"),
    Variant("AQSGD(TopK(0.3, values=Quantize(4)), first='compressed', dtype='bfloat16')"),
    Variant("AQSGD(TopK(0.2), warmup=0, capacity=3)"),
    Variant("AQSGD(Quantize(4), dtype='bfloat16', capacity=5)"),
    Variant("AQSGD(TopK(0.2), warmup=0, first='compressed', capacity=1)"),
    Variant("AQSGD(Quantize(2), key='slot', warmup=0, dtype='bfloat16', capacity=1)"),
    Variant("AQSGD(Cast('float16'), warmup=2)"),
    Variant("AQSGD(Identity, warmup=0)", "rounded"),
    Variant("AQSGD(Identity, key='slot', first='compressed')", "rounded"),
    Variant("LazyErrorPropagation(TopK(0.1))"),
    Variant("LazyErrorPropagation(Quantize(2), reset='step')"),
    Variant("LazyErrorPropagation(LowRank(1))"),
    Variant("LazyErrorPropagation(WarmStart(LowRank(1)))"),
    Variant("LazyErrorPropagation(Identity)", "bitwise"),
    Variant("Epilogue(TopK(0.2))"),
    Variant("Epilogue(LazyErrorPropagation(TopK(0.2)))"),
    Variant("Epilogue(LazyErrorPropagation(Quantize(2)), flush=True)"),
    Variant("Epilogue(EF21(TopK(0.2)))"),
    Variant("Epilogue(AQSGD(Quantize(4), key='slot'))"),
    Variant("Epilogue(Identity)", "bitwise"),
    Variant("WarmStart(LowRank(1))"),
    Variant("WarmStart(LowRank(1, per='sample'))"),
]


def sample_ids(step: int, microbatch: int) -> tuple[int, ...]:
    """The samples of a message: each once an epoch, in another order in every epoch."""
    epoch, batch = divmod(step, STEPS_PER_EPOCH)
    order = list(range(100, 100 + SAMPLES))
    random.Random(epoch).shuffle(order)
    start = (batch * MICROBATCHES + microbatch) * ROWS
    return tuple(order[start : start + ROWS])


def context(step: int, microbatch: int = 0, ids: tuple[int, ...] | None = None, **changes: Any) -> Context:
    fields: dict[str, Any] = {
        "direction": "forward",
        "step": step,
        "epoch": step // STEPS_PER_EPOCH,
        "microbatch": microbatch,
        "sample_ids": sample_ids(step, microbatch) if ids is None else ids,
        "phase": "cooldown" if microbatch == MICROBATCHES - 1 else "steady",
        "key": derive_key("test", step, microbatch),
    }
    return Context(**{**fields, **changes})


def message(step: int, microbatch: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Activations that drift: each sample has its own, and each step moves it; partly negative, with exact zeros."""
    return _message(step, microbatch, dtype).clone()


@functools.cache
def _message(step: int, microbatch: int, dtype: torch.dtype) -> Tensor:
    own = torch.stack([normal(*ROW, seed=sample) for sample in sample_ids(step, microbatch)])
    drift = 0.2 * normal(ROWS, *ROW, seed=1000 + 10 * step + microbatch)
    return torch.where(own > 1.2, 0.0, own + drift).to(dtype)


def messages(first: int, last: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Context]]:
    for step in range(first, last):
        for microbatch in range(MICROBATCHES):
            yield message(step, microbatch, dtype), context(step, microbatch)


class Pair:
    """The two ends of one link, as two workers hold them."""

    def __init__(self, method: Compressor) -> None:
        device = torch.device("cpu")
        self.sender = Link(method, 0, "forward", sender=True, device=device)
        self.receiver = Link(method, 0, "forward", sender=False, device=device)

    def send(self, x: Tensor, context: Context, *, measure: bool = False) -> tuple[Packet, Tensor]:
        message = self.sender.send(x, context, measure=measure)
        return self.receiver.unpack(message), self.receiver.receive(message, context)

    def step(self, step: int, dtype: torch.dtype = torch.float32) -> list[tuple[Packet, Tensor]]:
        sent = [self.send(x, context) for x, context in messages(step, step + 1, dtype)]
        self.end_step()
        return sent

    def end_step(self) -> None:
        self.sender.end_step(StepFacts(sensitivity=1.0))
        self.receiver.end_step()

    def restored(self) -> Pair:
        """Fresh ends that take over from a checkpoint, which holds the sender's memory: as Worker.state and Worker.load."""
        fresh = Pair(self.sender.compressor)
        if self.sender.state:
            tensors = unpack_tensors(pack_tensors(pack_state(self.sender.state)))
            for link in (fresh.sender, fresh.receiver):
                if link.sender or link.compressor.two_ended:
                    link.load(unpack_state(tensors, link.device))
        return fresh


def bits_of(x: Tensor) -> bytes:
    """The bit patterns, so that negative zero differs from zero."""
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same_packet(a: Packet, b: Packet) -> bool:
    same = a.codec == b.codec and a.shape == b.shape and a.dtype == b.dtype and a.arrays.keys() == b.arrays.keys()
    return same and all(a.arrays[name].tobytes() == b.arrays[name].tobytes() for name in a.arrays)


def same_state(a: State, b: State) -> bool:
    """The same rows, bit for bit, in the same order of last use."""
    return list(a) == list(b) and all(a[key].dtype == b[key].dtype and bits_of(a[key]) == bits_of(b[key]) for key in a)


def copy_of(state: State) -> State:
    return {key: row.clone() for key, row in state.items()}
