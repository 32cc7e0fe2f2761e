"""Times a module's parts between cuts by public hooks; time spent in a hook is excluded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


class Seconds(NamedTuple):
    """Wall-clock seconds, and CPU seconds of this process."""

    wall: float = 0.0
    cpu: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


class Stopwatch:
    """Times the forward and backward of every part of a module, and reports the tensors that leave a part.

    The parts are the stages `first` to `first + len(cuts)` of `num_stages`. If these are not all stages, the module's input and
    output cross boundaries too. `backwards` counts the microbatches whose gradients have been accumulated; `part` is the stage
    that the backward has reached.

    In zero-bubble schedules torch's `stage` computes weight gradients separately, unseen by autograd hooks, in its method
    `backward_weight_one_chunk`, which is wrapped until `remove`.
    """

    def __init__(
        self,
        module: nn.Module,
        cuts: Sequence[nn.Module] = (),
        *,
        first: int = 0,
        num_stages: int,
        stage: PipelineStage | None = None,
    ) -> None:
        self.module = module
        self.cuts = cuts
        self.num_stages = num_stages
        self.stage = stage
        self._first, self._last = first, first + len(cuts)

    def open(self, begin: Callable[[], int | None], leaving: Callable[[str, int, int, Tensor], None]) -> None:
        """Register the hooks.

        `begin` returns the number of the microbatch whose forward begins, None if it is not watched. `leaving` is called with the
        direction ("forward" or "backward"), boundary, microbatch and tensor of each activation or gradient that crosses a boundary.
        """
        self._begin_forward, self._leaving = begin, leaving
        self.seconds: dict[tuple[int, str, int], Seconds] = {}  # of a stage, "F", "B" or "W", and a microbatch
        self.backwards = 0
        self.part = self._last
        self._watched: int | None = None  # the microbatch whose forward runs
        self._backward: int | None = None  # the microbatch whose backward runs
        self._awaited = False  # whether a backward has begun but not accumulated a gradient yet
        self._apart = False  # whether weight gradients are being computed separately
        self._began = Seconds()
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._device = trained[0].device if trained else torch.device("cpu")
        self._handles: list[RemovableHandle] = [
            self.module.register_forward_pre_hook(self._begin),
            *(cut.register_forward_hook(self._hook_at(self._first + i)) for i, cut in enumerate(self.cuts)),
            self.module.register_forward_hook(self._end),
            *(p.register_post_accumulate_grad_hook(self._accumulated) for p in trained),  # type: ignore[no-untyped-call]
        ]
        if self.stage is not None:
            self.stage.backward_weight_one_chunk = self._timed(self.stage.backward_weight_one_chunk)  # type: ignore[method-assign]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.stage is not None:
            del self.stage.backward_weight_one_chunk  # restores the class's method

    def skip(self, spent: Seconds) -> None:
        """Exclude seconds that have just passed from the running part."""
        self._began = self._began.plus(spent)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._watched = self._begin_forward()
        self._backward, self._awaited = None, False
        if self._watched is None:
            return
        if self._first > 0:
            self._await_gradient(tensor_of(args), self._first - 1, self._watched)
        self._mark()

    def _hook_at(self, boundary: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._watched is None or self._backward is not None:  # recomputed in the backward, so not sent again
                return
            if any((later, "F", self._watched) in self.seconds for later in range(boundary, self._last)):
                raise ValueError(
                    f"`cuts` must be modules in the order in which a forward calls them, each once, but cut {boundary} comes too late."
                )
            self._add(boundary, "F", self._watched)
            x = tensor_of(output)
            self._leaving("forward", boundary, self._watched, x.detach())
            self._await_gradient(x, boundary, self._watched)
            self._mark()

        return hook

    def _await_gradient(self, x: Tensor, boundary: int, microbatch: int) -> None:
        """End the backward of the stage after a boundary when the gradient of the crossing tensor arrives."""

        def arrived(gradient: Tensor) -> None:
            handle.remove()  # torch's pipelines reuse the receive buffer
            self.part = boundary
            self._add(boundary + 1, "B", microbatch)
            self._leaving("backward", boundary, microbatch, gradient.detach())
            self._mark()

        if x.requires_grad:
            handle = x.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        microbatch = self._watched
        if microbatch is not None:
            self._add(self._last, "F", microbatch)
            if self._last < self.num_stages - 1:
                self._leaving("forward", self._last, microbatch, tensor_of(output).detach())

        fresh = [True]  # until the first result gets its gradient

        def began(gradient: Tensor) -> None:
            if fresh and not self._apart:
                fresh.clear()
                self._awaited, self._backward, self.part = True, microbatch, self._last
                self._mark()

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(began)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: Tensor) -> None:
        """Count the microbatch, and add the time since the last mark to the first stage; other stages end at their boundary."""
        if self._apart:
            return
        if self._awaited:
            self._awaited = False
            self.backwards += 1
        if self._backward is None:
            return
        if self._first == self._last or (self._first + 1, "B", self._backward) in self.seconds:
            self._add(self._first, "B", self._backward)
            self._mark()

    def _timed(self, compute: Callable[..., None]) -> Callable[..., None]:
        """Wrap a stage's method for a microbatch's weight gradients, so that it is timed."""

        def timed(microbatch: int, *args: Any, **kwargs: Any) -> None:
            watched = (self._last, "F", microbatch) in self.seconds
            if watched:
                self._mark()
            self._apart = True
            try:
                compute(microbatch, *args, **kwargs)
            finally:
                self._apart = False
            self.backwards += 1
            if watched:
                # torch's first stage has no input gradient, so nothing was timed
                self.seconds.setdefault((self._last, "B", microbatch), Seconds())
                self._add(self._last, "W", microbatch)

        return timed

    def _now(self) -> Seconds:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Seconds(time.perf_counter(), time.process_time())

    def _mark(self) -> None:
        self._began = self._now()

    def _add(self, stage: int, op: str, microbatch: int) -> None:
        now, key = self._now(), (stage, op, microbatch)
        spent = Seconds(now.wall - self._began.wall, now.cpu - self._began.cpu)
        self.seconds[key] = self.seconds.get(key, Seconds()).plus(spent)


def tensor_of(values: Any) -> Tensor:
    """Return the first floating-point tensor in a module's arguments or results; raises ValueError if there is none."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError("A module at a cut must take and return a floating-point tensor, but none was found.")
