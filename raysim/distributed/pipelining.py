"""Compressed packets between the stages of `torch.distributed.pipelining`, by two modules at each boundary.

A stage that ends in `SendPacket` returns a packet in a float32 tensor of a fixed size, which torch sends like any
activation; `ReceivePacket` at the head of the next stage decodes it. In the backward the receiver encodes the gradient into a
tensor of the same size, and the sender decodes it. Between forward and backward the packet is kept, not the activation.

Before its first step torch runs every stage once to learn the shapes, on tensors that hold no packet. Such a rehearsal
leaves no trace: the sender takes a message back whose graph was dropped before its gradient came, or whose gradient is torch's
ones; the receiver answers one tensor without the awaited packet by zeros, and raises at a second.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from raysim.compressors import Context
from raysim.distributed.exchange import build_alike
from raysim.distributed.frames import Frame, FrameError, frame_words, read_frame, setting_of, write_frame
from raysim.nn.boundary import DIRECTIONS, BoundaryModule
from raysim.nn.link import parse_methods

_EVALUATION = 0xFFFFFFFF  # in place of the number of a message


class _PacketSide(BoundaryModule):
    """One side of a boundary, with the size of its frames."""

    held: ClassVar[tuple[tuple[str, bool], ...]]
    """The links of this side: direction, and whether it sends."""

    def __init__(
        self,
        shape: Sequence[int],
        forward: str = "Identity",
        backward: str = "Identity",
        *,
        dtype: torch.dtype = torch.float32,
        boundary: int = 0,
        num_microbatches: int = 1,
        seed: int = 0,
        replica: int = 0,
        measure_every_steps: int = 10,
    ) -> None:
        methods = parse_methods(forward, backward)
        super().__init__(
            methods,
            self.held,
            boundary=boundary,
            num_microbatches=num_microbatches,
            seed=seed,
            replica=replica,
            measure_every_steps=measure_every_steps,
        )
        self.shape = tuple(shape)
        self.dtype = dtype
        self.words = max(
            frame_words(field, method, self.shape, dtype) for field, method in zip(DIRECTIONS, methods, strict=True)
        )
        self._setting = setting_of(methods, boundary, num_microbatches, seed, self.shape, dtype)
        self._rehearsed = False  # whether the last tensor was one of torch's rehearsal, without a packet

    @property
    def number(self) -> int:
        """Return the number of the next message in training."""
        return self.step * self.num_microbatches + self.microbatch

    def message_bytes(self) -> int:
        return 4 * self.words

    def pack(self, message: Any, number: int, device: torch.device) -> Tensor:
        """Return the frame of a message."""
        return write_frame(Frame(message, self._setting, number), self.words, device)

    def unpack(self, tensor: Tensor, number: int) -> Any:
        """Return the message in a frame.

        Raises FrameError if it is not the awaited one, or if the compressors of the two sides differ.
        """
        frame = read_frame(tensor)
        if frame.setting != self._setting:
            raise FrameError(
                f"Both ends of boundary {self.boundary} must have the same compressors, seed, microbatches and shape, but the "
                f"other end's differ from this end's ({self.extra_repr()})."
            )
        if frame.number != number & 0xFFFFFFFF:
            raise FrameError(f"Boundary {self.boundary} awaited message {number}, but got message {frame.number}.")
        return frame.message


class SendPacket(_PacketSide):
    """The end of a stage: returns the packet of the activation, and in the backward decodes the packet of its gradient.

    `shape` and `dtype` are of a microbatch's activation; the other arguments are as of `raysim.nn.CompressedLink`.
    Raises ValueError if the packets of a compressor have no fixed size.
    """

    held = (("forward", True), ("backward", False))

    _before: dict[int, Tensor]  # the memory before the first microbatch of a step
    _graph: weakref.ref[_Token] | None = None  # of the last message
    _answered = True  # whether its gradient has come

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Return the frame of an activation: a flat float32 tensor of `words`."""
        if tuple(x.shape) != self.shape or x.dtype != self.dtype:
            raise ValueError(
                f"The activation at boundary {self.boundary} must have the stated shape {self.shape} and {self.dtype}, but has "
                f"{tuple(x.shape)} and {x.dtype}."
            )
        link = self.links["forward", True]
        link.device = x.device
        if not self.training or not torch.is_grad_enabled():
            with torch.autocast(x.device.type, enabled=False):
                message = link.send_evaluation(x, "on", self.evaluation_key())
            return self.pack(message, _EVALUATION, x.device)
        self._forget_rehearsal()
        self.settle()
        if self.microbatch == 0:
            self._before = dict(link.state)
        token = _Token()
        self._graph, self._answered, self._rehearsed = weakref.ref(token), False, False
        x = (
            x if x.requires_grad else x.detach().requires_grad_()
        )  # frozen stages too: the graph says that this is no rehearsal
        frame: Tensor = _Sending.apply(x, self, self.context("forward", _rows(x)), token)  # type: ignore[no-untyped-call]
        self.microbatch += 1
        return frame

    def send(self, x: Tensor, context: Context) -> Tensor:
        """Return the frame of an activation in training."""
        with torch.autocast(x.device.type, enabled=False):
            message = self.links["forward", True].send(x, context, measure=self.measures())
        return self.pack(message, self.number, x.device)

    def receive(self, frame: Tensor, context: Context, number: int) -> Tensor:
        """Return the gradient in a frame; zeros in a rehearsal, for which torch hands in ones."""
        link = self.links["backward", False]
        link.device = frame.device
        if bool((frame == 1).all()):
            self._rehearsed = True
            return torch.zeros(self.shape, dtype=self.dtype, device=frame.device)
        message = self.unpack(frame, number)
        self._answered = True
        with torch.autocast(frame.device.type, enabled=False):
            return link.receive(message, self.of_gradient(context))

    def _forget_rehearsal(self) -> None:
        """Take back the first message of a step if ones came as its gradient, or its graph was dropped before any did."""
        dropped = self._rehearsed or (self._graph is not None and self._graph() is None)
        if self.microbatch == 1 and not self._answered and dropped:
            self.links["forward", True].load(self._before)
            self.microbatch = 0


class ReceivePacket(_PacketSide):
    """The head of a stage: returns the activation of a packet, and in the backward sends the packet of its gradient.

    Arguments as of `SendPacket`, and equal to the arguments of the other end.
    """

    held = (("forward", False), ("backward", True))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, frame: Tensor) -> Tensor:
        """Return the activation in a frame; raises FrameError if another packet is in it."""
        link = self.links["forward", False]
        link.device = frame.device
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self.settle()
        number = self.number if trains else _EVALUATION
        try:
            message = self.unpack(frame, number)
        except FrameError:
            if self._rehearsed or frame.dtype != torch.float32:
                raise
            self._rehearsed = True
            activation: Tensor = _Rehearsal.apply(frame, self.shape, self.dtype)  # type: ignore[no-untyped-call]
            return activation
        self._rehearsed = False
        if not trains:
            with torch.autocast(frame.device.type, enabled=False):
                return link.receive_evaluation(message)
        context = self.context("forward", self.shape[0] if self.shape else 1)
        activation = _Receiving.apply(frame, self, message, context, number)  # type: ignore[no-untyped-call]
        self.microbatch += 1
        return activation

    def receive(self, message: Any, context: Context, device: torch.device) -> Tensor:
        """Return the activation of a message."""
        with torch.autocast(device.type, enabled=False):
            return self.links["forward", False].receive(message, context)

    def send(self, gradient: Tensor, context: Context, number: int) -> Tensor:
        """Return the frame of a gradient, under the number of its activation."""
        link = self.links["backward", True]
        link.device = gradient.device
        with torch.autocast(gradient.device.type, enabled=False):
            message = link.send(gradient, self.of_gradient(context), measure=self.measures())
        return self.pack(message, number, gradient.device)


class _Token:
    """Lives as long as the graph of a message."""


class _Sending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: SendPacket, context: Context, token: _Token) -> Tensor:
        ctx.end, ctx.context, ctx.token, ctx.number = end, context, token, end.number
        return end.send(x.detach(), context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, frame: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.end.receive(frame, ctx.context, ctx.number), None, None, None


class _Receiving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, frame: Tensor, end: ReceivePacket, message: Any, context: Context, number: int) -> Tensor:
        ctx.end, ctx.context, ctx.number = end, context, number
        return end.receive(message, context, frame.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.end.send(gradient, ctx.context, ctx.number), None, None, None, None


class _Rehearsal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, frame: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.words = frame.shape
        return torch.zeros(shape, dtype=dtype, device=frame.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.ones(ctx.words, device=gradient.device), None, None


def compress_stages(
    stages: Mapping[int, nn.Module] | Sequence[nn.Module],
    shapes: Sequence[Sequence[int]],
    *,
    forward: str | Sequence[str] = "Identity",
    backward: str | Sequence[str] = "Identity",
    num_microbatches: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    replica: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[int, nn.Module]:
    """Return stages for `torch.distributed.pipelining.PipelineStage` between which packets travel, by their index.

    `stages`: the stages of this rank, by index, or all stages. `shapes`: of a microbatch's activation at each boundary. `forward`
    and `backward` are one notation for all boundaries or a list with one each. `replica` numbers parallel pipelines.

    Where torch.distributed is initialised, all ranks of `group` (by default all ranks) call this, with the same arguments but for
    `stages` and `replica`.

    Raises ValueError if a codec's packets have no fixed size, the numbers of stages, shapes and notations do not fit, or ranks
    differ: the same sentence on every rank.

    >>> first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    >>> compress_stages([first, second], [(4, 8)], forward="TopK(0.25)", num_microbatches=2)[0]
    Sequential(
      (stage): Linear(in_features=8, out_features=8, bias=True)
      (send): SendPacket('TopK(0.25)', backward='Identity', boundary=0)
    )
    """
    held = dict(stages) if isinstance(stages, Mapping) else dict(enumerate(stages))
    last = len(shapes)
    notations = {
        field: [text] * last if isinstance(text, str) else list(text)
        for field, text in zip(DIRECTIONS, (forward, backward), strict=True)
    }
    common = {"dtype": dtype, "num_microbatches": num_microbatches, "seed": seed}

    def side(kind: type[SendPacket] | type[ReceivePacket], boundary: int) -> nn.Module:
        texts = [notations[field][boundary] for field in DIRECTIONS]
        return kind(shapes[boundary], *texts, boundary=boundary, replica=replica, **common)  # type: ignore[arg-type]

    def build() -> dict[int, nn.Module]:
        _check_stages(held, notations, last)
        return {index: _with_sides(index, stage, last, side) for index, stage in held.items()}

    if group is None and not dist.is_initialized():
        return build()
    settings: dict[str, Any] = {f"`{field}`": texts for field, texts in notations.items()}
    settings["`shapes`"] = [tuple(shape) for shape in shapes]
    settings |= {f"`{name}`": common[name] for name in ("num_microbatches", "dtype", "seed")}
    settings["`dtype`"] = str(dtype)
    everyone = group or dist.group.WORLD
    assert everyone is not None
    return build_alike(everyone, "compress stages", build, settings)


def _with_sides(
    index: int,
    stage: nn.Module,
    last: int,
    side: Callable[[type[SendPacket] | type[ReceivePacket], int], nn.Module],
) -> nn.Module:
    """Return a stage between its sides of the boundaries."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if index > 0:
        parts["receive"] = side(ReceivePacket, index - 1)
    parts["stage"] = stage
    if index < last:
        parts["send"] = side(SendPacket, index)
    return nn.Sequential(parts)


def _check_stages(stages: Iterable[int], notations: Mapping[str, Sequence[str]], last: int) -> None:
    """Raise ValueError if the numbers of stages and notations do not fit `last` boundaries."""
    for field, given in notations.items():
        if len(given) != last:
            raise ValueError(
                f"`{field}` must be one notation or a list with one per boundary ({last}), but got {len(given)}."
            )
    for index in stages:
        if not 0 <= index <= last:
            raise ValueError(
                f"`stages` must have indices from 0 to {last}, as `shapes` has {last} boundaries, but got {index}."
            )


def _rows(x: Tensor) -> int:
    return len(x) if x.dim() else 1
