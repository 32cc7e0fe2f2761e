"""Memory and operations of one microbatch at a stage, counted over its forward and backward on fake tensors.

Memory is counted from the start of the forward to the end of the backward. Every storage is followed from the operation that makes
it until it is freed, including temporaries that autograd and the layers hold. Memory that a kernel allocates and frees within one
operation is not seen.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raysim.values import Value, join, split
from raysim.workloads.two_part_backward import input_gradients, run_branches


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """Return the operations of the two matrix products; as torch's own count for GPUs, a causal mask saves none."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward_flops(
    gradient: tuple[int, ...],
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    *_: object,
    **__: object,
) -> int:
    """Return the operations of the five matrix products, the scores' included: the kernel computes them again."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


def _lstm_flops(
    x: tuple[int, ...], input_weight: tuple[int, ...], state_weight: tuple[int, ...], *_: object, **__: object
) -> int:
    """Return the operations of the four gates' matrix products at every position of (length, batch, width)."""
    return 2 * x[0] * x[1] * (math.prod(input_weight) + math.prod(state_weight))


# kernels that torch's counter does not know
_CPU_FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
}


class Footprint(NamedTuple):
    """Bytes of one microbatch at a stage, without parameters, buffers and previously accumulated gradients.

    A peak is the maximum, over time, of the live tensors of the microbatch. `waiting` and `weights` are for backwards
    in two parts, else 0.
    """

    received: int
    """The stage's input."""
    gradient: int
    """The gradient that arrives for the backward."""
    saved: int
    """From the end of the forward to the start of the backward: what autograd saves, the input, and the output."""
    waiting: int
    """Between the two parts of a backward."""
    forward: int
    """Peak of the forward."""
    backward: int
    """Peak of the backward, or of its part for the input, where gradients of parameters are added to earlier ones."""
    weights: int
    """Peak of the part for the weights, likewise."""
    first: int
    """Peak of a step's first backward, or of its part for the weights, with the gradients of parameters that it makes."""
    constants: int
    """Tensors that all microbatches share, such as a causal mask."""
    weight_share: float
    """Of a backward in two parts: the weights' share of its operations."""


class Alive(TorchDispatchMode):
    """Counts the operations within its context, and the live bytes of the storages that they create.

    Storages of the tensors `apart` are not counted, nor `constants`, the tensors for which `counts` is false. `settled`
    bytes belong to accumulated gradients: `most` excludes them, `most_made` includes them.
    """

    def __init__(self, apart: Iterable[Tensor] = (), counts: Callable[[Tensor], bool] = lambda x: True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        self._formulas = (
            counting_operations().flop_registry
        )  # the counter as a context splits operations, which takes more memory
        self.operations = 0
        self._known: dict[int, Any] = {int(x.untyped_storage()._cdata): None for x in apart}
        self.constants: dict[int, int] = {}
        self.now = self.settled = 0
        self.begin()

    def begin(self) -> None:
        """Begin an action, and measure its peaks."""
        self.settled = 0
        self.most = self.most_made = self.now

    def add(self, x: Tensor) -> None:
        """Count a tensor's storage from now on, unless it is counted already."""
        place = x.untyped_storage()
        key, size = int(place._cdata), place.nbytes()
        if key in self._known:
            return

        def drop(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(place, drop)
        self.now += size
        self.most = max(self.most, self.now - self.settled)
        self.most_made = max(self.most_made, self.now)

    def settle(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter as accumulated; called after its accumulation."""
        assert parameter.grad is not None
        self.settled += parameter.grad.untyped_storage().nbytes()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count the storages of its results."""
        found = function(*args, **(kwargs or {}))
        if formula := self._formulas.get(getattr(function, "_overloadpacket", None)):
            self.operations += formula(*args, **(kwargs or {}), out_val=found)
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and self._counts(x):
                self.add(x)
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not self._counts(x):
                place = x.untyped_storage()
                self.constants[int(place._cdata)] = place.nbytes()
        return found


def footprint(
    alive: Alive,
    make_input: Callable[[], Value],
    forward: Callable[[Value], dict[str, Tensor]],
    parameters: Iterable[Tensor],
    *,
    first: bool,
    two_parts: bool,
) -> Footprint:
    """Run a microbatch through a stage, forward and backward, and return its bytes; parameters end without gradients.

    `forward` returns the outputs that the stage keeps until its backward. The `first` stage has no gradient of its input. A
    backward that fake tensors cannot run is counted at its start alone.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(alive.settle) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        with alive:
            inputs, exact = split(make_input())
            received = alive.now
            outputs = forward(join(inputs, exact))
            del exact
            saved, most_forward = alive.now, alive.most
            alive.begin()
            roots = [y for y in outputs.values() if y.requires_grad]
            gradients = [torch.empty_like(y) for y in roots]
            arrived = alive.now - saved
            kept = [inputs, outputs]
            del inputs, outputs
            try:
                run = (_first_in_parts if first else _in_parts) if two_parts else _whole
                waiting, backward, weights, share = run(alive, kept, roots, gradients)
            except Exception:
                waiting, backward, weights, share = saved + arrived, saved + arrived, saved + arrived, math.nan
            return Footprint(
                received=received,
                gradient=arrived,
                saved=saved,
                waiting=waiting,
                forward=most_forward,
                backward=backward,
                weights=weights,
                first=alive.most_made,
                constants=sum(alive.constants.values()),
                weight_share=share,
            )
    finally:
        for hook, parameter in zip(hooks, trained, strict=True):
            hook.remove()
            parameter.grad = None


_Kept = list[dict[str, Tensor]]  # the inputs and the outputs
_Parts = tuple[int, int, int, float]  # `waiting`, `backward`, `weights` and `weight_share` of a footprint


def _whole(alive: Alive, kept: _Kept, roots: list[Tensor], gradients: list[Tensor]) -> _Parts:
    if roots:
        torch.autograd.backward(roots, gradients)
    return 0, alive.most, 0, 0.0


def _first_in_parts(alive: Alive, kept: _Kept, roots: list[Tensor], gradients: list[Tensor]) -> _Parts:
    """Run the backward of the first stage: all of it is for the weights, since its input has no gradient."""
    waiting = alive.now
    return waiting, waiting, _whole(alive, kept, roots, gradients)[1], 1.0


def _in_parts(alive: Alive, kept: _Kept, roots: list[Tensor], gradients: list[Tensor]) -> _Parts:
    before = alive.operations
    found, caught = input_gradients(roots, gradients, list(kept[0].values()))
    for_inputs = alive.operations - before
    most = alive.most
    for held in (kept, roots, gradients, found):
        held.clear()
    waiting = alive.now
    alive.begin()
    run_branches(caught)
    both = alive.operations - before
    return waiting, most, alive.most, (both - for_inputs) / max(both, 1)


def counting_operations() -> Any:
    """Return a context that counts operations, two for a multiplication and addition."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, if installed

    return FlopCounterMode(display=False, custom_mapping=_CPU_FLOPS)
