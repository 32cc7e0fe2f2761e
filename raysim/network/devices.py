"""Datasheet figures of common GPUs: what a profile from shapes is computed from. Nothing here was measured by us."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """A device by its datasheet."""

    peak_flops: float
    """Dense (no sparsity) tensor-core FLOP/s at 16 bits."""
    memory_bytes: int


# Vendors' datasheets; where those quote figures with sparsity, half of them. Consumer cards: 16 bits in, 32 bits accumulated.
DEVICES: dict[str, Device] = {
    "T4": Device(65e12, 16 * 10**9),
    "V100": Device(125e12, 32 * 10**9),
    "A10G": Device(70e12, 24 * 10**9),
    "L4": Device(121e12, 24 * 10**9),
    "L40S": Device(362e12, 48 * 10**9),
    "RTX3090": Device(71e12, 24 * 10**9),
    "RTX4090": Device(165e12, 24 * 10**9),
    "A100": Device(312e12, 80 * 10**9),
    "H100": Device(989e12, 80 * 10**9),
    "H200": Device(989e12, 141 * 10**9),
    "B200": Device(2250e12, 180 * 10**9),
}
