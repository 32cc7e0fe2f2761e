"""Compressed boundaries inside a model, in one process and without Ray."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from raysim.codecs import NonFiniteError
from raysim.codecs.codec import Support
from raysim.compressors import Compressor, Context, parse, share_indices
from raysim.nn.boundary import BoundaryModule, custom_gradient
from raysim.pipeline.link import DIRECTIONS, EVALUATION_MODES
from raysim.random import derive_key

if TYPE_CHECKING:
    import pandas as pd


class CompressedLink(BoundaryModule):
    """A compressed boundary inside any model: activations go through one compressor, their gradients through another.

    `forward` and `backward` are in raysim's notation. The link holds both sides with their memories, and sends the same messages
    as raysim's stages: the losses are bit for bit those of `raysim.train` with the same cuts.

    `num_microbatches` calls in training mode make a step; a memory keyed by slot belongs to one of these calls. If a step has
    fewer, `end_step` ends it. Memories keyed by sample need `raysim.nn.samples`. `boundary` and `replica` distinguish the
    keys of random codecs. `shared_indices` sends gradients at the positions kept by the activation. Fidelity is measured
    every `measure_every_steps` steps, 0 for never. `scaler` scales the loss: memories of gradients follow its scale, and an
    overflow, which it skips, changes none of them.

    In evaluation mode, and without gradients, memories are neither used nor changed. The attribute `evaluation` then selects the
    messages, of activations and of any gradients: "on" (the codec's packet), "off" (uncompressed) or "on_direct" (see `AQSGD`). Do
    not put a link inside an activation-checkpointed block, which would send each message twice.

    Raises ValueError if a notation is invalid or cannot be used outside of a run.

    >>> link = CompressedLink("TopK(0.5)")
    >>> link(torch.tensor([[1.0, -2.0, 3.0, 0.5]]))
    tensor([[ 0., -2.,  3.,  0.]])
    """

    def __new__(cls, *arguments: object, **named: object) -> CompressedLink:
        """Make a link, which `torch.compile` leaves as it is."""
        _stay_eager()
        return super().__new__(cls)

    def __init__(
        self,
        forward: str = "Identity",
        backward: str = "Identity",
        *,
        boundary: int = 0,
        num_microbatches: int = 1,
        shared_indices: bool = False,
        seed: int = 0,
        replica: int = 0,
        measure_every_steps: int = 10,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(
            parse_methods(forward, backward, shared_indices=shared_indices),
            [(direction, sender) for direction in DIRECTIONS for sender in (True, False)],
            boundary=boundary,
            num_microbatches=num_microbatches,
            seed=seed,
            replica=replica,
            measure_every_steps=measure_every_steps,
            scaler=scaler,
        )
        self._skips = self._scales["backward", True].scaler is not None  # steps whose gradients overflow
        self.shared_indices = shared_indices
        self.evaluation = "on"

    def forward(self, x: Tensor) -> Tensor:
        """Return the received tensor, of the shape and dtype of `x`.

        Raises NonFiniteError if `x` holds NaN or infinity, and its backward if the gradient does, unless there is an
        enabled scaler.
        """
        if not self.training or not torch.is_grad_enabled():
            return self._evaluate(x)
        self.settle()
        context = self.context(x.shape)
        kept: list[Support] = []
        forward = partial(self._cross, context, kept)
        backward = partial(self._cross, self.of_gradient(context), kept)
        received = custom_gradient(x, forward, self._skipping(backward))
        self.microbatch += 1
        return received

    def _cross(self, context: Context, kept: list[Support], x: Tensor) -> Tensor:
        """Send a tensor and return the received tensor, in its own memory; `kept` as in `_cross_evaluation`."""
        direction = context.direction
        if kept:
            context = context._replace(support=kept[0])
        with self.links[direction, True].on(x.device) as sender, self.links[direction, False].on(x.device) as receiver:
            message = sender.send(x, context, measure=self.measures())
            y = receiver.receive(message, context)
        if self.shared_indices and direction == "forward":
            kept.append(sender.support())
        return _own_memory(y, x)

    def _skipping(self, backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a backward that passes an overflow on as NaN if a scaler skips its step."""

        def passed(gradient: Tensor) -> Tensor:
            try:
                return backward(gradient)
            except NonFiniteError:
                if not self._skips:
                    raise
                return torch.full_like(gradient, math.nan)

        return passed

    def _evaluate(self, x: Tensor) -> Tensor:
        if self.evaluation not in EVALUATION_MODES:
            raise ValueError(f"`evaluation` must be one of {', '.join(EVALUATION_MODES)}, but got {self.evaluation!r}.")
        self.settle()
        key = self.evaluation_key()
        kept: list[Support] = []
        forward = partial(self._cross_evaluation, "forward", self.evaluation, key, kept)
        backward = partial(self._cross_evaluation, "backward", self.evaluation, derive_key(key, "backward"), kept)
        return custom_gradient(x, forward, self._skipping(backward))

    def _cross_evaluation(self, direction: str, mode: str, key: int, kept: list[Support], x: Tensor) -> Tensor:
        """Send a tensor in an evaluation mode; `kept` passes the activation's support on if its gradient shares it."""
        ends = (self.links[direction, True], self.links[direction, False])
        with ends[0].on(x.device) as sender, ends[1].on(x.device) as receiver:
            values = x.reshape(-1)[kept[0].positions] if kept else x
            message = sender.send_evaluation(values, mode, key)
            y = receiver.receive_evaluation(message)
        if kept:
            full = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
            return full.index_copy_(0, kept[0].positions.view(-1), y.view(-1)).view(x.shape)
        if self.shared_indices and mode != "off":
            kept.append(sender.support())
        return _own_memory(y, x)


@functools.cache
def _stay_eager() -> None:
    """Exclude links from `torch.compile`, when the first one is made: the compiler takes a second to import."""
    CompressedLink.forward = torch.compiler.disable(CompressedLink.forward)  # type: ignore[method-assign, no-untyped-call]


def _own_memory(y: Tensor, x: Tensor) -> Tensor:
    """Return `y`, or a copy of it if it shares memory with `x`."""
    held = x.untyped_storage()  # of which `x` may be a part, as a chunk of a batch is
    return y.clone() if held.data_ptr() <= y.data_ptr() < held.data_ptr() + held.nbytes() else y


def parse_methods(forward: str, backward: str, *, shared_indices: bool = False) -> tuple[Compressor, Compressor]:
    """Return the compressors of a boundary; raises ValueError if one cannot be used outside of a run."""
    methods = parse(forward), parse(backward)
    for field, method in zip(DIRECTIONS, methods, strict=True):
        if field not in method.directions:
            raise ValueError(
                f"`{field}` cannot be {method!r}, which is for {' and '.join(method.directions)} messages."
            )
        if method.needs:
            raise ValueError(
                f"`{field}` cannot be {method!r} outside of `raysim train`, since it depends on the whole step."
            )
    if not shared_indices:
        return methods
    return methods[0], share_indices(*methods)


def insert_links(
    model: nn.Sequential,
    cuts: Sequence[str],
    *,
    forward: str | Sequence[str] = "Identity",
    backward: str | Sequence[str] = "Identity",
    num_microbatches: int = 1,
    shared_indices: bool = False,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> nn.Sequential:
    """Return a Sequential of the same named layers, with a `CompressedLink` after each layer named in `cuts`.

    `forward` and `backward` are one notation for all links, or a list with one for each. The links are named `link0`,
    `link1`, ... With the same cuts, seed and microbatches, they send the same bits as a run of `raysim.train`. The other arguments
    are as in `CompressedLink`.

    Raises ValueError if a cut is not a layer of the model or is its last layer, or the model has a layer of a link's name.

    >>> model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Linear(4, 2)))
    >>> list(dict(insert_links(model, ["first"], forward="TopK(0.5)").named_children()))
    ['first', 'link0', 'second']
    """
    layers = dict(model.named_children())
    _check_cuts(list(layers), cuts)
    notations = by_boundary(forward, backward, len(cuts))
    check_notations(notations, len(cuts), "cut")
    taken = next((f"link{i}" for i in range(len(cuts)) if f"link{i}" in layers), None)
    if taken is not None:
        raise ValueError(
            f"`model` must have no layer named as a new link, but has `{taken}`. Insert all links at once."
        )
    linked: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in layers.items():
        linked[name] = layer
        if name in cuts:
            boundary = list(cuts).index(name)
            linked[f"link{boundary}"] = CompressedLink(
                *(notations[field][boundary] for field in DIRECTIONS),
                boundary=boundary,
                num_microbatches=num_microbatches,
                shared_indices=shared_indices,
                seed=seed,
                scaler=scaler,
            )
    return nn.Sequential(linked)


def _check_cuts(names: Sequence[str], cuts: Sequence[str]) -> None:
    """Raise ValueError unless `cuts` are distinct names of layers, in order and without the last layer."""
    for cut in cuts:
        if cut not in names:
            raise ValueError(f"`cuts` must name layers of the model ({', '.join(names)}), but got {cut!r}.")
    if not cuts or list(cuts) != sorted(set(cuts), key=list(names).index) or cuts[-1] == names[-1]:
        raise ValueError(
            f"`cuts` must name layers in the model's order, each once and none the last, but got {', '.join(cuts) or 'none'}."
        )


def by_boundary(
    forward: str | Sequence[str], backward: str | Sequence[str], num_boundaries: int
) -> dict[str, list[str]]:
    """Return the notations of each direction, by boundary; a single notation is repeated."""
    given = zip(DIRECTIONS, (forward, backward), strict=True)
    return {field: [value] * num_boundaries if isinstance(value, str) else list(value) for field, value in given}


def check_notations(notations: Mapping[str, Sequence[str]], num_boundaries: int, unit: str) -> None:
    """Raise ValueError unless each direction has a notation for each boundary, called `unit` in the error."""
    for field, given in notations.items():
        if len(given) != num_boundaries:
            raise ValueError(
                f"`{field}` must be one notation or a list with one per {unit} ({num_boundaries}), but got {len(given)}."
            )


def links_of(model: nn.Module) -> list[CompressedLink]:
    """Return the links of a model; raises ValueError if there are none."""
    links = [module for module in model.modules() if isinstance(module, CompressedLink)]
    if not links:
        raise ValueError("The model must hold a CompressedLink, but holds none.")
    return links


def end_step(model: nn.Module) -> None:
    """End a step at all links of a model, if it had fewer calls than `num_microbatches`."""
    for link in links_of(model):
        link.end_step()


def link_report(model: nn.Module) -> pd.DataFrame:
    """Return the reports of all links of a model in one DataFrame, see `CompressedLink.report`."""
    import pandas as pd

    return pd.concat([link.report() for link in links_of(model)], ignore_index=True)
