"""Cuts of a model: stages of equal work, and among cuts of about equal work those that send the fewest bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from raysim.units import format_bytes

if TYPE_CHECKING:
    from raysim.workloads.stage_costs import LayerCost

TOLERANCE = 0.01  # of the largest stage's operations: how far a cut may move to send fewer bytes
SHOWN = 8  # cuts named one by one


class Cut(NamedTuple):
    """A cut after a layer, and what crosses it."""

    layer: str
    tensors: int
    sent_bytes: int
    """Of one microbatch, uncompressed: its tensors, and the gradients that come back."""


class CutChoice(NamedTuple):
    """A cut, and the cut of as much work that was considered beside it; None if it would be the same."""

    cut: Cut
    other: Cut | None


def cheapest(layers: Sequence[LayerCost], ends: Sequence[int]) -> list[int]:
    """Return the ends of stages that send the fewest bytes among those of about the same work as `ends`.

    Each cut may move by `TOLERANCE` of the largest stage's operations. Cuts that send equally much stay where they are.
    """
    work = list(accumulate((layer.flops for layer in layers), initial=0))
    slack = TOLERANCE * max(work[stop] - work[start] for start, stop in pairwise([0, *ends]))
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}  # by the last cut: bytes, moved cuts, cuts
    for end in ends[:-1]:
        near = [
            place
            for place in range(1, len(layers))
            if place == end or (abs(work[place] - work[end]) <= slack and _can_end(layers[place - 1], layers[end - 1]))
        ]
        best = {
            place: min(
                (sent + layers[place - 1].sent_bytes, moved + (place != end), (*cuts, place))
                for last, (sent, moved, cuts) in best.items()
                if last < place
            )
            for place in near
            if min(best) < place
        }
    return [*min(best.values())[2], ends[-1]]


def _can_end(layer: LayerCost, like: LayerCost) -> bool:
    """Return whether a stage can end with a layer: it keeps the samples apart, as `like` does, and has a gradient."""
    samples = {shape[:1] for shape in like.output.shapes.values()}
    return {shape[:1] for shape in layer.output.shapes.values()} == samples and all(
        dtype.is_floating_point for dtype in layer.output_dtypes.values()
    )


def choices(layers: Sequence[LayerCost], ends: Sequence[int], others: Sequence[int]) -> tuple[CutChoice, ...]:
    """Return each cut of `ends` beside that of `others`."""

    def cut(end: int) -> Cut:
        layer = layers[end - 1]
        return Cut(layer.name, len(layer.output.shapes) + len(layer.output.exact_bytes), layer.sent_bytes)

    pairs = zip(ends[:-1], others[:-1], strict=True)
    return tuple(CutChoice(cut(end), cut(other) if other != end else None) for end, other in pairs)


def cut_lines(cuts: Sequence[CutChoice]) -> list[str]:
    """Return lines with the bytes that cross each cut, and with the cuts of as much work that would send less or more."""
    if not cuts:
        return []
    sizes = [choice.cut.sent_bytes for choice in cuts]
    if len(set(sizes)) > 1 and len(cuts) <= SHOWN:
        parts = [f"`{choice.cut.layer}` {format_bytes(choice.cut.sent_bytes)}" for choice in cuts]
        sent = f"after {', '.join(parts)}"
    else:
        names = [f"`{choice.cut.layer}`" for choice in cuts]
        listed = ", ".join(names) if len(names) <= SHOWN else f"{names[0]} to {names[-1]} ({len(names)} cuts)"
        span = format_bytes(min(sizes)) + (f" to {format_bytes(max(sizes))}" if len(set(sizes)) > 1 else "")
        sent = f"after {listed}, {span}{' each' if len(set(sizes)) == 1 < len(sizes) else ''}"
    moved = [choice for choice in cuts if choice.other is not None]
    lines = [f"Cuts: {sent}; uncompressed, of a microbatch and back"]
    for choice in moved[:SHOWN]:
        assert choice.other is not None
        lines.append(f"  {_words(choice.cut)}; a cut after {_words(choice.other, 'would send')}, for as much work")
    if len(moved) > SHOWN:
        lines.append(f"  and {len(moved) - SHOWN} more")
    return lines


def _words(cut: Cut, verb: str = "sends") -> str:
    tensors = "1 tensor" if cut.tensors == 1 else f"{cut.tensors} tensors"
    return f"`{cut.layer}` {verb} {tensors}, {format_bytes(cut.sent_bytes)}"


def balance(costs: Sequence[tuple[int, int]], num_stages: int) -> list[int]:
    """Return the end of each of `num_stages` consecutive parts of `costs`, with the largest sum as small as possible.

    Ties are broken by the smallest sum of squares, so that the other stages are balanced too, and then by the first
    solution. Costs are compared by their first number, and if these are equal, by their second.

    >>> balance([(4, 0), (1, 0), (1, 0), (1, 0), (1, 0)], 3)
    [1, 3, 5]
    """
    count = len(costs)
    scale = sum(second for _, second in costs) + 1  # one unit of the first outweighs all of the second
    sums = list(accumulate((first * scale + second for first, second in costs), initial=0))
    bound = _least_totals(sums, num_stages, lambda size: size, max)[-1][0]
    too_much = (sums[-1] + 1) ** 2  # more than the squares of all stages together

    def price(size: int) -> int:
        return size**2 if size <= bound else too_much

    totals = _least_totals(sums, num_stages, price, add)
    ends = [0]
    for rest, total in pairwise(reversed(totals)):
        prices = {end: price(sums[end] - sums[ends[-1]]) + after for end, after in total.items() if end > ends[-1]}
        ends.append(next(end for end in prices if prices[end] == rest[ends[-1]]))
    return [*ends[1:], count]


def _least_totals(
    sums: list[int], num_stages: int, price: Callable[[int], int], join: Callable[[int, int], int]
) -> list[dict[int, int]]:
    """Return, for 1 to `num_stages` stages and each layer to start from, the least total price from there on."""
    count = len(sums) - 1
    totals = [{start: price(sums[count] - sums[start]) for start in range(count)}]
    for stages in range(2, num_stages + 1):
        totals.append(
            {
                start: min(
                    join(price(sums[end] - sums[start]), totals[-1][end])
                    for end in range(start + 1, count - stages + 2)
                )
                for start in range(count - stages + 1)
            }
        )
    return totals
