"""Cut a model into stages: at named layers, or so that the largest stage computes as little as possible.

Among cuts with about the same work, the one that sends the fewest bytes is chosen. Learned bottlenecks are inserted at the cuts,
and the costs of each stage are counted; `raysim.pipeline` runs the stages.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raysim.notation import check_integer
from raysim.units import format_bytes
from raysim.values import BoundaryTensors
from raysim.workloads.bottleneck import with_bottleneck
from raysim.workloads.losses import Loss, check_loss
from raysim.workloads.options import check_num_stages
from raysim.workloads.splits import DataShape
from raysim.workloads.stage_costs import Footprint, LayerCost, Shadow, named_layers

TOLERANCE = 0.01  # share of the largest stage's operations by which a cut may move to send fewer bytes
SHOWN = 8  # most cuts to list by name


class Cut(NamedTuple):
    """A cut after a layer, and the tensors that cross it."""

    layer: str
    tensors: int
    sent_bytes: int  # uncompressed, per microbatch: activations and gradients


class CutWithAlternative(NamedTuple):
    """A cut, and the alternative with about the same work; None if there is none."""

    cut: Cut
    other: Cut | None


class Tied(NamedTuple):
    """A parameter shared by two stages: each has an equal copy, and their gradients are added."""

    stage: int
    name: str  # as in the stage's `named_parameters`
    other_stage: int
    other_name: str


@dataclass(frozen=True, eq=False)
class Partition:
    """The stages of a model and their costs for one microbatch; see `partition`."""

    stages: list[nn.Sequential]  # the layers keep their names; each stage owns its parameters
    cuts: tuple[str, ...]  # the names of the last layers of all stages but the last
    cut_choices: tuple[CutWithAlternative, ...]
    """Each cut with its bytes, and an alternative: for automatic cuts the one by work alone, for given cuts a cheaper one."""
    boundaries: tuple[BoundaryTensors, ...]  # for each cut, the tensors that cross it with one microbatch
    num_parameters: tuple[int, ...]  # by stage; a tied parameter counts in each of its stages
    flops_forward: tuple[int, ...]  # by stage, per microbatch; a multiply-add counts as two
    tied: tuple[Tied, ...]
    """Parameters shared by two stages; those of more stages have an entry for each stage after the first."""
    shadow: Shadow  # the model on fake tensors
    spans: tuple[tuple[int, int], ...]  # for each stage, its first layer and the one after its last

    def footprints(self, *, two_parts: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Footprint, ...]:
        """Return the bytes of one microbatch's tensors at each stage; `dtype` is autocast's.

        `two_parts`: whether backwards have two parts. The loss belongs to the last stage.
        """
        return tuple(self.shadow.footprint(*span, two_parts=two_parts, dtype=dtype) for span in self.spans)

    def weight_shares(self, dtype: torch.dtype = torch.float32) -> tuple[float, ...]:
        """Return the weight gradients' share of the operations in each stage's backward; 1 at the first stage.

        NaN at a stage whose backward cannot run on fake tensors.
        """
        return tuple(footprint.weight_share for footprint in self.footprints(two_parts=True, dtype=dtype))


def partition(
    model: nn.Sequential,
    shape: DataShape,
    *,
    num_stages: int | None = None,
    cuts: Sequence[str] | None = None,
    batch: int,
    bottleneck: int | Sequence[int] | None = None,
    bottleneck_form: str = "linear",
    seed: int = 0,
    loss: Loss | None = None,
    shadow: Shadow | None = None,
) -> Partition:
    """Return `model` cut after the layers `cuts`, or into `num_stages` with the largest stage as small as possible.

    The size of a stage is its number of forward operations, with ties broken by the bytes of the layers' outputs, see
    `balance`. Each cut then moves to a layer that sends fewer bytes, if the stages still compute about as much: see
    `cheapest`. `batch`: samples in a microbatch. `loss`: by default the loss for this kind of targets. Nothing is computed.
    `shadow`: an existing one for the same model, batch and loss. With `bottleneck` the stages at a cut get one more layer each,
    drawn from `seed`: see `with_bottleneck`. Raises ValueError naming the field or the unfit layer.

    >>> from raysim.workloads.data import DataShape
    >>> from raysim.workloads.models import build_model
    >>> shape = DataShape((1, 8, 8), "float32", 10)
    >>> parts = partition(build_model("cnn", {}, shape, seed=0), shape, num_stages=3, batch=4)
    >>> parts.cuts, [boundary.shape for boundary in parts.boundaries], parts.num_parameters
    (('conv2', 'conv4'), [(4, 16, 8, 8), (4, 32, 4, 4)], (2480, 13888, 52682))
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward or not len(model):
        raise ValueError(
            f"A model to be cut must be an nn.Sequential of layers, with no forward of its own, "
            f"but got {type(model).__name__}."
        )
    if (num_stages is None) == (cuts is None):
        raise ValueError("Exactly one of `num_stages` and `cuts` must be given.")
    names = list(named_layers(model))
    if num_stages is not None:
        num_stages = check_integer("num_stages", num_stages, 1)
        check_num_stages(num_stages, len(names))
    ends = [] if cuts is None else [*_ends(cuts, names), len(names)]
    if shadow is None or [layer.name for layer in shadow.layers] != names:
        shadow = Shadow(model, shape, batch, loss)
    layers = shadow.layers
    if num_stages is None:
        others = cheapest(layers, ends)
    else:
        others = balance([(layer.flops, layer.output_bytes) for layer in layers], num_stages)
        ends = cheapest(layers, others)
    _check_boundaries(layers, ends, batch)
    check_loss(shadow.loss, layers[-1].name, layers[-1].output.shape, shape)
    if bottleneck is not None:
        sending = [layers[end - 1] for end in ends[:-1]]
        several = next((layer.name for layer in sending if layer.output.several), None)
        if several is not None:
            raise ValueError(f"`bottleneck` needs one tensor at a boundary, but several cross after layer `{several}`.")
        outputs = [(layer.name, layer.output.shape) for layer in sending]
        model, cuts = with_bottleneck(model, outputs, bottleneck, seed, bottleneck_form)
        return partition(model, shape, cuts=cuts, batch=batch, loss=shadow.loss)
    return _parts(model, shadow, ends, others)


def _parts(model: nn.Sequential, shadow: Shadow, ends: Sequence[int], others: Sequence[int]) -> Partition:
    """Return the stages that end at `ends`; `others` are the alternative cuts."""
    modules, layers, spans = named_layers(model), shadow.layers, tuple(pairwise([0, *ends]))
    parts = [
        nn.Sequential(OrderedDict((layer.name, modules[layer.name]) for layer in layers[start:stop]))
        for start, stop in spans
    ]

    def cut(end: int) -> Cut:
        output = layers[end - 1].output
        return Cut(layers[end - 1].name, len(output.shapes) + len(output.exact_bytes), layers[end - 1].sent_bytes)

    pairs = list(zip(ends[:-1], others[:-1], strict=True))
    return Partition(
        stages=[copy.deepcopy(part) for part in parts],
        cuts=tuple(layers[end - 1].name for end in ends[:-1]),
        cut_choices=tuple(CutWithAlternative(cut(end), cut(other) if other != end else None) for end, other in pairs),
        boundaries=tuple(layers[end - 1].output for end in ends[:-1]),
        num_parameters=tuple(sum(parameter.numel() for parameter in part.parameters()) for part in parts),
        flops_forward=tuple(sum(layer.flops for layer in layers[start:stop]) for start, stop in spans),
        tied=_find_tied(parts),
        shadow=shadow,
        spans=spans,
    )


def _ends(cuts: Sequence[str], names: list[str]) -> list[int]:
    """Return the number of layers up to each cut."""
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise ValueError(f"`cuts` must be a list of names of layers, but got {cuts!r}.")
    known = ", ".join(names)
    # a submodule's name may have dots
    cuts = [cut.replace(".", "/") if isinstance(cut, str) and cut not in names else cut for cut in cuts]
    for cut in cuts:
        if cut not in names:
            raise ValueError(f"`cuts` must name layers of the model ({known}), but got {cut!r}.")
        if cut == names[-1]:
            raise ValueError(f"`cuts` must leave a layer after the last cut, but got {cut!r}, the last layer.")
    ends = [names.index(cut) + 1 for cut in cuts]
    if any(first >= second for first, second in pairwise(ends)):
        raise ValueError(f"`cuts` must be in the order of the layers ({known}), each once, but got {list(cuts)}.")
    return ends


def _check_boundaries(layers: list[LayerCost], ends: list[int], batch: int) -> None:
    for end in ends:
        layer = layers[end - 1]
        for name, shape in layer.output.shapes.items():
            of = f" of `{name}`" if name else ""
            if shape[:1] != (batch,):
                raise ValueError(
                    f"Layer `{layer.name}` must keep the samples ({batch}) on the first axis, "
                    f"but returns the shape {shape}{of}."
                )
            if not layer.output_dtypes[name].is_floating_point:
                raise ValueError(
                    f"Layer `{layer.name}` must return floating-point numbers, so that a gradient can come back, "
                    f"but returns {layer.output_dtypes[name]}."
                )


def _find_tied(parts: list[nn.Sequential]) -> tuple[Tied, ...]:
    """Return the trained parameters shared by several parts; copies of a frozen one stay equal anyway.

    Raises ValueError for a shared buffer, whose copies would drift; non-persistent buffers count as constants.
    """
    owners: dict[Tensor, tuple[int, str]] = {}
    tied = []
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            owner, owner_name = owners.setdefault(parameter, (stage, name))
            if owner != stage and parameter.requires_grad:
                tied.append(Tied(owner, owner_name, stage, name))
        state = part.state_dict()
        for name, buffer in part.named_buffers():
            if name not in state:
                continue
            owner, owner_name = owners.setdefault(buffer, (stage, name))
            if owner != stage:
                raise ValueError(
                    f"Buffer `{owner_name}` of stage {owner} must not be in stage {stage} too, as `{name}`. "
                    "Cut elsewhere."
                )
    return tuple(tied)


def cheapest(layers: Sequence[LayerCost], ends: Sequence[int]) -> list[int]:
    """Return the stage ends with the fewest sent bytes among those with about the same work as `ends`.

    Each cut may move by `TOLERANCE` of the largest stage's operations. Ties are broken by the fewest moved cuts.
    """
    work = list(accumulate((layer.flops for layer in layers), initial=0))
    slack = TOLERANCE * max(work[stop] - work[start] for start, stop in pairwise([0, *ends]))
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}  # by the last cut: bytes, moved cuts, cuts
    for end in ends[:-1]:
        near = [
            other
            for other in range(1, len(layers))
            if other == end or (abs(work[other] - work[end]) <= slack and _can_end(layers[other - 1], layers[end - 1]))
        ]
        best = {
            other: min(
                (sent + layers[other - 1].sent_bytes, moved + (other != end), (*cuts, other))
                for last, (sent, moved, cuts) in best.items()
                if last < other
            )
            for other in near
            if min(best) < other
        }
    return [*min(best.values())[2], ends[-1]]


def _can_end(layer: LayerCost, like: LayerCost) -> bool:
    """Return whether a stage can end with a layer: its output has the batch size of `like`, and a gradient."""
    samples = {shape[:1] for shape in like.output.shapes.values()}
    return {shape[:1] for shape in layer.output.shapes.values()} == samples and all(
        dtype.is_floating_point for dtype in layer.output_dtypes.values()
    )


def cut_lines(cuts: Sequence[CutWithAlternative]) -> list[str]:
    """Return lines with the bytes that cross each cut, and the alternative cuts with about the same work."""
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
    """Return the ends of `num_stages` consecutive parts of `costs` that minimise the largest sum.

    Ties are broken by the smallest sum of squares, so that the other stages are balanced too, and then by the first
    solution. Costs are compared by their first number, then by their second.

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
    """Return, for 1 to `num_stages` stages and each first layer, the least total price of the layers from there on."""
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
