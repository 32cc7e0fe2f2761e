"""CompressedLink: a compressed boundary inside a model, in one process and without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raysim.codecs.sparse import Support
from raysim.compressors import AtSupport, Compressor, Context, parse
from raysim.nn.account import COLUMNS, Account
from raysim.nn.samples import check_samples, current
from raysim.pipeline.link import EVALUATION_MODES, Link, pack_state, unpack_state
from raysim.random import derive_key

if TYPE_CHECKING:
    import pandas as pd

DIRECTIONS = ("forward", "backward")


class CompressedLink(nn.Module):
    """A boundary of a pipeline inside any model: forward sends the activation through a compressor, backward the gradient.

    `forward` and `backward` are written in raysim's notation. Both ends of both directions are held, with their memories, and
    send the messages that raysim's stages send each other, so that a model with links gives the losses of `raysim.train`
    with the same cuts bit for bit.

    `num_microbatches` calls in training mode make a step; a memory keyed by slot belongs to one of them. Where a step has
    fewer, `end_step` ends it. Memories keyed by sample need `raysim.nn.samples`. `boundary` and `replica` distinguish the
    keys of random codecs. `shared_indices` sends gradients at the positions that the activation kept. Fidelity is measured
    every `measure_every_steps` steps, 0 for never.

    In evaluation mode, and without gradients, memories neither help nor move; the attribute `evaluation` says what is sent
    then: "on" (the codec), "off" (the tensor as it is) or "on_direct" (see `AQSGD`). Do not put a link inside of an
    activation-checkpointed block, which would send each message twice.

    Raises ValueError where a notation cannot be read or cannot serve here.

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
        super().__init__()
        if num_microbatches < 1:
            raise ValueError(f"`num_microbatches` must be at least 1, but got {num_microbatches}.")
        self.methods = parse_methods(forward, backward, shared_indices=shared_indices)
        self.boundary = boundary
        self.num_microbatches = num_microbatches
        self.shared_indices = shared_indices
        self.seed = seed
        self.replica = replica
        self.measure_every_steps = measure_every_steps
        self.evaluation = "on"
        self.step = 0
        self._microbatch = 0
        self._evaluations = 0
        self._ends = {
            (direction, sender): Link(method, boundary, direction, sender=sender, device=torch.device("cpu"))
            for direction, method in zip(DIRECTIONS, self.methods, strict=True)
            for sender in (True, False)
        }
        self._supports: dict[int, Support] = {}  # of activations whose gradients have not come back, by microbatch
        self._accounts = {direction: Account() for direction in DIRECTIONS}

    def extra_repr(self) -> str:
        forward, backward = self.methods
        return f"{str(forward)!r}, backward={str(backward)!r}, boundary={self.boundary}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor that arrives at the other side: of the shape and dtype of `x`.

        Raises NonFiniteError where `x` holds NaN or infinity.
        """
        if not self.training or not torch.is_grad_enabled():
            return self._evaluate(x)
        if self._microbatch == self.num_microbatches:
            self.end_step()
        crossing: Tensor = _Crossing.apply(x, self, self._context(x))  # type: ignore[no-untyped-call]
        self._microbatch += 1
        return crossing

    def end_step(self) -> None:
        """End a step: memories that wait for its end move, adaptive methods decide, and the next call is its first microbatch.

        Called by itself after `num_microbatches` calls; a step of fewer needs it.
        """
        if self._microbatch:
            for (direction, _), end in self._ends.items():
                self._accounts[direction].add(end.end_step(measure=self._measures()))
            self.step += 1
            self._microbatch = 0

    def report(self) -> pd.DataFrame:
        """Return bytes, fidelity and seconds of all training messages so far: a row for each direction.

        Columns as of `links.parquet`: `wire_bytes` with headers, `factor` dense over wire bytes, `fidelity` over the steps
        that were measured, seconds of this process.
        """
        import pandas as pd

        self._settle()
        rows = [
            {
                "boundary": self.boundary,
                "direction": direction,
                "codec": repr(method),
                **self._accounts[direction].row(),
            }
            for direction, method in zip(DIRECTIONS, self.methods, strict=True)
        ]
        return pd.DataFrame(rows, columns=["boundary", "direction", "codec", *COLUMNS])

    def cross(self, direction: str, x: Tensor, context: Context) -> Tensor:
        """Send a tensor from one end of a direction to the other and return what arrives, in memory of its own."""
        sender, receiver = self._ends[direction, True], self._ends[direction, False]
        sender.device = receiver.device = x.device
        with torch.autocast(x.device.type, enabled=False):
            message = sender.send(x, context, measure=self._measures())
            y = receiver.receive(message, context)
        if self.shared_indices and direction == "forward":
            self._supports[context.microbatch] = self.methods[0].codec.support(sender.unpack(message), x.device)  # type: ignore[attr-defined]
        alias = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return y.clone() if alias else y

    def get_extra_state(self) -> dict[str, Any]:
        """Return the memories and the count of steps, for `state_dict`."""
        self._settle()
        memories = {
            f"{direction}.{'sender' if sender else 'receiver'}": pack_state(end.state)
            for (direction, sender), end in self._ends.items()
        }
        forward, backward = (repr(method) for method in self.methods)
        return {"forward": forward, "backward": backward, "step": self.step, "memories": memories}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take what `get_extra_state` returned; raises ValueError where it is of other compressors."""
        check_same_methods(state, self.methods)
        self.step, self._microbatch = state["step"], 0
        for (direction, sender), end in self._ends.items():
            end.load(unpack_state(state["memories"][f"{direction}.{'sender' if sender else 'receiver'}"], end.device))

    def context_of_gradient(self, context: Context) -> Context:
        """Return the context of the gradient that answers an activation."""
        key = self._key("backward", context.step, context.microbatch)
        support = self._supports.pop(context.microbatch) if self.shared_indices else None
        return context._replace(direction="backward", key=key, support=support)

    def _context(self, x: Tensor) -> Context:
        found = current()
        check_samples(found, len(x) if x.dim() else 1)
        return Context(
            direction="forward",
            boundary=self.boundary,
            step=self.step,
            epoch=found.epoch,
            microbatch=self._microbatch,
            sample_ids=found.ids,
            replica=self.replica,
            num_stages=2,
            num_microbatches=self.num_microbatches,
            key=self._key("forward", self.step, self._microbatch),
        )

    def _key(self, direction: str, step: int, microbatch: int) -> int:
        return derive_key(self.seed, self.replica, self.boundary, direction, step, microbatch)

    def _evaluate(self, x: Tensor) -> Tensor:
        if self.evaluation not in EVALUATION_MODES:
            raise ValueError(f"`evaluation` must be one of {', '.join(EVALUATION_MODES)}, but got {self.evaluation!r}.")
        self._settle()
        sender, receiver = self._ends["forward", True], self._ends["forward", False]
        receiver.device = x.device
        key = derive_key(self.seed, "evaluation", self.boundary, self._evaluations)
        self._evaluations += 1
        return receiver.receive_evaluation(sender.send_evaluation(x, self.evaluation, key)).clone()

    def _settle(self) -> None:
        """End a step that has all its microbatches, before anybody looks at the memories."""
        if self._microbatch == self.num_microbatches:
            self.end_step()

    def _measures(self) -> bool:
        return self.measure_every_steps > 0 and self.step % self.measure_every_steps == 0


class _Crossing(torch.autograd.Function):
    """Carries an activation forward and its gradient backward; what is kept between them is neither of the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: CompressedLink, context: Context) -> Tensor:
        ctx.link, ctx.context = link, context
        return link.cross("forward", x.detach(), context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.link.cross("backward", gradient, ctx.link.context_of_gradient(ctx.context)), None, None


def parse_methods(forward: str, backward: str, *, shared_indices: bool = False) -> tuple[Compressor, Compressor]:
    """Return the compressors of a boundary by their notations; raises ValueError where one cannot serve outside of a run."""
    methods = parse(forward), parse(backward)
    for field, method in zip(DIRECTIONS, methods, strict=True):
        if field not in method.directions:
            raise ValueError(
                f"`{field}` cannot be {method!r}, which is for {' and '.join(method.directions)} messages."
            )
        if method.needs_sensitivity or method.needs_schedule:
            raise ValueError(
                f"`{field}` cannot be {method!r} outside of `raysim train`, which tells it of the whole step."
            )
    if not shared_indices:
        return methods
    if not hasattr(methods[0].codec, "support"):
        raise ValueError(
            f"`shared_indices` needs a forward TopK, alone or under ErrorFeedback, but got {methods[0]!r}."
        )
    if hasattr(methods[1].codec, "support"):
        raise ValueError(
            "With `shared_indices` the activation chooses the positions and `backward` is the bare codec of the values, "
            f"such as Identity or Quantize(8), but got {methods[1]!r}."
        )
    return methods[0], AtSupport(methods[1].codec)


def check_same_methods(state: Mapping[str, Any], methods: tuple[Compressor, Compressor]) -> None:
    """Raise ValueError where a checkpoint is of other compressors than `methods`."""
    for field, method in zip(DIRECTIONS, methods, strict=True):
        if state[field] != repr(method):
            raise ValueError(f"`{field}` must be {state[field]}, as in the checkpoint, but got {method!r}.")


def links_of(model: nn.Module) -> list[CompressedLink]:
    """Return the links of a model; raises ValueError where it has none."""
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
