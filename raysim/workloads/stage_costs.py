"""Costs of layers and memory of stages, counted by running a model on fake tensors, which have shapes but no values.

Fake tensors choose the same kernels as real ones, so that attention saves the same tensors for backward. Torch's meta device
would fall back to the form that saves the whole attention matrix.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from raysim.values import UNNAMED, BoundaryTensors, Value, join, only, sent_bytes, split
from raysim.workloads.footprint import Alive, Footprint, counting_operations, footprint
from raysim.workloads.losses import Loss, example_targets, make_loss
from raysim.workloads.options import reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.weightless import fake


class LayerCost(NamedTuple):
    """One layer of a model, for one microbatch."""

    name: str
    flops: int  # of forward: two per multiplication and addition
    output: BoundaryTensors
    output_dtypes: dict[str, torch.dtype]  # of the tensors of floating-point numbers
    output_bytes: int  # of these

    @property
    def sent_bytes(self) -> int:
        """Bytes that cross a cut after the layer, uncompressed: its tensors, and the gradients that come back."""
        return 2 * self.output_bytes + sum(self.output.exact_bytes.values())


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
                with counting_operations() as counter:
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
