"""A check that a run is deterministic: its first steps are taken twice, and every output of every layer is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raysim.config import RunConfig
from raysim.engine.inline import InlineEngine
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.prepare import prepare
from raysim.workloads.data import Data

STEPS = 3


class _Seen(NamedTuple):
    """A tensor that training has made, or several: where, and a digest of their bits."""

    where: str
    digest: bytes


def first_difference(config: RunConfig, data: Data) -> str | None:
    """Return where the first `STEPS` steps of a run differ when they are taken twice, None if they give the same bits.

    Both times the model is made anew, and all stages run in this process: on its GPU where it has one and the run may use
    it. The first difference is named by step, stage and layer.
    """
    for one, other in zip_longest(_take(config, data), _take(config, data)):
        if one is None or other is None:  # the second time there was more, or less
            return (one or other).where
        if one != other:
            return str(one.where)
    return None


def _take(config: RunConfig, data: Data) -> list[_Seen]:
    """Return all that the first steps make, in order."""
    workload = prepare(config, data)
    seen = [
        _Seen(f"the initial value of `{name}` in stage {stage}", _digest(tensor))
        for stage, module in enumerate(workload.modules)
        for name, tensor in module.state_dict().items()
    ]
    engine = InlineEngine(workload)
    engine.start()
    try:
        stages = {index: stage for worker in engine.workers for index, stage in worker.stages.items()}
        for step in range(min(STEPS, workload.plan.num_steps)):
            hooks = [hook for index in stages for hook in _watch(stages[index].module, index, step, seen)]
            try:
                engine.step(step)
            except DivergedError as error:
                return [*seen, _Seen(str(error), b"")]
            finally:
                for hook in hooks:
                    hook.remove()
            for index in sorted(stages, reverse=True):  # as gradients come
                for name, tensor in stages[index].state().items():
                    where = f"`{name.removeprefix('model.')}` of stage {index} after the update of step {step}"
                    seen.append(_Seen(where, _digest(tensor)))
    finally:
        engine.close()
    return seen


def _watch(module: nn.Module, stage: int, step: int, seen: list[_Seen]) -> Iterator[Any]:
    """Note the inputs and outputs of every layer of a stage; yield the hooks."""

    def note(what: str, _: nn.Module, inputs: Any, output: Any = None) -> None:
        seen.append(_Seen(f"{what} in step {step}, stage {stage}", _digest(inputs if output is None else output)))

    for name, layer in module.named_modules():
        if not name:
            first = "the data" if stage == 0 else "what the stage received"
            yield layer.register_forward_pre_hook(partial(note, first))
        else:
            yield layer.register_forward_pre_hook(partial(note, f"the input of layer `{name}`"))
            yield layer.register_forward_hook(partial(note, f"the output of layer `{name}`"))


def _digest(value: Any) -> bytes:
    """Return a digest of the tensors in a value."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in _tensors(value):
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
