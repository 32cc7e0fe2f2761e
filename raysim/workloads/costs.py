"""Costs of layers, counted without computing: a model is run on fake tensors, which have a shape and no values.

Fake tensors choose the same kernels as real ones, so that attention saves the same tensors for backward. Torch's meta device
would fall back to the form that saves the whole attention matrix.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from raysim.values import Boundary, Value, join, only, sent_bytes, split
from raysim.workloads.backward import caught_bytes
from raysim.workloads.losses import Loss, example_targets, make_loss
from raysim.workloads.splits import DataShape


class LayerCost(NamedTuple):
    """One layer of a model, for one microbatch."""

    name: str
    flops: int  # of forward: two per multiplication and addition
    output: Boundary
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
    >>> shadow.held_bytes(0, 2)  # the images, and the loss: 20 logarithms, 2 targets, a count
    (612, 0)
    """

    def __init__(self, model: nn.Sequential, shape: DataShape, batch: int, loss: Loss | None = None) -> None:
        self._loss = loss if loss is not None else make_loss(None, {}, shape)
        self._shape = shape
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._modules = named_layers(model)
        with self._mode:
            # deepcopy does not copy the entries of its memo, so no weight is copied, and tied weights stay tied
            state: dict[int, Any] = {id(x): self._mode.from_tensor(x) for x in [*model.parameters(), *model.buffers()]}
            self._copies = list(named_layers(copy.deepcopy(model, state).train()).values())
            self._state = {storage(x) for x in state.values() if isinstance(x, Tensor)}
        dtype = torch.int64
        if shape.input_dtype != "int64":  # as the model's parameters: a model in bfloat16 is fed bfloat16
            dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
        self._input = ((batch, *shape.input_shape), dtype)
        self.layers = self._count()

    def held_bytes(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes that layers start..stop-1, as one stage, keep between forward and backward, and the bytes of
        gradients that they keep between the two parts of a backward.

        Memory is counted once, without parameters and buffers. The stage's input counts if it is kept, and the loss belongs to the
        last layer. The first stage has no gradient of an input, so the second number is 0 there.
        """
        found: dict[int, int] = {}
        alive = []

        def keep(x: Tensor) -> Tensor:
            alive.append(x)
            if storage(x) not in self._state:
                found[storage(x)] = x.untyped_storage().nbytes()
            return x

        received = self._values[start]
        with self._mode, torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
            floats, exact = split(received)
            sources = {
                name: torch.empty_like(like, requires_grad=start > 0 and like.is_floating_point())
                for name, like in floats.items()
            }
            x = join(sources, exact)
            for index in range(start, stop):
                x = self._run(index, x)
                outputs = list(split(x)[0].values())
                alive += outputs
            if stop == len(self.layers):
                y = only(x)
                outputs = [self._loss(y, example_targets(self._loss, y, self._shape))]
                alive += outputs
            caught = caught_bytes(outputs, list(sources.values())) if start > 0 else 0
        return sum(found.values()), caught

    def _count(self) -> list[LayerCost]:
        layers = []
        with self._mode, torch.no_grad():
            x: Value = torch.empty(self._input[0], dtype=self._input[1])
            self._values: list[Value] = [x]  # that layers are given
            for index, layer in enumerate(self._modules):
                with FlopCounterMode(display=False, custom_mapping=_CPU_FLOPS) as counter:
                    x = self._run(index, x)
                self._values.append(x)
                floats, exact = split(x)
                output = Boundary(
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
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
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


def storage(x: Tensor) -> int:
    """Return an identity of a tensor's memory while it lives; fake tensors have no address."""
    return int(x.untyped_storage()._cdata)


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """Return the operations of the two matrix products; as torch's own count for GPUs, a causal mask saves none."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _lstm_flops(
    x: tuple[int, ...], input_weight: tuple[int, ...], state_weight: tuple[int, ...], *_: object, **__: object
) -> int:
    """Return the operations of the four gates' matrix products at every position of (length, batch, width)."""
    return 2 * x[0] * x[1] * (math.prod(input_weight) + math.prod(state_weight))


# kernels that torch's counter does not know
_CPU_FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
}
