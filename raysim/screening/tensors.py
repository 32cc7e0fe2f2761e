"""Statistics of the tensors at the cuts, and the groups of values that suit them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from raysim.codecs.groups import channels_last

MASSIVE = 30.0
"""Largest magnitude over root mean square from which one range for a tensor wastes its levels: 8 bits of a range of +-30 root
mean squares have steps of a quarter of one."""
LARGEST = 1e-3  # share of values called the largest
MOST = 0.5  # share of the largest values whose channels and rows are counted


class TensorFacts(NamedTuple):
    """The dense messages of one link; shares are means over messages."""

    direction: str
    boundary: int
    tensor: str
    rms: float
    largest: float
    """Magnitude."""
    energy: float
    """Share of the squared norm held by the largest 0.1 % of the values."""
    channels: float
    """Share of channels that hold half of these values."""
    rows: float
    """Share of rows (tokens) that hold half of them."""

    @property
    def peak(self) -> float:
        """The largest magnitude over the root mean square."""
        return self.largest / self.rms if self.rms else 0.0

    @property
    def massive(self) -> bool:
        """True if one range for the tensor wastes its levels."""
        return self.peak >= MASSIVE


class TensorWatch:
    """Collects the facts of messages to be sent; call it with each."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], list[tuple[float, int, float, float, float, float]]] = defaultdict(list)

    def __call__(self, direction: str, boundary: int, name: str, x: Tensor) -> None:
        flat = x.detach().reshape(-1).double()
        squares = flat.square()
        count = max(1, math.ceil(LARGEST * flat.numel()))
        top = squares.topk(count)
        total = float(squares.sum())
        shape = channels_last(tuple(x.shape))
        order = x.detach().reshape(-1)
        if len(shape) > 2 and shape != tuple(x.shape):  # images: channels are an inner axis
            order = x.detach().movedim(1, -1).reshape(-1)
        positions = order.abs().topk(count).indices
        width = shape[-1]
        channels = _holding(positions % width, width)
        rows = _holding(positions // width, max(1, flat.numel() // width))
        share = float(top.values.sum()) / total if total else 0.0
        entry = (total, flat.numel(), math.sqrt(float(top.values[0])), share, channels, rows)
        self._seen[direction, boundary, name].append(entry)

    def facts(self) -> list[TensorFacts]:
        """Return the facts of each link, forwards first."""
        facts = []
        for (direction, boundary, name), entries in sorted(
            self._seen.items(), key=lambda item: item[0][0] != "forward"
        ):
            totals, counts, largest, *shares = zip(*entries, strict=True)
            means = [sum(share) / len(share) for share in shares]
            rms = math.sqrt(sum(totals) / max(1, sum(counts)))
            facts.append(TensorFacts(direction, boundary, name, rms, max(largest), *means))
        return sorted(facts, key=lambda each: (each.direction != "forward", each.boundary))


def _holding(indices: Tensor, size: int) -> float:
    """Return the share of `size` groups, largest first, that hold half of the values at `indices`."""
    counts = torch.bincount(indices, minlength=size).sort(descending=True).values.cumsum(0)
    return (int((counts < MOST * int(counts[-1])).sum()) + 1) / size


def sentences(facts: Iterable[TensorFacts]) -> list[str]:
    """Return a sentence for each direction: the tensors' statistics and the conclusion."""
    lines = []
    for direction, noun in (("forward", "activation"), ("backward", "gradient")):
        own = [each for each in facts if each.direction == direction]
        if not own:
            continue
        worst = max(own, key=lambda each: each.peak)
        named = f" of {noun} `{worst.tensor}`" if worst.tensor else f" of the {noun}"
        words = (
            f"At cut {worst.boundary + 1} the largest value{named} is {worst.peak:.0f} times the root mean square; "
            f"0.1 % of the values hold {100 * worst.energy:.2g} % of the energy"
        )
        if worst.massive:
            channels, rows = (f"{100 * share:.2g} %" for share in (worst.channels, worst.rows))
            lines.append(
                f"{words}, half of these in {channels} of the channels and {rows} of the rows: one range for a tensor wastes its "
                "levels; group by `row` or `block`, or send the largest values separately."
            )
        else:
            lines.append(f"{words}: one range for a tensor may do.")
    return lines
