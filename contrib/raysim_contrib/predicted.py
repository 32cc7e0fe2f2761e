"""SpecTrain and XPipe: weights extrapolated along the optimiser's updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raysim.schedules.weights import Continuous, Weights

_ADAPTIVE = ("adam", "adamw")


@dataclass(frozen=True, repr=False)
class Predicted(Continuous):
    """Reads the newest version extrapolated by `delay` optimiser steps, in a forward and its backward::

        forward and backward at:  V = W[t - delay] - delay rate u[t - delay]
        W[t+1] = W[t] - rate grad f(V)

    With sgd, u is the momentum (SpecTrain, Chen et al. 2018, 1809.02839). With adam and adamw it is their step, m / (sqrt(v) +
    epsilon) with bias correction of both means (XPipe, Guan et al. 2019, 1911.04610).

    Use: Long delays with momentum or Adam.
    """

    variants: ClassVar[tuple[str, ...]] = ("Predicted",)

    def check(self, run: Any) -> None:
        optimizer, momentum = run.optimizer.name, run.optimizer.momentum
        keeping = next((method for method in run.replica_methods() if method.keeps_momentum), None)
        if keeping is not None:
            raise ValueError(
                f"`replica_gradient` cannot be {keeping!r} with {self!r}: it keeps the momentum by which weights are predicted."
            )
        if optimizer not in ("sgd", *_ADAPTIVE):
            raise ValueError(
                f"`optimizer.name` must be sgd, {' or '.join(_ADAPTIVE)} with {self!r}, which extrapolates their updates, "
                f"but got {optimizer!r}."
            )
        if optimizer == "sgd" and not momentum:
            raise ValueError(
                f"`optimizer.momentum` must be above 0 with {self!r}, which predicts weights from it, but got {momentum}."
            )

        if run.optimizer.options.get("nesterov"):
            raise ValueError(
                f"`optimizer.nesterov` must be left out with {self!r}, which predicts weights from the momentum alone, but got True."
            )

    def check_plan(self, plan: Any, modules: Sequence[Any]) -> None:
        for stage, module in enumerate(modules):
            if any(hasattr(part, "constrain") for part in module.modules()):
                raise ValueError(
                    f"`weights` cannot be {self!r} at stage {stage}, whose weights are constrained after each update: "
                    "predicted ones would not be."
                )

    def forward_weights(
        self, newest: Weights, directions: Callable[[], Weights], rate: float, delays: Sequence[int]
    ) -> dict[int, Weights]:
        known = directions()
        return {
            delay: {
                name: x - (delay * rate) * known[name] if name in known else x.clone() for name, x in newest.items()
            }
            for delay in delays
        }

    def num_copies(self, delays: Sequence[int]) -> int:
        lengths = {delay for delay in delays if delay}
        return len(lengths) * (max(delays) + 1)
