"""Residual vector quantisation on links, with codebooks learned during training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from raysim.codecs import Codec, Packet, derive_key
from raysim.codecs.bits import pack, packed_bytes
from raysim.codecs.codec import (
    DTYPES,
    Key,
    cast_float64,
    cast_saturating,
    check_finite,
    count_work,
    dtype_name,
    to_bytes,
    to_tensor,
)
from raysim.codecs.draws import uniform
from raysim.codecs.message import Entry
from raysim.compressors import Compressor, Context, State
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_BOOKS, _SENT = -1, -2  # keys of the state: the codebooks, and the number of messages so far
_CHUNK = 4096  # vectors whose distances are in memory at once


@dataclass(frozen=True, repr=False)
class ResidualVQ(Compressor):
    """Sends vectors of `dim` values as `rounds` codes of `bits` bits each (MAPL, Janson et al. 2026, 2606.05484).

    Round j of a vector x, with c_j the codebook and s_j the root mean square of r_j over the message::

        r_1 = x;   k_j = argmin_k |r_j / s_j - c_jk|;   r_(j+1) = r_j - s_j c_jk_j;   decoded: s_1 c_1k_1 + s_2 c_2k_2 + ...

    Both ends hold the codebooks. Every message updates `fresh` codes of each, sent in bfloat16 and used from the next message on;
    all codes take turns in a random order. A code moves by the share `pace` towards the mean of its own r_j / s_j in the message;
    an unused code moves to the r_j / s_j furthest from its code. Code 0 stays zero, so no round adds to the error. Vectors run
    along the last axis; the last one of a message is padded with zeros. Evaluations send the codebooks along.

    Use: 2 to 4 bits a value for activations whose neighbouring values depend on one another.

    >>> method, x = ResidualVQ(bits=4, rounds=2, dim=2, fresh=4), torch.tensor([[3.0, -5.0, 1.0, 5.0]])
    >>> context = Context("forward", step=0, epoch=0, microbatch=0, sample_ids=(7,))
    >>> packet, changes = method.encode(x, {}, context)
    >>> packet.array_bytes  # 2 vectors of two codes, two s, and 2 x 4 codes of 2 values
    42
    """

    variants: ClassVar[tuple[str, ...]] = ("ResidualVQ(8, rounds=2, dim=4)",)
    two_ended: ClassVar[bool] = True

    bits: int = 8
    rounds: int = 2
    dim: int = 4
    fresh: int = 8
    pace: float = 0.5

    def __post_init__(self) -> None:
        bits = check_integer("bits", self.bits, 1, 12)
        self._coerce(
            bits=bits,
            rounds=check_integer("rounds", self.rounds, 1, 16),
            dim=check_integer("dim", self.dim, 1, 64),
            fresh=check_integer("fresh", self.fresh, 0, 2**bits - 1),
            pace=check_real("pace", self.pace, 0, 1, open_low=True),
        )

    @property
    def codec(self) -> Codec:  # type: ignore[override]
        """The codec of packets and evaluations; it has no notation."""
        return VectorCodes(self.bits, self.rounds, self.dim)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry(self.codec, ("scales", "codes", "books", "fresh")),)

    def array_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        vectors = math.ceil(math.prod(shape) / self.dim)
        fresh = 2 * self.rounds * self.fresh * self.dim
        return 4 * self.rounds + packed_bytes(self.rounds * vectors, self.bits) + fresh

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        return self.rounds * self.dim * (1 << self.bits)

    def encode(self, x: Tensor, state: State, context: Context) -> tuple[Packet, State]:
        codec, name = self._codec(state), dtype_name(x)
        books = codec.books.to(x.device)
        distances = math.ceil(x.numel() / self.dim) * 2**self.bits
        count_work(self.rounds * (x.nbytes + 4 * distances))
        coded = codec.coded(x.detach())
        fresh = cast_saturating(self._moved(books, coded, self._turn(state, x.device)), torch.bfloat16)
        arrays = {**coded.arrays(self.bits), "fresh": to_bytes(fresh)}
        return Packet(self.codec, arrays, tuple(x.shape), name), self._learnt(state, books, fresh)

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, State]:
        codec = self._codec(state)
        shape = (self.rounds, self.fresh, self.dim)
        sent = packet.bytes_of("fresh", 2 * math.prod(shape))
        fresh = to_tensor(sent, torch.bfloat16, device).view(shape)
        if not torch.isfinite(fresh).all():
            raise ValueError(f"A packet of {self!r} holds `fresh` codes that are not finite.")
        x = codec.decode(packet, device)
        count_work(x.nbytes)
        return x, self._learnt(state, codec.books.to(device), fresh)

    def evaluation(self, mode: str, state: State) -> Codec:
        return self._codec(state)

    def _codec(self, state: State) -> VectorCodes:
        codec = VectorCodes(self.bits, self.rounds, self.dim)
        return codec.holding(state[_BOOKS]) if _BOOKS in state else codec

    def _turn(self, state: State, device: torch.device | str) -> Tensor:
        """Return the codes updated by the next message, the same in every codebook."""
        others = 2**self.bits - 1
        sent = int(state[_SENT]) if _SENT in state else 0
        cycle, part = divmod(sent, math.ceil(others / max(self.fresh, 1)))
        order = uniform(derive_key("ResidualVQ", "order", cycle), others).argsort(stable=True)
        positions = (torch.arange(self.fresh) + part * self.fresh) % others
        return (1 + order[positions]).to(device)

    def _moved(self, books: Tensor, coded: Coded, turn: Tensor) -> Tensor:
        """Return the codes `turn`, moved towards the vectors of this message, in float64."""
        moved = books.double()[:, turn]
        for scale, codes, vectors, errors, held in zip(*coded, moved, strict=True):
            if not scale:
                continue
            furthest = iter(errors.argsort(descending=True, stable=True)[: self.fresh])
            for i, code in enumerate(turn):
                own = vectors[codes == code]
                if len(own):
                    held[i] += self.pace * (own.mean(dim=0) - held[i])
                elif (free := next(furthest, None)) is not None:
                    held[i] = vectors[free]
        return moved

    def _learnt(self, state: State, books: Tensor, fresh: Tensor) -> State:
        """Return the state changes of either end after a message with these codes."""
        after = books.clone()
        after[:, self._turn(state, books.device)] = fresh.float()
        sent = state[_SENT] if _SENT in state else torch.zeros((), dtype=torch.int64)
        return {_BOOKS: after, _SENT: sent + 1}


@dataclass(frozen=True, repr=False)
class VectorCodes(Codec):
    """Codes of vectors by codebooks, by default the initial ones of `ResidualVQ`; packets include the codebooks."""

    bits: int
    rounds: int
    dim: int

    def holding(self, books: Tensor) -> VectorCodes:
        """Return this codec with other codebooks, float32 of shape (rounds, 2^bits, dim); they are not in the notation."""
        held = replace(self)
        object.__setattr__(held, "_held", books)
        return held

    @property
    def books(self) -> Tensor:
        """The codebooks: initially uniform values of unit variance, except code 0."""
        held: Tensor | None = getattr(self, "_held", None)
        if held is not None:
            return held
        shape = self.rounds, 2**self.bits, self.dim
        drawn = math.sqrt(3) * (2 * uniform(derive_key("ResidualVQ", "start"), math.prod(shape)).view(shape) - 1)
        drawn[:, 0] = 0
        return drawn.float()

    def array_names(self) -> tuple[str, ...]:
        return ("scales", "codes", "books")

    def coded(self, x: Tensor) -> Coded:
        """Return a tensor's codes, with the scales, coded vectors and errors; raises NonFiniteError."""
        check_finite(x)
        flat = x.reshape(-1).double()
        rest = torch.nn.functional.pad(flat, (0, -len(flat) % self.dim)).view(-1, self.dim)
        coded = Coded([], [], [], [])
        for book in self.books.to(x.device):
            scale = cast_saturating(rest.square().sum().div(max(len(flat), 1)).sqrt(), torch.float32)
            vectors = rest / scale.double() if scale else torch.zeros_like(rest)
            codes = nearest(vectors.float(), book)
            left = vectors - book.double()[codes]
            coded.scales.append(scale)
            coded.codes.append(codes)
            coded.vectors.append(vectors)
            coded.errors.append(left.square().sum(dim=1))
            rest = left * scale.double()
        return coded

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        return {**self.coded(x).arrays(self.bits), "books": to_bytes(self.books)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        vectors = math.ceil(packet.numel / self.dim)
        codes = packet.fields_of("codes", self.rounds * vectors, self.bits, device).long().view(self.rounds, vectors)
        scales = packet.floats_of("scales", self.rounds, device)
        books = self.books.to(device)
        if "books" in packet.arrays:
            books = packet.floats_of("books", books.numel(), device).view(books.shape)
        flat = sum(scale * book[chosen] for scale, book, chosen in zip(scales, books.double(), codes, strict=True))
        return cast_float64(flat.reshape(-1)[: packet.numel], DTYPES[packet.dtype]).view(packet.shape)


class Coded(NamedTuple):
    """The codes of a message, round by round."""

    scales: list[Tensor]
    codes: list[Tensor]
    vectors: list[Tensor]  # input of the round, divided by its scale
    errors: list[Tensor]  # squared distance of each vector from its code

    def arrays(self, bits: int) -> dict[str, np.ndarray]:
        """Return the arrays of a packet."""
        return {"scales": to_bytes(torch.stack(self.scales)), "codes": to_bytes(pack(torch.cat(self.codes), bits))}


def nearest(vectors: Tensor, book: Tensor) -> Tensor:
    """Return the index of the nearest code of each vector, the first of several."""
    norms = book.square().sum(dim=1)
    parts = [torch.addmm(norms, part, book.T, alpha=-2).argmin(dim=1) for part in torch.split(vectors, _CHUNK)]
    return torch.cat(parts) if len(vectors) else torch.empty(0, dtype=torch.int64, device=vectors.device)
