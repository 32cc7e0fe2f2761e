"""Replica gradients through any compressor: each replica's packets go to all others, which average what they decode."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from raysim.codecs import CODECS, Codec, Identity
from raysim.compressors.base import Compressor, Plain
from raysim.compressors.replica import (
    Averaged,
    Gradients,
    Memory,
    Received,
    ReplicaContext,
    ReplicaMethod,
    Round,
    all_reduce,
)
from raysim.notation import parse as parse_notation


@dataclass(frozen=True, repr=False)
class Dense(ReplicaMethod):
    """The uncompressed mean, by an all-reduce; written `Identity`."""

    def __repr__(self) -> str:
        return repr(Identity())

    def num_rounds(self, num_replicas: int) -> int:
        return 2

    def average(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        if not gradients:
            return Averaged({}, memory)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        mean = (yield from all_reduce("dense", flat, context.replica, context.num_replicas)) / context.num_replicas
        parts = torch.split(mean, [gradient.numel() for gradient in gradients.values()])
        averaged = {
            name: part.view_as(gradient) for (name, gradient), part in zip(gradients.items(), parts, strict=True)
        }
        return Averaged(averaged, memory)


METHODS: dict[str, type[ReplicaMethod]] = {}


def parse_replica_method(text: str) -> ReplicaMethod:
    """Return the replica method that `text` writes; raises ValueError, with the known names, where it is none.

    >>> parse_replica_method("Identity")
    Identity
    """
    result = parse_notation(text, {**CODECS, **METHODS}, kind="replica method")
    if isinstance(result, Plain):
        result = result.codec
    if isinstance(result, Identity):
        return Dense()
    if isinstance(result, (Codec, Compressor)):
        raise ValueError(f"{text!r} cannot average replica gradients yet")
    assert isinstance(result, ReplicaMethod)
    return result
