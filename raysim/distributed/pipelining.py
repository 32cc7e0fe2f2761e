"""Compressed packets between the stages of `torch.distributed.pipelining`, by two modules at each boundary.

A stage that ends with `SendPacket` returns a packet in a float32 tensor of a fixed size, which torch sends like any
activation; `ReceivePacket` at the start of the next stage decodes it. In the backward the receiver encodes the gradient into
a tensor of the same size, and the sender decodes it. Between forward and backward the packet is kept, not the activation.

Before its first step torch runs every stage once to infer shapes, on tensors without packets. This rehearsal has no
effect: the sender undoes a message whose graph was freed before its gradient arrived, or whose gradient is torch's ones. The
receiver returns zeros for the first tensor without the expected packet, and raises for the second.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from raysim.codecs.message import Message
from raysim.compressors import Compressor, Context
from raysim.distributed.exchange import build_alike
from raysim.nn.boundary import BoundaryModule, custom_gradient
from raysim.nn.link import by_boundary, check_notations, parse_methods
from raysim.pipeline.link import DIRECTIONS
from raysim.random import derive_key

# --- frames: messages in float32 tensors of a fixed size; all integers are little endian --------------------------------------
#
#   frame = magic, check, setting, number, bytes of the header, number of arrays, bytes of each array, header, arrays, zeros
#   check = CRC-32 of everything between it and the zeros
#
# `setting` identifies the compressors of the boundary, which must be the same at both ends; `number` counts its messages.

_MAGIC = b"rsim"
_HEAD = struct.Struct("<4sIIIHH")
_CHECKED_FROM = 8  # after magic and check
_LENGTH = struct.Struct("<Q")
_HEADER_BYTES = 64  # upper bound for a message's header, with dimensions and lengths
_WORD = 4


class FrameError(RuntimeError):
    """A tensor does not hold the expected packet."""


class Frame(NamedTuple):
    """The content of a frame."""

    message: Message
    setting: int
    number: int


def frame_words(field: str, method: Compressor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the frame size, in float32 words, for any message of a compressor for tensors of `shape` and `dtype`.

    Raises ValueError if the packet size depends on the values or the step.
    """
    arrays = method.array_bytes(shape, str(dtype).removeprefix("torch."))
    if arrays is None:
        raise ValueError(
            f"`{field}` cannot be {method!r} between stages of torch.distributed.pipelining: its packets vary in size. Use a codec "
            "with packets of a fixed size, such as TopK or Quantize."
        )
    count = max(len(entry.names) for entry in method.table.entries)
    return -(-(_HEAD.size + _LENGTH.size * count + _HEADER_BYTES + arrays) // _WORD)


def setting_of(*parts: object) -> int:
    """Hash the settings that must be the same at both ends of a boundary."""
    return zlib.crc32(repr(parts).encode())


def write_frame(frame: Frame, words: int, device: torch.device) -> Tensor:
    """Write a message to a flat float32 tensor of `words`; raises FrameError if the message is too long."""
    header, *arrays = frame.message
    start = _HEAD.size + _LENGTH.size * len(arrays)
    end = start + len(header) + sum(array.nbytes for array in arrays)
    if end > words * _WORD:
        raise FrameError(f"A message must fit into a frame of {words * _WORD} bytes, but takes {end}.")
    data = np.zeros(words * _WORD, np.uint8)
    lengths = b"".join(_LENGTH.pack(array.nbytes) for array in arrays)
    head = _HEAD.pack(_MAGIC, 0, frame.setting, frame.number & 0xFFFFFFFF, len(header), len(arrays))
    np.concatenate([np.frombuffer(head + lengths + header, np.uint8), *arrays], out=data[:end])
    data[4:8] = np.frombuffer(struct.pack("<I", zlib.crc32(data[_CHECKED_FROM:end].data)), np.uint8)
    return torch.from_numpy(data).view(torch.float32).to(device)


def read_frame(tensor: Tensor) -> Frame:
    """Return the frame in a tensor of `write_frame`, with copies of its arrays.

    Raises FrameError if it holds no packet, or its bytes are corrupted.
    """
    if tensor.dtype != torch.float32:
        raise FrameError(
            f"A packet must arrive as it was sent, in float32, but arrives in {str(tensor.dtype).removeprefix('torch.')}: "
            "something casts the inputs of the stage. With FSDP set `cast_forward_inputs=False`."
        )
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()
    changed = FrameError(
        "A packet must arrive as it was sent, but its checksum does not match: something casts or changes the inputs of the "
        "stage. With FSDP set `cast_forward_inputs=False`."
    )
    if len(data) < _HEAD.size:
        raise changed
    magic, check, setting, number, header_bytes, count = _HEAD.unpack_from(data.data)
    start = _HEAD.size + _LENGTH.size * count
    if magic != _MAGIC or start > len(data):
        raise changed
    lengths = [_LENGTH.unpack_from(data.data, _HEAD.size + _LENGTH.size * index)[0] for index in range(count)]
    end = start + header_bytes + sum(lengths)
    if end > len(data) or zlib.crc32(data[_CHECKED_FROM:end].data) != check:
        raise changed
    header, *arrays = np.split(data[start:end], np.cumsum([header_bytes, *lengths])[:-1])
    return Frame((header.tobytes(), *arrays), setting, number)


_EVALUATION = 0xFFFFFFFF  # the message number in evaluations


class _PacketSide(BoundaryModule):
    """One side of a boundary, with its frame size; `settings` as in `BoundaryModule`."""

    held: ClassVar[tuple[tuple[str, bool], ...]]
    """The links of this side: direction, and whether it sends."""

    def __init__(
        self,
        shape: Sequence[int],
        forward: str = "Identity",
        backward: str = "Identity",
        *,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        methods = parse_methods(forward, backward)
        super().__init__(methods, self.held, **settings)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.words = max(
            frame_words(field, method, self.shape, dtype) for field, method in zip(DIRECTIONS, methods, strict=True)
        )
        self._setting = setting_of(methods, self.boundary, self.num_microbatches, self.seed, self.shape, dtype)
        self._rehearsed = False  # whether the last tensor came from torch's rehearsal, without a packet

    def message_bytes(self) -> int:
        return 4 * self.words

    def number(self, context: Context) -> int:
        return context.step * self.num_microbatches + context.microbatch

    def send(self, context: Context, x: Tensor) -> Tensor:
        """Return the frame of a training activation or gradient."""
        with self.links[context.direction, True].on(x.device) as link:
            message = link.send(x, context, measure=self.measures())
        return self.pack(message, self.number(context), x.device)

    def send_evaluation(self, direction: str, key: int, x: Tensor) -> Tensor:
        """Return the frame of an activation or gradient in evaluation mode."""
        with self.links[direction, True].on(x.device) as link:
            return self.pack(link.send_evaluation(x, "on", key), _EVALUATION, x.device)

    def receive_evaluation(self, direction: str, message: Message, device: torch.device) -> Tensor:
        with self.links[direction, False].on(device) as link:
            return link.receive_evaluation(message)

    def pack(self, message: Message, number: int, device: torch.device) -> Tensor:
        return write_frame(Frame(message, self._setting, number), self.words, device)

    def unpack(self, tensor: Tensor, number: int) -> Message:
        """Return the message in a frame; raises FrameError if it is not the expected one, or from other compressors."""
        frame = read_frame(tensor)
        if frame.setting != self._setting:
            raise FrameError(
                f"Both ends of boundary {self.boundary} must have the same compressors, seed, microbatches and shape, but the "
                f"other end's differ from this end's ({self.extra_repr()})."
            )
        if frame.number != number & 0xFFFFFFFF:
            raise FrameError(f"Boundary {self.boundary} expected message {number}, but got message {frame.number}.")
        return frame.message


class SendPacket(_PacketSide):
    """The end of a stage: encodes the activation, and in the backward decodes its gradient.

    `shape` and `dtype` are those of a microbatch's activation; the other arguments are as in `raysim.nn.CompressedLink`.
    Raises ValueError if the packets of a compressor have no fixed size.
    """

    held = (("forward", True), ("backward", False))

    _before: dict[int, Tensor]  # the memory before the first microbatch of a step
    _graph: weakref.ref[partial[Tensor]] | None = None  # lives as long as the graph of the last message
    _answered = True  # whether the gradient of the last message has arrived

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Return the frame of an activation: a flat float32 tensor of `words`."""
        if tuple(x.shape) != self.shape or x.dtype != self.dtype:
            raise ValueError(
                f"The activation at boundary {self.boundary} must have the stated shape {self.shape} and {self.dtype}, but has "
                f"{tuple(x.shape)} and {x.dtype}."
            )
        # required for frozen stages too: the graph tells real messages from rehearsals
        trained = x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
        if not self.training or not torch.is_grad_enabled():
            send = partial(self.send_evaluation, "forward", self.evaluation_key())
            return custom_gradient(trained, send, partial(self.receive, None))
        self._forget_rehearsal()
        self.settle()
        if self.microbatch == 0:
            self._before = dict(self.links["forward", True].state)
        context = self.context(x.shape)
        receive = partial(self.receive, context)
        self._graph, self._answered, self._rehearsed = weakref.ref(receive), False, False
        frame = custom_gradient(trained, partial(self.send, context), receive)
        self.microbatch += 1
        return frame

    def receive(self, context: Context | None, frame: Tensor) -> Tensor:
        """Return the gradient in a frame, without a `context` of an evaluation; zeros in a rehearsal, in which torch passes ones."""
        if bool((frame == 1).all()):
            self._rehearsed = True
            return torch.zeros(self.shape, dtype=self.dtype, device=frame.device)
        if context is None:
            return self.receive_evaluation("backward", self.unpack(frame, _EVALUATION), frame.device)
        message = self.unpack(frame, self.number(context))
        self._answered = True
        with self.links["backward", False].on(frame.device) as link:
            return link.receive(message, self.of_gradient(context))

    def _forget_rehearsal(self) -> None:
        """Undo a step's first message if its gradient was all ones, or its graph was freed before a gradient arrived."""
        dropped = self._rehearsed or (self._graph is not None and self._graph() is None)
        if self.microbatch == 1 and not self._answered and dropped:
            self.links["forward", True].load(self._before)
            self.microbatch = 0


class ReceivePacket(_PacketSide):
    """The start of a stage: decodes the activation, and in the backward encodes its gradient.

    Arguments as in `SendPacket`, and equal to those of the other end.
    """

    held = (("forward", False), ("backward", True))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, frame: Tensor) -> Tensor:
        """Return the activation in a frame; raises FrameError if it holds a different packet."""
        device, words = frame.device, frame.shape
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self.settle()
        try:
            message = self.unpack(frame, self.step * self.num_microbatches + self.microbatch if trains else _EVALUATION)
        except FrameError:
            if self._rehearsed or frame.dtype != torch.float32:
                raise
            self._rehearsed = True
            return custom_gradient(
                frame,
                lambda _: torch.zeros(self.shape, dtype=self.dtype, device=device),
                lambda gradient: torch.ones(words, device=gradient.device),
            )
        self._rehearsed = False
        if not trains:
            send = partial(self.send_evaluation, "backward", derive_key(self.evaluation_key(), "backward"))
            return custom_gradient(frame, lambda _: self.receive_evaluation("forward", message, device), send)
        with self.links["forward", False].on(device) as link:
            context = self.context(self.shape)
            activation = custom_gradient(
                frame,
                lambda _: link.receive(message, context),
                lambda gradient: self.send(self.of_gradient(context), gradient),
            )
        self.microbatch += 1
        return activation


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
    """Return stages, by index, for `torch.distributed.pipelining.PipelineStage`, with compressed packets between them.

    `stages`: the stages of this rank, by index, or all stages. `shapes`: shape of a microbatch's activation at each boundary.
    `forward` and `backward` are one notation for all boundaries or a list with one each. `replica` numbers parallel pipelines.

    If torch.distributed is initialised, all ranks of `group` (by default all ranks) must call this, with the same arguments
    except `stages` and `replica`.

    Raises the same ValueError on every rank if a codec's packets have no fixed size, the numbers of stages, shapes and notations
    do not fit, or ranks differ.

    >>> first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    >>> compress_stages([first, second], [(4, 8)], forward="TopK(0.25)", num_microbatches=2)[0]
    Sequential(
      (stage): Linear(in_features=8, out_features=8, bias=True)
      (send): SendPacket('TopK(0.25)', backward='Identity', boundary=0)
    )
    """
    held = dict(stages) if isinstance(stages, Mapping) else dict(enumerate(stages))
    last = len(shapes)
    notations = by_boundary(forward, backward, last)
    common: dict[str, Any] = {"num_microbatches": num_microbatches, "dtype": dtype, "seed": seed}

    def side(kind: type[SendPacket] | type[ReceivePacket], boundary: int) -> nn.Module:
        texts = [notations[field][boundary] for field in DIRECTIONS]
        return kind(shapes[boundary], *texts, boundary=boundary, replica=replica, **common)

    def build() -> dict[int, nn.Module]:
        check_notations(notations, last, "boundary")
        built: dict[int, nn.Module] = {}
        for index, stage in held.items():
            if not 0 <= index <= last:
                raise ValueError(
                    f"`stages` must have indices from 0 to {last}, as `shapes` has {last} boundaries, but got {index}."
                )
            before = [("receive", side(ReceivePacket, index - 1))] if index > 0 else []
            behind = [("send", side(SendPacket, index))] if index < last else []
            built[index] = nn.Sequential(OrderedDict([*before, ("stage", stage), *behind]))
        return built

    settings: dict[str, Any] = {
        **notations,
        "shapes": [tuple(shape) for shape in shapes],
        **common,
        "dtype": str(dtype),
    }
    named = {f"`{name}`": value for name, value in settings.items()}
    return build_alike(group or dist.group.WORLD, "compress stages", build, named)
