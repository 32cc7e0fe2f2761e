"""Base class of the modules at a boundary, with memories, samples, steps, keys, totals and checkpoints of links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raysim.compressors import Compressor, Context
from raysim.nn.loss_scale import LossScale
from raysim.pipeline.link import DIRECTIONS, Link, LinkAccount
from raysim.pipeline.state import pack_state, unpack_state
from raysim.random import derive_key

if TYPE_CHECKING:
    import pandas as pd


class Samples(NamedTuple):
    """The sample ids of a batch, and its epoch."""

    ids: tuple[int, ...]
    epoch: int

    def of_microbatch(self, num_rows: int, microbatch: int, num_microbatches: int) -> Samples:
        """Return the samples of a microbatch of `num_rows`, from ids per microbatch or step; raises ValueError on a mismatch."""
        if self is UNKNOWN or len(self.ids) == num_rows:
            return self
        if len(self.ids) == num_rows * num_microbatches:
            return self._replace(ids=self.ids[microbatch * num_rows : (microbatch + 1) * num_rows])
        raise ValueError(f"`samples` must name each row of a microbatch ({num_rows}), but names {len(self.ids)}.")


class _Unknown(tuple[int, ...]):
    """Unknown sample ids; reading them raises an error with the remedy."""

    def __iter__(self) -> Iterator[int]:
        raise ValueError(
            "A memory for each sample needs the ids of the samples: call the model in `with raysim.nn.samples(ids):`."
        )


class _UnknownEpoch(int):
    """An unknown epoch; comparing it with a number of first epochs raises an error with the remedy."""

    def __lt__(self, first: int) -> bool:
        if first > 0:
            raise ValueError(
                "A method whose first epochs are dense needs the epoch: call the model in `with raysim.nn.samples(ids, "
                "epoch=epoch):`, or set `warmup=0`."
            )
        return False


UNKNOWN = Samples(_Unknown(), _UnknownEpoch())
current_samples: ContextVar[Samples] = ContextVar("samples", default=UNKNOWN)
"""The samples of the enclosing `samples` block."""


@contextmanager
def samples(ids: Iterable[int] | Tensor, *, epoch: int = 0) -> Iterator[None]:
    """Set the sample ids for model calls inside the block, one for each row of a microbatch or of a whole step.

    `AQSGD` and all methods with `key='sample'` index their memory by these ids. `epoch` counts from 0; `AQSGD` sends its
    first epochs dense.

    >>> with samples([4, 7], epoch=1):
    ...     current_samples.get()
    Samples(ids=(4, 7), epoch=1)
    """
    values = ids.tolist() if isinstance(ids, Tensor) else ids
    token = current_samples.set(Samples(tuple(int(value) for value in values), epoch))
    try:
        yield
    finally:
        current_samples.reset(token)


class BoundaryModule(nn.Module):
    """Base class of the modules at a boundary; counts microbatches and steps for the contexts of compressors.

    `ends`: the direction of each link in the module, and whether it sends. The other arguments are those of
    `raysim.nn.CompressedLink`.
    """

    def __init__(
        self,
        methods: tuple[Compressor, Compressor],
        ends: Iterable[tuple[str, bool]],
        *,
        boundary: int = 0,
        num_microbatches: int = 1,
        seed: int = 0,
        replica: int = 0,
        measure_every_steps: int = 10,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        if num_microbatches < 1:
            raise ValueError(f"`num_microbatches` must be at least 1, but got {num_microbatches}.")
        self.methods = methods
        self.boundary = boundary
        self.num_microbatches = num_microbatches
        self.seed = seed
        self.replica = replica
        self.measure_every_steps = measure_every_steps
        self.step = 0
        self.microbatch = 0
        self._evaluations = 0
        self.links = {
            (direction, sender): Link(methods[DIRECTIONS.index(direction)], boundary, direction, sender=sender)
            for direction, sender in ends
        }
        self._scales = {end: LossScale(scaler) for end in self.links if end[0] == "backward"}
        self._totals = {end: LinkAccount(boundary, *end) for end in self.links}

    def extra_repr(self) -> str:
        forward, backward = self.methods
        return f"{repr(forward)!r}, backward={repr(backward)!r}, boundary={self.boundary}"

    def end_step(self) -> None:
        """End a step: apply its pending memory updates, let adaptive methods decide, and begin the next step.

        Called automatically after `num_microbatches` calls; needed only if a step has fewer.
        """
        if self.microbatch:
            for end, link in self.links.items():
                self._totals[end].add(link.end_step())
            self.step += 1
            self.microbatch = 0

    def settle(self) -> None:
        """End the step if all its microbatches are done, so that the memories can be read, in the scale of the loss."""
        if self.microbatch == self.num_microbatches:
            self.end_step()
        for end, scale in self._scales.items():
            self.links[end].state = scale.follow(self.links[end].state)

    def measures(self) -> bool:
        """Return whether fidelity is measured in the current step."""
        return self.measure_every_steps > 0 and self.step % self.measure_every_steps == 0

    def report(self) -> pd.DataFrame:
        """Return bytes, fidelity and seconds of all training messages so far, one row for each direction.

        Columns as in `links.parquet`: `wire_bytes` include headers, `factor` is dense over wire bytes, `fidelity` is a mean over the
        measured steps, known only at the sender; seconds are of this process.
        """
        from raysim.nn.table import MessageTable

        self.settle()
        rows = []
        for direction, method in zip(DIRECTIONS, self.methods, strict=True):
            sender, receiver = (self._totals.get((direction, sends)) for sends in (True, False))
            total = sender or receiver
            assert total is not None
            fixed = self.message_bytes()
            wire_bytes = total.wire_bytes if fixed is None else total.packets * fixed
            rows.append(
                {
                    "boundary": self.boundary,
                    "direction": direction,
                    "codec": repr(method),
                    "packets": total.packets,
                    "wire_bytes": wire_bytes,
                    "dense_bytes": total.dense_bytes,
                    "factor": total.dense_bytes / wire_bytes if wire_bytes else None,
                    "fidelity": total.fidelity,
                    "encode_s": sender.codec_s if sender else 0.0,
                    "decode_s": receiver.codec_s if receiver else 0.0,
                }
            )
        return MessageTable(rows)

    def message_bytes(self) -> int | None:
        """Return the wire bytes of a message if all have the same size, else None."""
        return None

    def context(self, shape: Sequence[int]) -> Context:
        """Return the context of the current activation; the first dimension of `shape` is the samples."""
        samples = current_samples.get().of_microbatch(shape[0] if shape else 1, self.microbatch, self.num_microbatches)
        return Context(
            direction="forward",
            step=self.step,
            epoch=samples.epoch,
            microbatch=self.microbatch,
            sample_ids=samples.ids,
            key=self._key("forward", self.step, self.microbatch),
        )

    def of_gradient(self, context: Context) -> Context:
        """Return the context of an activation's gradient."""
        return context._replace(direction="backward", key=self._key("backward", context.step, context.microbatch))

    def _key(self, direction: str, step: int, microbatch: int) -> int:
        return derive_key(self.seed, self.replica, self.boundary, direction, step, microbatch)

    def evaluation_key(self) -> int:
        self._evaluations += 1
        return derive_key(self.seed, "evaluation", self.boundary, self._evaluations)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the memories and the step count, for `state_dict`."""
        self.settle()
        states = {end: link.state for end, link in self.links.items()}
        states |= {end: scale.unscaled(states[end]) for end, scale in self._scales.items()}
        memories = {_name(*end): pack_state(state) for end, state in states.items()}
        forward, backward = (repr(method) for method in self.methods)
        return {"forward": forward, "backward": backward, "step": self.step, "memories": memories}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of `get_extra_state`; raises ValueError if it belongs to other compressors."""
        for field, method in zip(DIRECTIONS, self.methods, strict=True):
            if state[field] != repr(method):
                raise ValueError(f"`{field}` must be {state[field]}, as in the checkpoint, but got {method!r}.")
        self.step, self.microbatch = state["step"], 0
        for end, link in self.links.items():
            link.load(unpack_state(state["memories"][_name(*end)], link.device))
        for scale in self._scales.values():
            scale.forget()


def _name(direction: str, sender: bool) -> str:
    return f"{direction}.{'sender' if sender else 'receiver'}"


def custom_gradient(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `forward` to a tensor and `backward` to its gradient, without saving a tensor in between."""
    y: Tensor = _CustomGradient.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return y


class _CustomGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.through = backward
        return forward(x.detach()).detach()  # no view, which a layer in place may not write to

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.through(gradient), None, None
