"""MuLoCo: DiLoCo with Muon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.replication.local import DiLoCo


@dataclass(frozen=True, repr=False)
class MuLoCo(DiLoCo):
    """DiLoCo with Muon as the inner optimiser and the paper's outer momentum (Thérien et al. 2025, 2505.23725; their code
    exchanges every 30 steps).

    Use: DiLoCo with `optimizer.name=muon`.
    """

    variants: ClassVar[tuple[str, ...]] = ("MuLoCo(30)",)
    optimizers: ClassVar[frozenset[str] | None] = frozenset({"muon"})

    momentum: float = 0.6
