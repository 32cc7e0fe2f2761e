"""Costs of layers and memory of stages, counted by running a model on fake tensors, which have shapes but no values.

Fake tensors choose the same kernels as real ones, so that attention saves the same tensors for backward. Torch's meta device
would fall back to the form that saves the whole attention matrix.

The memory of a microbatch is counted from the start of its forward to the end of its backward. Every storage is followed from the
operation that makes it until it is freed, including temporaries that autograd and the layers hold. Memory that a kernel allocates
and frees within one operation is not seen.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raysim.values import UNNAMED, BoundaryTensors, Value, join, only, sent_bytes, split
from raysim.workloads.losses import Loss, example_targets, make_loss
from raysim.workloads.options import reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.two_part_backward import input_gradients, run_branches
from raysim.workloads.weightless import fake


class LayerCost(NamedTuple):
    """One layer of a model, for one microbatch."""

    name: str
    flops: int  # of forward: two per multiplication and addition
    output: BoundaryTensors
    output_dtypes: dict[str, torch.dtype]  # of the tensors of floating-point numbers
    output_bytes: int  # of these


class Shadow:
    """A copy of a model on fake tensors, in training mode, and the cost of each of its layers for `batch` samples.

    Raises ValueError naming the layer that fails, or that returns neither one tensor nor named ones.

    >>> from raysim.workloads.data import DataShape
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> shadow = Shadow(model, DataShape((1, 8, 8), "float32", 10), batch=2)
    >>> [(layer.name, layer.flops, layer.output.shape) for layer in shadow.layers]
    [('0', 0, (2, 64)), ('1', 2560, (2, 10))]
    >>> shadow.footprint(0, 2).saved  # the images, 20 logarithms, 2 targets, a count, and the loss
    616
    """

    def __init__(self, model: nn.Sequential, shape: DataShape, batch: int, loss: Loss | None = None) -> None:
        self._loss = loss if loss is not None else make_loss(None, {}, shape)
        self._shape = shape
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._modules = named_layers(model)
        with self._mode:
            # deepcopy does not copy the entries of its memo, so no weight is copied, and tied weights stay tied
            state: dict[int, Any] = {id(x): torch.empty_like(x) for x in model.buffers()}
            state |= {id(x): nn.Parameter(torch.empty_like(x), x.requires_grad) for x in model.parameters()}
            self._copies = list(named_layers(copy.deepcopy(model, state).train()).values())
            self._state = [x for x in state.values() if isinstance(x, Tensor)]
        dtype = torch.int64
        if shape.input_dtype != "int64":  # as the model's parameters: a model in bfloat16 is fed bfloat16
            dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
        self._footprints: dict[tuple[int, int, bool, torch.dtype], Footprint] = {}
        self._input = ((batch, *shape.input_shape), dtype)
        self.layers = self._count()

    def footprint(
        self, start: int, stop: int, *, two_parts: bool = False, dtype: torch.dtype = torch.float32
    ) -> Footprint:
        """Return the bytes of a microbatch at layers start..stop-1, as one stage whose backward is in one part or in two.

        The loss belongs to the last layer. `dtype` is that of the stage's computation, see `autocast` of torch.
        """
        key = start, stop, two_parts, dtype
        if key not in self._footprints:
            self._footprints[key] = self._footprint(*key)
        return self._footprints[key]

    def _footprint(self, start: int, stop: int, two_parts: bool, dtype: torch.dtype) -> Footprint:
        last, low_precision = stop == len(self.layers), dtype != torch.float32

        def make_input() -> Value:
            floats, exact = split(self._values[start])
            sources = {
                name: torch.empty_like(
                    like,
                    dtype=dtype if low_precision and start > 0 else like.dtype,
                    requires_grad=start > 0 and like.is_floating_point(),
                )
                for name, like in floats.items()
            }
            return join(sources, {name: torch.empty_like(like) for name, like in exact.items()})

        def forward(x: Value) -> dict[str, Tensor]:
            with torch.autocast("cpu", dtype, enabled=low_precision):
                for index in range(start, stop):
                    x = self._run(index, x)
            if last:
                y = only(x)
                return {UNNAMED: self._loss(y, example_targets(self._loss, y, self._shape))}
            return {name: y.to(dtype) if low_precision else y for name, y in split(x)[0].items()}

        parameters = {p: None for layer in self._copies[start:stop] for p in layer.parameters()}
        alive = Alive(self._state, lambda x: isinstance(x, FakeTensor))
        with fake(self._mode), torch.enable_grad():
            return footprint(alive, make_input, forward, parameters, first=start == 0, two_parts=two_parts)

    def _count(self) -> list[LayerCost]:
        layers = []
        with fake(self._mode), torch.no_grad():
            x: Value = torch.empty(self._input[0], dtype=self._input[1])
            self._values: list[Value] = [x]  # that layers are given
            for index, layer in enumerate(self._modules):
                with _counting() as counter:
                    x = self._run(index, x)
                self._values.append(x)
                floats, exact = split(x)
                output = BoundaryTensors(
                    {name: tuple(y.shape) for name, y in floats.items()},
                    {name: sent_bytes(y) for name, y in exact.items()},
                )
                dtypes, size = {name: y.dtype for name, y in floats.items()}, sum(y.nbytes for y in floats.values())
                layers.append(LayerCost(layer, counter.get_total_flops(), output, dtypes, size))
        return layers

    def _run(self, index: int, x: Value) -> Value:
        name = list(self._modules)[index]
        try:
            y = self._copies[index](x)
        except (Exception, SystemExit) as error:
            reason = reason_of(error)
            on = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"the tensors {', '.join(x)}"
            raise ValueError(f"Layer `{name}` failed on {on}: {reason}.") from error
        last = index == len(self._copies) - 1
        named = isinstance(y, dict) and all(isinstance(each, Tensor) for each in y.values()) and not last
        if not isinstance(y, Tensor) and not named:
            kinds = "one tensor" if last else "one tensor, or a dictionary of named tensors"
            raise ValueError(
                f"Layer `{name}` must return {kinds}, but got {type(y).__name__}. Wrap it in a module that does."
            )
        try:
            split(y)
        except ValueError as error:
            raise ValueError(f"Layer `{name}`: {error}") from None
        found: Value = y
        return found


def named_layers(model: nn.Sequential) -> dict[str, nn.Module]:
    """Return the layers by name, in order; unlike `named_children`, a module used twice counts twice."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if name and "." not in name}


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
    """Counts the live bytes of storages created by operations within its context.

    Storages of the tensors `apart` are not counted, nor `constants`, the tensors for which `counts` is false. `settled`
    bytes belong to accumulated gradients: `most` excludes them, `most_made` includes them.
    """

    def __init__(self, apart: Iterable[Tensor] = (), counts: Callable[[Tensor], bool] = lambda x: True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
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
    """Run the backward of the first stage, which computes nothing before the part for the weights."""
    waiting = alive.now
    return waiting, waiting, _whole(alive, kept, roots, gradients)[1], 1.0


def _in_parts(alive: Alive, kept: _Kept, roots: list[Tensor], gradients: list[Tensor]) -> _Parts:
    with _counting() as inputs:
        found, caught = input_gradients(roots, gradients, list(kept[0].values()))
    most = alive.most
    for held in (kept, roots, gradients, found):
        held.clear()
    waiting = alive.now
    alive.begin()
    with _counting() as weights:
        run_branches(caught)
    flops = inputs.get_total_flops(), weights.get_total_flops()
    return waiting, most, alive.most, flops[1] / max(sum(flops), 1)


def _counting() -> Any:
    """Return a context that counts operations, two for a multiplication and addition."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, if installed

    return FlopCounterMode(display=False, custom_mapping=_CPU_FLOPS)
