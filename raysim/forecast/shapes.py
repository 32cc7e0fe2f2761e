"""Costs of a transformer's stages, counted from a few numbers.

Nothing is allocated, and neither torch nor transformers is imported.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from raysim.forecast.evidence import ELSEWHERE, SCRATCH, TRANSFORMER, Scope
from raysim.notation import InputError, check_integer

UNNAMED = "the model"
"""Name of a model given by its shape."""
SAVED_FACTOR = 34
"""Bytes that a block saves for the backward per value of its input, in 16 bits with flash attention (Korthikanti et al. 2022,
2205.05198: 34 s b h, without the scores' 5 a s^2 b)."""


Shapes = Counter[tuple[int, ...]]
"""Shapes of parameters, with the number of each."""


def count_values(shapes: Shapes) -> int:
    """Return the number of values in tensors of these shapes."""
    return sum(count * math.prod(shape) for shape, count in shapes.items())


class Unit(NamedTuple):
    """Layers that sharded replicas gather together: a block, the embedding or the head."""

    forward_flops: float
    num_parameters: int


class StageCost(NamedTuple):
    """Costs of one stage for one microbatch, of any model."""

    forward_flops: float
    """Two for each multiply-add; a causal mask saves none."""
    weight_share: float
    """Weight gradients' share of a backward, which counts as two forwards."""
    parameters: Shapes
    saved_bytes: float
    """Kept from the forward to the backward."""
    workspace_bytes: float
    """Additional, within one action."""
    output: tuple[int, ...]
    """Shape of the activation sent to the next stage."""
    units: tuple[Unit, ...]
    """In forward order."""

    @property
    def num_parameters(self) -> int:
        """Number of trained values of the stage."""
        return count_values(self.parameters)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of equal blocks between an embedding and a head.

    >>> shape = ModelShape(layers=32, width=4096, length=4096, vocabulary=128_000, heads=32)
    >>> f"{shape.num_parameters:.3g}"
    '7.49e+09'
    """

    layers: int
    """Blocks, and so the most stages."""
    width: int
    length: int
    """Tokens of a sequence."""
    vocabulary: int
    heads: int
    kv_heads: int = 0
    """Heads of keys and values; 0 means as many as `heads`."""
    head_width: int = 0
    """0 means `width` / `heads`."""
    hidden: int = 0
    """Width within the feed-forward part; 0 means four times `width`."""
    gated: bool = False
    """Whether the feed-forward part has a third matrix."""
    experts: int = 1
    active_experts: int = 1
    """Experts used for each token."""
    vectors: tuple[int, ...] = ()
    """Lengths of a block's vector parameters: norms and biases."""
    last_vectors: tuple[int, ...] = ()
    """Vector parameters of the norm before the head."""
    positions: int = 0
    """Learned positions."""
    tied: bool = False
    """Whether the head is the embedding."""
    name: str = UNNAMED
    trained: bool = False
    """True if its folder holds weights."""

    def __post_init__(self) -> None:
        for field in ("layers", "width", "length", "vocabulary", "heads", "experts", "active_experts"):
            check_integer(field, getattr(self, field), 1)
        defaults = {"kv_heads": self.heads, "head_width": self.width // self.heads, "hidden": 4 * self.width}
        for field, default in defaults.items():
            if not getattr(self, field):
                object.__setattr__(self, field, default)
            check_integer(field, getattr(self, field), 1)

    @property
    def matrices(self) -> Shapes:
        """Weight matrices of a block, as (output, input)."""
        own, shared = self.heads * self.head_width, self.kv_heads * self.head_width
        counts: Shapes = Counter()
        counts[own, self.width] += 1
        counts[shared, self.width] += 2
        counts[self.width, own] += 1
        counts[self.hidden, self.width] += self.experts * (2 if self.gated else 1)
        counts[self.width, self.hidden] += self.experts
        if self.experts > 1:
            counts[self.experts, self.width] += 1
        return counts

    @property
    def block(self) -> Shapes:
        """Parameters of a block."""
        return self.matrices + Counter((length,) for length in self.vectors)

    @property
    def embedding(self) -> Shapes:
        """Parameters before the first block."""
        positions = {(self.positions, self.width): 1} if self.positions else {}
        return Counter({(self.vocabulary, self.width): 1}) + Counter(positions)

    @property
    def head(self) -> Shapes:
        """Parameters after the last block, without a tied head."""
        return Counter((length,) for length in self.last_vectors) + Counter(
            {} if self.tied else {(self.vocabulary, self.width): 1}
        )

    @property
    def num_parameters(self) -> int:
        """Number of trained values of the model."""
        return count_values(self.embedding) + self.layers * count_values(self.block) + count_values(self.head)

    @property
    def scope(self) -> Scope:
        """The model's description for a lookup in raysim's findings."""
        return Scope(TRANSFORMER, self.num_parameters, ELSEWHERE if self.trained else SCRATCH, self.name)

    @property
    def samples_name(self) -> str:
        """The samples' name in tables."""
        return f"sequences of {self.length:,} tokens"

    def tied_sizes(self, num_stages: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return the stages of the embedding and its number of values, if it is also the head of another stage."""
        return (((0, num_stages - 1), self.vocabulary * self.width),) if self.tied and num_stages > 1 else ()

    def stages(self, num_stages: int, samples: int) -> list[StageCost]:
        """Return the costs of balanced stages for a microbatch of `samples` sequences; operations weigh the head.

        The embedding is part of the first stage; a tied head is counted in both its stages, as each holds a copy.
        """
        if num_stages > self.layers:
            raise InputError(f"`stages` must be at most the {self.layers} blocks of {self.name}, but got {num_stages}.")
        tokens = samples * self.length
        idle = self.experts - self.active_experts
        expert = (3 if self.gated else 2) * self.width * self.hidden
        weights = 2.0 * tokens * (count_values(self.matrices) - idle * expert)
        attention = 4.0 * tokens * self.length * self.heads * self.head_width
        head = 2.0 * tokens * self.vocabulary * self.width
        blocks = _shares(self.layers, num_stages, head / (weights + attention))
        stages = []
        for stage, count in enumerate(blocks):
            first, last = stage == 0, stage == num_stages - 1
            parameters: Shapes = Counter({shape: count * number for shape, number in self.block.items()})
            units = [Unit(weights + attention, count_values(self.block))] * count
            if first:
                parameters += self.embedding
                units.insert(0, Unit(0.0, count_values(self.embedding)))
            if last:
                parameters += self.head
                if self.tied and not first:
                    parameters[self.vocabulary, self.width] += 1
                ends = count_values(parameters) - sum(unit.num_parameters for unit in units)
                units.append(Unit(head, ends))
            own = head if last else 0.0
            stages.append(
                StageCost(
                    forward_flops=count * (weights + attention) + own,
                    # as many operations as products with parameters in the forward
                    weight_share=(count * weights + own) / (2 * (count * (weights + attention) + own)),
                    parameters=parameters,
                    saved_bytes=count * SAVED_FACTOR * float(tokens * self.width),
                    # logits: 16 bits, and their gradient in 32
                    workspace_bytes=6.0 * tokens * self.vocabulary if last else 0.0,
                    output=(samples, self.length, self.width),
                    units=tuple(units),
                )
            )
        return stages


def _shares(layers: int, num_stages: int, head: float) -> list[int]:
    """Return the number of blocks of each stage; the head, worth `head` blocks, makes the last stage shorter.

    >>> _shares(32, 4, 0.0), _shares(32, 8, 2.6)
    ([8, 8, 8, 8], [5, 5, 4, 4, 4, 4, 4, 2])
    """
    if num_stages == 1:
        return [layers]
    last = max(1, min(layers - num_stages + 1, round((layers + head) / num_stages - head)))
    each, more = divmod(layers - last, num_stages - 1)
    return [each + (stage < more) for stage in range(num_stages - 1)] + [last]
