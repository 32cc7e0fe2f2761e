"""Operations of layers and memory of stages, counted by running a model on fake tensors (shapes without values).

Fake tensors choose the same kernels as real ones, so attention saves the same tensors for backward. Torch's meta device
would fall back to a kernel that saves the whole attention matrix.

Memory is counted from the start of a microbatch's forward to the end of its backward. Every storage is tracked from its creation
until it is freed, including temporaries held by autograd and the layers. Memory that a kernel allocates and frees within one
operation is not seen.
"""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raysim.values import (
    UNNAMED,
    BoundaryTensors,
    ModuleValue,
    Value,
    argument_of,
    exact,
    floats,
    sent_bytes,
    value_of,
)
from raysim.workloads.losses import Loss, example_targets, make_loss
from raysim.workloads.options import reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.two_part_backward import input_gradients, run_branches
from raysim.workloads.weightless import fake

Shape = tuple[int, ...]


class LayerCost(NamedTuple):
    """The cost of one layer for one microbatch."""

    name: str
    flops: int  # of the forward; a multiply-add counts as two
    output: BoundaryTensors
    output_dtypes: dict[str, torch.dtype]  # of the floating-point tensors
    output_bytes: int  # of the floating-point tensors

    @property
    def sent_bytes(self) -> int:
        """Uncompressed bytes that cross a cut after the layer: activations and gradients."""
        return 2 * self.output_bytes + sum(self.output.exact_bytes.values())


class Footprint(NamedTuple):
    """Bytes of one microbatch at a stage, without parameters, buffers and previously accumulated gradients.

    Peaks are maxima over time of the microbatch's live tensors. `waiting` and `weights` are 0 unless the backward has
    two parts.
    """

    received: int  # the stage's input
    gradient: int  # the received gradient
    saved: int  # between forward and backward: tensors saved by autograd, the input and the output
    waiting: int  # between the two parts of a backward
    forward: int  # peak of the forward
    backward: int  # peak of the backward, or of its input part, if parameter gradients are added to earlier ones
    weights: int  # peak of the weight part, likewise
    first: int  # peak of a step's first backward, or its weight part, including the parameter gradients it creates
    constants: int  # tensors that all microbatches share, such as a causal mask
    weight_share: float  # the weight part's share of the operations of a backward in two parts


_COUNTING = threading.Lock()  # gradients of fake parameters are those of one count at a time


class Shadow:
    """A copy of a model on fake tensors, in training mode, with the cost of each layer for `batch` samples.

    Raises ValueError naming a layer that fails, or returns neither one tensor nor named ones.

    >>> from raysim.workloads.data import DataShape
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> shadow = Shadow(model, DataShape((1, 8, 8), "float32", 10), batch=2)
    >>> [(layer.name, layer.flops, layer.output.shape) for layer in shadow.layers]
    [('0', 0, (2, 64)), ('1', 2560, (2, 10))]
    >>> shadow.footprint(0, 2).saved  # the images, 20 logarithms, 2 targets, a count, and the loss
    616
    """

    def __init__(self, model: nn.Sequential, shape: DataShape, batch: int, loss: Loss | None = None) -> None:
        self.loss = loss if loss is not None else make_loss(None, {}, shape)
        self._shape = shape
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._names = list(named_layers(model))
        with self._mode:
            # deepcopy takes the entries of its memo as they are, so no weight is copied, and tied weights stay tied
            state: dict[int, Any] = {id(x): torch.empty_like(x) for x in model.buffers()}
            state |= {id(x): nn.Parameter(torch.empty_like(x), x.requires_grad) for x in model.parameters()}
            self._copies = list(named_layers(copy.deepcopy(model, state).train()).values())
            self._state = [x for x in state.values() if isinstance(x, Tensor)]
        dtype = torch.int64
        if shape.input_dtype != "int64":  # the dtype of the model's parameters, such as bfloat16
            dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
        self._footprints: dict[tuple[int, int, bool, torch.dtype], Footprint] = {}
        self.layers: list[LayerCost] = []
        with fake(self._mode), torch.no_grad():
            data = torch.empty((batch, *shape.input_shape), dtype=dtype)
            self._values: list[Value] = [{UNNAMED: data}]  # inputs of the layers
            for i, name in enumerate(self._names):
                with counting_operations() as counter:
                    self._values.append(self._run(i, self._values[i]))
                coded = floats(self._values[-1])
                output = BoundaryTensors(
                    {key: tuple(y.shape) for key, y in coded.items()},
                    {key: sent_bytes(y) for key, y in exact(self._values[-1]).items()},
                )
                dtypes, size = {key: y.dtype for key, y in coded.items()}, sum(y.nbytes for y in coded.values())
                self.layers.append(LayerCost(name, counter.get_total_flops(), output, dtypes, size))

    def footprint(
        self, start: int, stop: int, *, two_parts: bool = False, dtype: torch.dtype = torch.float32
    ) -> Footprint:
        """Return the bytes of a microbatch at a stage of layers start..stop-1, with a backward in one part or in two.

        The loss belongs to the last layer. `dtype` is that of torch's `autocast`. If the backward cannot run on fake tensors,
        only its start is counted.
        """
        key = start, stop, two_parts, dtype
        with _COUNTING:
            if key in self._footprints:
                return self._footprints[key]
            layers = self._copies[start:stop]
            parameters = dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad)
            alive = Alive(self._state, lambda x: isinstance(x, FakeTensor))
            hooks = [p.register_post_accumulate_grad_hook(alive.settle) for p in parameters]  # type: ignore[no-untyped-call]
            try:
                with fake(self._mode), torch.enable_grad(), alive:
                    self._footprints[key] = self._count(alive, *key)
            finally:
                for hook, parameter in zip(hooks, parameters, strict=True):
                    hook.remove()
                    parameter.grad = None
        return self._footprints[key]

    def _count(self, alive: Alive, start: int, stop: int, two_parts: bool, dtype: torch.dtype) -> Footprint:
        given = self._inputs(start, dtype)
        received = alive.now
        outputs, inputs = self._outputs(given, start, stop, dtype), floats(given)
        del given
        saved, most_forward = alive.now, alive.most
        alive.begin()
        roots = [y for y in outputs.values() if y.requires_grad]
        gradients = [torch.empty_like(y) for y in roots]
        arrived = alive.now - saved
        kept = [inputs, outputs]
        del inputs, outputs
        try:
            waiting, backward, weights, share = _backward(alive, kept, roots, gradients, start == 0, two_parts)
        except Exception:
            waiting, backward, weights, share = saved + arrived, saved + arrived, saved + arrived, math.nan
        constants = sum(alive.constants.values())
        return Footprint(
            received, arrived, saved, waiting, most_forward, backward, weights, alive.most_made, constants, share
        )

    def _inputs(self, start: int, dtype: torch.dtype) -> Value:
        coded, unchanged = floats(self._values[start]), exact(self._values[start])
        inputs = {
            name: torch.empty_like(
                like,
                dtype=dtype if dtype != torch.float32 and start > 0 else like.dtype,
                requires_grad=start > 0 and like.is_floating_point(),
            )
            for name, like in coded.items()
        }
        return inputs | {name: torch.empty_like(like) for name, like in unchanged.items()}

    def _outputs(self, x: Value, start: int, stop: int, dtype: torch.dtype) -> Value:
        """Return the outputs kept until the backward, or the loss."""
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            for i in range(start, stop):
                x = self._run(i, x)
        if stop == len(self.layers):
            y = x[UNNAMED]
            return {UNNAMED: self.loss(y, example_targets(self.loss, y, self._shape))}
        return {name: y.to(dtype) if dtype != torch.float32 else y for name, y in floats(x).items()}

    def _run(self, index: int, x: Value) -> Value:
        name = self._names[index]
        try:
            y: ModuleValue = self._copies[index](argument_of(x))
        except (Exception, SystemExit) as error:
            on = f"a tensor of shape {tuple(x[UNNAMED].shape)}" if UNNAMED in x else f"the tensors {', '.join(x)}"
            raise ValueError(f"Layer `{name}` failed on {on}: {reason_of(error)}.") from error
        last = index == len(self._copies) - 1
        named = isinstance(y, dict) and all(isinstance(each, Tensor) for each in y.values()) and not last
        if not isinstance(y, Tensor) and not named:
            kinds = "one tensor" if last else "one tensor, or a dictionary of named tensors"
            raise ValueError(
                f"Layer `{name}` must return {kinds}, but got {type(y).__name__}. Wrap it in a module that does."
            )
        try:
            return value_of(y)
        except ValueError as error:
            raise ValueError(f"Layer `{name}`: {error}") from None


def named_layers(model: nn.Sequential) -> dict[str, nn.Module]:
    """Return the layers by name, in order; unlike `named_children`, a module used twice counts twice."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if name and "." not in name}


def _backward(
    alive: Alive,
    kept: list[dict[str, Tensor]],
    roots: list[Tensor],
    gradients: list[Tensor],
    first: bool,
    two_parts: bool,
) -> tuple[int, int, int, float]:
    """Run a backward; returns `waiting`, `backward`, `weights` and `weight_share` of its footprint.

    `kept`: the inputs and the outputs. The first stage's backward has only a weight part, since its input needs no gradient.
    """
    before, waiting = alive.operations, alive.now
    if first or not two_parts:
        if roots:
            torch.autograd.backward(roots, gradients)
        return (waiting, waiting, alive.most, 1.0) if two_parts else (0, alive.most, 0, 0.0)
    input_grads, caught = input_gradients(roots, gradients, list(kept[0].values()))
    for_inputs = alive.operations - before
    most = alive.most
    for held in (kept, roots, gradients, input_grads):
        held.clear()
    waiting = alive.now
    alive.begin()
    run_branches(caught)
    both = alive.operations - before
    return waiting, most, alive.most, (both - for_inputs) / max(both, 1)


class Alive(TorchDispatchMode):
    """Counts the operations within its context, and the live bytes of the storages that they create.

    Storages of the tensors `apart` are not counted, nor `constants`, the tensors for which `counts` is false. `settled`
    is the bytes of accumulated gradients: the peak `most` excludes them, `most_made` includes them.
    """

    def __init__(self, apart: Iterable[Tensor] = (), counts: Callable[[Tensor], bool] = lambda x: True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        # used as a context, the counter would decompose operations, which takes more memory
        self._formulas = counting_operations().flop_registry
        self.operations = 0
        self._known: dict[int, Any] = {int(x.untyped_storage()._cdata): None for x in apart}
        self.constants: dict[int, int] = {}
        self.now = 0
        self.begin()

    def begin(self) -> None:
        """Begin an action, whose peaks are then measured."""
        self.settled = 0
        self.most = self.most_made = self.now

    def add(self, x: Tensor) -> None:
        """Count a tensor's storage from now on, unless it is counted already."""
        storage = x.untyped_storage()
        key, size = int(storage._cdata), storage.nbytes()
        if key in self._known:
            return

        def drop(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, drop)
        self.now += size
        self.most = max(self.most, self.now - self.settled)
        self.most_made = max(self.most_made, self.now)

    def settle(self, parameter: Tensor) -> None:
        """Count a parameter's gradient as accumulated; called after its accumulation."""
        assert parameter.grad is not None
        self.settled += parameter.grad.untyped_storage().nbytes()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count the storages of its results."""
        results = function(*args, **(kwargs or {}))
        if formula := self._formulas.get(getattr(function, "_overloadpacket", None)):
            self.operations += formula(*args, **(kwargs or {}), out_val=results)
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and self._counts(x):
                self.add(x)
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not self._counts(x):
                storage = x.untyped_storage()
                self.constants[int(storage._cdata)] = storage.nbytes()
        return results


def counting_operations() -> Any:
    """Return a context that counts operations; a multiply-add counts as two."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, if installed

    return FlopCounterMode(display=False, custom_mapping=_CPU_FLOPS)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Return the operations of the two matrix products; like torch's count for GPUs, without savings from a causal mask."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward_flops(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Return the operations of the five matrix products, including the recomputed scores."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


def _lstm_flops(x: Shape, input_weight: Shape, state_weight: Shape, *_: object, **__: object) -> int:
    """Return the operations of the four gates' matrix products at every position of (length, batch, width)."""
    return 2 * x[0] * x[1] * (math.prod(input_weight) + math.prod(state_weight))


_CPU_FLOPS: dict[Any, Any] = {  # kernels unknown to torch's counter
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
}
