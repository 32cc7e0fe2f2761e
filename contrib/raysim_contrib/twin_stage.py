"""A stage that also computes gradients at the previous step's parameters, for MARINA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from raysim.codecs import DTYPES, warm
from raysim.pipeline.stage import Stage
from raysim.pipeline.state import under
from raysim.values import UNNAMED, Value


class TwinStage(Stage):
    """Runs microbatches twice in `twin` steps: with the current parameters, then with those of the previous step.

    Values between stages then hold both results, in this order.
    """

    copies: ClassVar[int] = 2

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        methods: list[Any] = self.config.replica_methods()
        self._methods = [method for method in methods if method.stage_class() is type(self)]  # MARINA
        warm({method.codec for method in self._methods}, [DTYPES[self.config.dtype]])
        self.twin = False
        self._previous: dict[str, Tensor] = {}  # the previous step's parameters
        self._keeps = False  # whether this step's parameters are to be kept for the next step

    def begin(self, step: int, *, fresh: bool = False) -> None:
        super().begin(step, fresh=fresh)
        self.twin = not fresh and self._needs_previous(step)
        self.other_work = "twin" if self.twin else None
        self._keeps = self._needs_previous(step + 1)
        if not self.twin:
            self._previous = {}

    def _needs_previous(self, step: int) -> bool:
        return any(method.needs_previous_gradients(step, self.config.seed) for method in self._methods)

    def place(self, parameters: Mapping[str, Tensor]) -> None:
        """Place parameters, and keep the replaced ones if the step has not kept any yet."""
        if self._keeps:
            self._keeps = False
            self._hold({name: x.clone() for name, x in self.parameters()})
        super().place(parameters)

    def _hold(self, parameters: dict[str, Tensor]) -> None:
        """Hold the previous step's parameters, whose gradients accumulate in them."""
        self._previous = parameters
        for name, x in parameters.items():
            x.requires_grad_(self.module.get_parameter(name).requires_grad)
        self._unscale(parameters.values())

    def extra_gradients(self) -> dict[str, Tensor] | None:
        """Return the accumulated gradients at the previous step's parameters, None outside of twin steps."""
        if not self.twin:
            return None
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in self._previous.items()}

    def state(self) -> dict[str, Tensor]:
        kept = {f"previous.{name}": x.detach().cpu().clone() for name, x in self._previous.items()}
        return super().state() | kept

    def load(self, tensors: dict[str, Tensor]) -> None:
        super().load(tensors)
        self._hold({name: x.to(self.device, copy=True) for name, x in under("previous.", tensors).items()})

    def _compute(self, x: Value, key: int, targets: Tensor | None, tensors: dict[str, Tensor] | None) -> Value:
        if not self.twin:
            return super()._compute(x, key, targets, tensors)
        # a first layer in place would write to the data
        present, past = (
            ({UNNAMED: x[UNNAMED].clone()}, x) if self.first else ({UNNAMED: half} for half in x[UNNAMED].chunk(2))
        )
        # only the pass with the current parameters updates statistics
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        both = (
            super()._compute(present, key, targets, tensors),
            super()._compute(past, key, targets, {**self._previous, **buffers}),
        )
        outputs = [y[UNNAMED] for y in both]
        return {UNNAMED: torch.stack(outputs) if self.last else torch.cat(outputs)}
