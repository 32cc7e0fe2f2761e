"""CompressedLink: a compressed boundary inside a model, in one process and without Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raysim.codecs.codec import Support
from raysim.compressors import Compressor, Context, parse, share_indices
from raysim.nn.boundary import DIRECTIONS, BoundaryModule, own_memory
from raysim.pipeline.link import EVALUATION_MODES

if TYPE_CHECKING:
    import pandas as pd


class CompressedLink(BoundaryModule):
    """A compressed boundary inside any model: activations go through one compressor, their gradients through another.

    `forward` and `backward` are in raysim's notation. The link holds both sides with their memories, and sends the same messages
    as raysim's stages do: a model with links has the losses of `raysim.train` with the same cuts, bit for bit.

    `num_microbatches` calls in training mode make a step; a memory keyed by slot belongs to one of them. Where a step has
    fewer, `end_step` ends it. Memories keyed by sample need `raysim.nn.samples`. `boundary` and `replica` distinguish the
    keys of random codecs. `shared_indices` sends gradients at the positions that the activation kept. Fidelity is measured
    every `measure_every_steps` steps, 0 for never.

    In evaluation mode, and without gradients, memories are neither used nor changed. The attribute `evaluation` then selects the
    message: "on" (the codec's packet), "off" (the tensor as it is) or "on_direct" (see `AQSGD`). Do not put a link inside an
    activation-checkpointed block, which would send each message twice.

    Raises ValueError if a notation is invalid or cannot be used outside of a run.

    >>> link = CompressedLink("TopK(0.5)")
    >>> link(torch.tensor([[1.0, -2.0, 3.0, 0.5]]))
    tensor([[ 0., -2.,  3.,  0.]])
    """

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
    ) -> None:
        methods = parse_methods(forward, backward, shared_indices=shared_indices)
        super().__init__(
            methods,
            [(direction, sender) for direction in DIRECTIONS for sender in (True, False)],
            boundary=boundary,
            num_microbatches=num_microbatches,
            seed=seed,
            replica=replica,
            measure_every_steps=measure_every_steps,
        )
        self.shared_indices = shared_indices
        self.evaluation = "on"
        self._supports: dict[int, Support] = {}  # of activations whose gradients have not come back, by microbatch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Return the received tensor, of the shape and dtype of `x`.

        Raises NonFiniteError if `x` holds NaN or infinity.
        """
        if not self.training or not torch.is_grad_enabled():
            return self._evaluate(x)
        self.settle()
        context = self.context("forward", len(x) if x.dim() else 1)
        received: Tensor = _Transfer.apply(x, self, context)  # type: ignore[no-untyped-call]
        self.microbatch += 1
        return received

    def cross(self, direction: str, x: Tensor, context: Context) -> Tensor:
        """Send a tensor in a direction and return the received one, in its own memory."""
        sender, receiver = self.links[direction, True], self.links[direction, False]
        sender.device = receiver.device = x.device
        with torch.autocast(x.device.type, enabled=False):
            message = sender.send(x, context, measure=self.measures())
            y = receiver.receive(message, context)
        if self.shared_indices and direction == "forward":
            self._supports[context.microbatch] = self.methods[0].codec.support(sender.unpack(message), x.device)
        return own_memory(y, x)

    def of_gradient(self, context: Context) -> Context:
        support = self._supports.pop(context.microbatch) if self.shared_indices else None
        return super().of_gradient(context)._replace(support=support)

    def _evaluate(self, x: Tensor) -> Tensor:
        if self.evaluation not in EVALUATION_MODES:
            raise ValueError(f"`evaluation` must be one of {', '.join(EVALUATION_MODES)}, but got {self.evaluation!r}.")
        self.settle()
        sender, receiver = self.links["forward", True], self.links["forward", False]
        receiver.device = x.device
        message = sender.send_evaluation(x, self.evaluation, self.evaluation_key())
        return own_memory(receiver.receive_evaluation(message), x)


class _Transfer(torch.autograd.Function):
    """Sends an activation forward and its gradient backward; keeps neither in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: CompressedLink, context: Context) -> Tensor:
        ctx.link, ctx.context = link, context
        return link.cross("forward", x.detach(), context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.link.cross("backward", gradient, ctx.link.of_gradient(ctx.context)), None, None


def parse_methods(forward: str, backward: str, *, shared_indices: bool = False) -> tuple[Compressor, Compressor]:
    """Return the compressors of a boundary; raises ValueError if one cannot be used outside of a run."""
    methods = parse(forward), parse(backward)
    for field, method in zip(DIRECTIONS, methods, strict=True):
        if field not in method.directions:
            raise ValueError(
                f"`{field}` cannot be {method!r}, which is for {' and '.join(method.directions)} messages."
            )
        if method.needs_sensitivity or method.needs_schedule:
            raise ValueError(
                f"`{field}` cannot be {method!r} outside of `raysim train`, which gives it facts about the whole step."
            )
    if not shared_indices:
        return methods
    return methods[0], share_indices(*methods)


def links_of(model: nn.Module) -> list[CompressedLink]:
    """Return the links of a model; raises ValueError if there are none."""
    links = [module for module in model.modules() if isinstance(module, CompressedLink)]
    if not links:
        raise ValueError("The model must hold a CompressedLink, but holds none.")
    return links


def end_step(model: nn.Module) -> None:
    """End a step at all links of a model: for steps of fewer calls than `num_microbatches`."""
    for link in links_of(model):
        link.end_step()


def report(model: nn.Module) -> pd.DataFrame:
    """Return the reports of all links of a model in one frame, see `CompressedLink.report`."""
    import pandas as pd

    return pd.concat([link.report() for link in links_of(model)], ignore_index=True)
