"""A model cut into stages: at named layers, or so that the largest stage computes as little as possible.

`raysim.workloads.cuts` chooses the cuts. Inserts learned bottlenecks at them, and counts the costs of each stage;
`raysim.pipeline` runs the stages.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raysim.notation import check_integer
from raysim.values import BoundaryTensors
from raysim.workloads.bottleneck import with_bottleneck
from raysim.workloads.cuts import CutChoice, balance, cheapest, choices
from raysim.workloads.footprint import Footprint
from raysim.workloads.losses import Loss, check_loss, make_loss
from raysim.workloads.model_depths import check_num_stages
from raysim.workloads.splits import DataShape
from raysim.workloads.stage_costs import LayerCost, Shadow, named_layers


class Tied(NamedTuple):
    """One parameter used by two stages: each has an equal copy, and their gradients are added."""

    stage: int
    name: str  # as in the stage's `named_parameters`
    other_stage: int
    other_name: str


@dataclass(frozen=True, eq=False)
class Partition:
    """The stages of a model and their costs for one microbatch; see `partition`."""

    stages: list[nn.Sequential]
    """The model's layers under their names; each stage owns its parameters."""
    cuts: tuple[str, ...]
    """The names of the last layers of all stages but the last."""
    cut_choices: tuple[CutChoice, ...]
    """For each cut, its bytes; beside an automatic one the cut by work alone, beside a given one a cheaper cut, if they differ."""
    boundaries: tuple[BoundaryTensors, ...]
    """For each cut, the tensors that cross it with one microbatch."""
    num_parameters: tuple[int, ...]
    """For each stage, the number of values that it learns; a tied parameter counts in each of its stages."""
    flops_forward: tuple[int, ...]
    """For each stage, the operations of one microbatch's forward, two for a multiplication and addition."""
    tied: tuple[Tied, ...]
    """Parameters that are in two stages; a parameter of more stages has an entry for each stage after the first."""
    shadow: Shadow
    """The model on fake tensors."""
    spans: tuple[tuple[int, int], ...]
    """For each stage, its first layer and the one after its last."""

    def footprints(self, *, two_parts: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Footprint, ...]:
        """Return the bytes of one microbatch's tensors at each stage; `dtype` is that of the computation, by autocast.

        `two_parts`: whether backwards have two parts. The loss belongs to the last stage.
        """
        return tuple(self.shadow.footprint(*span, two_parts=two_parts, dtype=dtype) for span in self.spans)

    def weight_shares(self, dtype: torch.dtype = torch.float32) -> tuple[float, ...]:
        """Return weight gradients' share of each stage's backward, counted in operations; 1 at the first stage.

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
) -> Partition:
    """Return `model` cut after the layers named in `cuts`, or into `num_stages` with the largest stage as small as possible.

    The size of a stage is its number of forward operations; for equal sizes, the bytes of the layers' outputs decide.
    `balance` defines the choice among equally good cuts. Each cut then moves to where fewer bytes cross, if the stages
    compute about as much: see `cheapest`. `batch` is the number of samples in a microbatch. `loss`
    defaults to the loss for the kind of targets. Nothing is computed. With `bottleneck` the stages at a cut get one
    more layer each, drawn from `seed`: see `with_bottleneck`. Raises ValueError naming the field, or the layer that is
    unfit.

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
    modules = named_layers(model)
    names = list(modules)
    if num_stages is not None:
        check_num_stages(check_integer("num_stages", num_stages, 1), len(names))
    ends = [*_ends(cuts, names), len(names)] if cuts is not None else []
    loss = loss if loss is not None else make_loss(None, {}, shape)
    shadow = Shadow(model, shape, batch, loss)
    if num_stages is not None:
        balanced = balance([(layer.flops, layer.output_bytes) for layer in shadow.layers], int(num_stages))
        ends = cheapest(shadow.layers, balanced)
    _check_boundaries(shadow.layers, ends, batch)
    check_loss(loss, shadow.layers[-1].name, shadow.layers[-1].output.shape, shape)
    if bottleneck is not None:
        layers = [shadow.layers[end - 1] for end in ends[:-1]]
        widened, cuts = _widened(model, layers, bottleneck, seed, bottleneck_form)
        return partition(widened, shape, cuts=cuts, batch=batch, loss=loss)
    others = balanced if num_stages is not None else cheapest(shadow.layers, ends)
    spans = tuple(pairwise([0, *ends]))
    parts = [nn.Sequential(OrderedDict((name, modules[name]) for name in names[start:stop])) for start, stop in spans]
    return Partition(
        stages=[copy.deepcopy(part) for part in parts],
        cuts=tuple(names[end - 1] for end in ends[:-1]),
        cut_choices=choices(shadow.layers, ends, others),
        boundaries=tuple(shadow.layers[end - 1].output for end in ends[:-1]),
        num_parameters=tuple(sum(parameter.numel() for parameter in part.parameters()) for part in parts),
        flops_forward=tuple(sum(layer.flops for layer in shadow.layers[start:stop]) for start, stop in spans),
        tied=_find_tied(parts),
        shadow=shadow,
        spans=spans,
    )


def _widened(
    model: nn.Sequential, layers: list[LayerCost], bottleneck: int | Sequence[int], seed: int, form: str
) -> tuple[nn.Sequential, list[str]]:
    """Return `model` with a bottleneck after each of `layers`, and its cuts; raises ValueError if several tensors cross."""
    several = next((layer.name for layer in layers if layer.output.several), None)
    if several is not None:
        raise ValueError(f"`bottleneck` needs one tensor at a boundary, but several cross after layer `{several}`.")
    return with_bottleneck(model, [(layer.name, layer.output.shape) for layer in layers], bottleneck, seed, form)


def _ends(cuts: Sequence[str], names: list[str]) -> list[int]:
    """Return the number of layers up to each cut."""
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise ValueError(f"`cuts` must be a list of names of layers, but got {cuts!r}.")
    known = ", ".join(names)
    cuts = [
        cut.replace(".", "/") if isinstance(cut, str) and cut not in names else cut for cut in cuts
    ]  # of a submodule
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
    """Return the trained parameters that several parts use: copies of a frozen one stay equal by themselves.

    Raises ValueError for a shared buffer, whose copies would drift; buffers that are no part of the state are constants.
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
