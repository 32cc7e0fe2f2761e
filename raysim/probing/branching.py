"""Branches of a user's training: the same steps, dense and under each candidate, from one state, which is then restored."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raysim.codecs import NonFiniteError
from raysim.nn.link import CompressedLink
from raysim.quality import MEASURES
from raysim.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class Branch(NamedTuple):
    """The training losses of one candidate by step; infinite from the step in which it diverged."""

    candidate: str
    losses: tuple[float, ...]

    def harm(self, dense: Branch) -> float:
        """Return by how many per cent the mean loss exceeds `dense`'s over the second half of the steps.

        NaN if that is not above 0, as with other harms.
        """
        half = len(self.losses) // 2
        own, other = (math.fsum(each.losses[half:]) for each in (self, dense))
        return MEASURES["loss"].harm(own, other)


class TrainingSnapshot:
    """An in-memory copy of a training: a model's tensors, gradients and modes, other states, and random generators.

    `restore` is bit for bit. Optimiser states are copied directly, since `load_state_dict` would cast them. A tensor that a
    step replaces by another one is put back.
    """

    def __init__(self, model: nn.Module, state: Sequence[Stateful] = ()) -> None:
        held = [slots for module in model.modules() for slots in (module._parameters, module._buffers)]
        self._held = [(slots, dict(slots)) for slots in held]
        self._tensors = [(x, x.detach().clone()) for x in (*model.parameters(), *model.buffers())]
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self._modes = [(module, module.training) for module in model.modules()]
        self._optimizers = [(each, _slots(each)) for each in state if isinstance(each, torch.optim.Optimizer)]
        others = [each for each in state if not isinstance(each, torch.optim.Optimizer)]
        self._others = [(each, copy.deepcopy(each.state_dict())) for each in others]
        self._random = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Bytes of the copied tensors."""
        gradients = [gradient for _, gradient in self._gradients if gradient is not None]
        slots = [x for _, (kept, _) in self._optimizers for own in kept.values() for x in own.values()]
        copies = [*(kept for _, kept in self._tensors), *gradients, *(x for x in slots if isinstance(x, Tensor))]
        return sum(x.nbytes for x in copies)

    def restore(self) -> None:
        """Restore the state; may be called repeatedly."""
        for own, before in self._held:
            own.update(before)  # type: ignore[arg-type]
        with torch.no_grad():
            for x, kept in self._tensors:
                x.copy_(kept)
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        for module, mode in self._modes:
            module.training = mode
        for optimizer, (slots, groups) in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update({parameter: _copy(own) for parameter, own in slots.items()})
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(options))
        for other, entries in self._others:
            other.load_state_dict(copy.deepcopy(entries))
        cpu, numpy_state, python_state = self._random
        torch.set_rng_state(cpu)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def branches(
    model: nn.Module,
    cuts: Sequence[nn.Module],
    candidates: Sequence[str],
    train_step: Callable[[Any], Tensor | float],
    batches: Sequence[Any],
    state: Sequence[Stateful] = (),
    *,
    num_microbatches: int = 1,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> list[Branch]:
    """Return the losses of `train_step` on `batches` under each candidate, starting from the current state, then restored.

    Outputs of `cuts` and their gradients go through the candidate, a notation for both directions. `state`: objects other than
    the model that `train_step` changes, such as the optimiser. `say` gets the expected cost before the first step. Raises ValueError
    if there are no batches, or a cut returns no tensor.
    """
    if not batches:
        raise ValueError("`batches` must hold at least one batch, but is empty.")
    snapshot = TrainingSnapshot(model, state)
    if say is not None:
        steps = len(candidates) * len(batches)
        say(
            f"Branching: {len(candidates)} settings of {len(batches)} steps each take the time of {steps} steps of the training, and "
            f"{format_bytes(snapshot.num_bytes)} of memory for its state."
        )
    results = []
    try:
        for candidate in candidates:
            with _linked(cuts, candidate, num_microbatches, seed):
                results.append(Branch(candidate, _losses(train_step, batches)))
            snapshot.restore()
    finally:
        snapshot.restore()
    return results


def _losses(train_step: Callable[[Any], Tensor | float], batches: Sequence[Any]) -> tuple[float, ...]:
    losses: list[float] = []
    for batch in batches:
        try:
            loss = train_step(batch)
        except NonFiniteError:
            return (*losses, *[math.inf] * (len(batches) - len(losses)))
        losses.append(loss.item() if isinstance(loss, Tensor) else loss)
    return tuple(losses)


@contextmanager
def _linked(cuts: Sequence[nn.Module], candidate: str, num_microbatches: int, seed: int) -> Iterator[None]:
    """Pass the outputs of modules through links within the context."""
    hooks = []
    for boundary, cut in enumerate(cuts):
        link = CompressedLink(candidate, candidate, boundary=boundary, num_microbatches=num_microbatches, seed=seed)

        def cross(module: nn.Module, inputs: Any, output: Any, link: CompressedLink = link) -> Tensor:
            if not isinstance(output, Tensor):
                raise ValueError(f"`cuts` must be modules that return a tensor, but got {type(output).__name__}.")
            link.train(module.training)
            received: Tensor = link(output)
            return received

        hooks.append(cut.register_forward_hook(cross))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _slots(optimizer: torch.optim.Optimizer) -> tuple[dict[Tensor, dict[str, Any]], list[dict[str, Any]]]:
    """Return copies of an optimiser's state by parameter and of its groups' options."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {parameter: _copy(own) for parameter, own in optimizer.state.items()}, copy.deepcopy(groups)


def _copy(slots: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's slots; a clone of a tensor leaves out the rest of its storage."""
    return {name: x.clone() if isinstance(x, Tensor) else copy.deepcopy(x) for name, x in slots.items()}
