"""Seconds of a model's parts between cuts, by public hooks: the time inside of a hook counts for none of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

OnTensor = Callable[[int, int, Tensor], None]


class Stopwatch:
    """Times the forward and backward of every part, and shows the tensors that cross the cuts.

    `on_activation` and `on_gradient` are called with boundary, microbatch and tensor, in the steps that `samples`.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[nn.Module],
        *,
        on_forward: Callable[[], None],
        on_activation: OnTensor,
        on_gradient: OnTensor,
    ) -> None:
        self.samples = False
        self.microbatch = 0
        self.seconds: dict[tuple[int, str, int], float] = {}  # of a stage, "F" or "B", and a microbatch
        self._last = 0.0  # when the part that runs began
        self._backward = False  # whether the backward of the microbatch at hand has begun
        self._on_forward, self._on_activation, self._on_gradient = on_forward, on_activation, on_gradient
        self._num_stages = len(cuts) + 1
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._begin),
            *(cut.register_forward_hook(self._crossing(boundary)) for boundary, cut in enumerate(cuts)),
            model.register_forward_hook(self._end),
            *(
                parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                for parameter in model.parameters()
                if parameter.requires_grad
            ),
        ]

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._on_forward()
        self._backward = False
        self._last = time.perf_counter()

    def _crossing(self, boundary: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self.samples:
                return
            microbatch = self.microbatch
            self._add(boundary, "F", microbatch)
            x = tensor_of(output)
            self._on_activation(boundary, microbatch, x.detach())
            if x.requires_grad:

                def arrived(gradient: Tensor) -> None:
                    self._add(boundary + 1, "B", microbatch)
                    self._on_gradient(boundary, microbatch, gradient.detach())
                    self._last = time.perf_counter()

                x.register_hook(arrived)  # type: ignore[no-untyped-call]
            self._last = time.perf_counter()

        return hook

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self.samples:
            return
        self._add(self._num_stages - 1, "F", self.microbatch)

        def began(gradient: Tensor) -> None:
            if not self._backward:
                self._backward = True
                self._last = time.perf_counter()

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(began)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: Tensor) -> None:
        """Count the time since the last mark for the first stage, whose backward ends with a parameter; others end at a cut."""
        if self.samples and (1, "B", self.microbatch) in self.seconds:
            self._add(0, "B", self.microbatch)
            self._last = time.perf_counter()

    def _add(self, stage: int, op: str, microbatch: int) -> None:
        key = (stage, op, microbatch)
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - self._last


def tensor_of(output: Any) -> Tensor:
    """Return the first floating-point tensor in a module's output; raises ValueError where there is none."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError("A module at a cut must return a tensor of floats, but returns none.")
