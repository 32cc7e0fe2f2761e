"""AC-GC's error budget (Evans, Aamodt 2021, NeurIPS): activations get as many bits as the gradients of weights need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from raysim.codecs import Codec, Identity, Packet
from raysim.codecs.message import wire_bytes
from raysim.compressors.compressor import Compressor, Context, Decision, State, StepFacts
from raysim.notation import check_real
from raysim.on_demand import torch
from raysim_contrib.error_bounded import ErrorBounded
from raysim_contrib.sensitivity import Sensitivity

if TYPE_CHECKING:
    from torch import nn

    from raysim.values import BoundaryTensors

TALLY = -1  # key of the method's own state; keys of messages are at least 0
_COARSEST = 1e30  # the largest bound of ErrorBounded


@dataclass(frozen=True, repr=False)
class ACGC(Compressor):
    """Sends activations by ErrorBounded(e), with the squared error of weight gradients at most the share `budget` of their
    squared norm (Evans, Aamodt 2021).

    An error dx of the activations changes the gradient of weights w by a squared norm of at most u ||dx||^2 ||grad y||^2
    (Cauchy-Schwarz; y is the layer's output; u is its kernel positions over stride, 1 for nn.Linear). With S = sum ||grad w||^2 /
    sum u ||grad y||^2 over the Conv and Linear layers that read the activations, and n activation values in a step,
    e = sqrt(3 budget S / (2n)); the 2 is the paper's margin.

    The receiving stage measures S in every step, and the sender uses it in the step after next; the first two steps are dense. If S
    is zero or not finite, the bound stays. If no such layer reads the activations, the stage's first one is measured; without any,
    nothing is compressed. The paper has a bit width per channel of stored activations, here each link has one bound.

    Use: Forward links with a bound on the gradient's error.

    >>> acgc = ACGC(0.1)
    >>> acgc.bound(sensitivity=60.0, values=900), acgc.bound(sensitivity=0.0, values=900)
    (0.1, None)
    """

    directions: ClassVar[tuple[str, ...]] = ("forward",)
    needs: ClassVar[frozenset[str]] = frozenset({"stage"})
    variants: ClassVar[tuple[str, ...]] = ("ACGC(0.1)",)
    message_varies: ClassVar[bool] = True

    budget: float

    def __post_init__(self) -> None:
        self._coerce(budget=check_real("budget", self.budget, 0, 1, open_low=True))

    @property
    def codec(self) -> Codec:  # type: ignore[override]
        """The codec, with an arbitrary bound."""
        return ErrorBounded(1.0)

    def meter(self, module: nn.Module) -> Sensitivity:
        return Sensitivity(module)

    def check(self, run: Any) -> None:
        if run.gradient_scale != 1:
            raise ValueError(
                f"`loss_scale` must be 1 with {self!r}, which measures gradients, but got {run.gradient_scale:g}."
            )
        if run.weights.between_steps == "continue":
            raise ValueError(
                f"`forward` cannot be {self!r} with {run.weights!r}: it measures one version of the weights."
            )

    def check_boundary(self, boundary: int, tensors: BoundaryTensors) -> None:
        if tensors.several:
            raise ValueError(f"`forward` cannot be {self!r} at boundary {boundary}, where several tensors cross.")

    def bound(self, sensitivity: float | None, values: float) -> float | None:
        """Return e for `values` values per step; None if the sensitivity S is zero or not finite."""
        if sensitivity is None or not values:
            return None
        e = math.sqrt(max(0.0, 3 * self.budget * sensitivity / (2 * values)))
        return e if 0 < e <= _COARSEST else None

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        tally = _read(state)
        packet = _codec(tally).encode(x.detach(), context.key)
        sent = tally._replace(
            values=tally.values + x.numel(),
            wire_bytes=tally.wire_bytes + wire_bytes(self.table.pack(packet)),
            dense_bytes=tally.dense_bytes + x.nbytes,
        )
        return packet, {TALLY: sent.tensor()}

    def end_step(self, state: State, context: Context, facts: StepFacts) -> tuple[State, list[Decision]]:
        tally = _read(state)
        following = _Tally(bound=self.bound(facts.sensitivity, tally.values) or tally.bound)
        decision = Decision(
            branch="bounded" if tally.bound else "dense",
            factor=tally.dense_bytes / tally.wire_bytes if tally.wire_bytes else 1.0,
            reason=(
                f"no value may be off by more than {following.bound:.4g} in the next step, by which the gradient of the weights "
                f"that read it moves by at most {self.budget:g} of its squared norm"
                if following.bound
                else f"a budget of {self.budget:g} sets no bound before gradients of the weights that read it are known"
            ),
        )
        return {TALLY: following.tensor()}, [decision]

    def evaluation(self, mode: str, state: State) -> Codec:
        """Return the codec of the current bound."""
        return _codec(_read(state))


class _Tally(NamedTuple):
    """The sender's state: the bound of the current step, and the totals of its messages."""

    bound: float = 0.0  # 0 while unknown
    values: float = 0.0
    wire_bytes: float = 0.0
    dense_bytes: float = 0.0

    def tensor(self) -> torch.Tensor:
        """Return the fields as a float64 tensor."""
        return torch.tensor(self, dtype=torch.float64)


def _read(state: State) -> _Tally:
    return _Tally(*state[TALLY].tolist()) if TALLY in state else _Tally()


def _codec(tally: _Tally) -> Codec:
    return ErrorBounded(tally.bound) if tally.bound else Identity()
