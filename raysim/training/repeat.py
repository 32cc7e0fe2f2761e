"""Check that a run is deterministic: run its first steps twice, and compare every output of every layer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from raysim.config import RunConfig
from raysim.engine.inline import InlineEngine
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.prepare import prepare
from raysim.workloads.data import Data

STEPS = 3


Digest = tuple[str, bytes]  # where training produced some tensors, and a digest of their bits


def first_difference(config: RunConfig, data: Data) -> str | None:
    """Run the first `STEPS` steps twice; return the step, stage and layer of the first difference, or None.

    Both times the model is built anew, and all stages run in this process, on its GPU if the run may use one.
    """
    for first, second in zip_longest(_digests(config, data), _digests(config, data)):
        if first != second:  # one is None if the lengths differ
            return str((first or second)[0])
    return None


def _digests(config: RunConfig, data: Data) -> list[Digest]:
    """Return the digests of all tensors produced in the first steps, in order."""
    workload = prepare(config, data)
    seen = [
        (f"the initial value of `{name}` in stage {stage}", _digest(tensor))
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
                return [*seen, (str(error), b"")]
            finally:
                for hook in hooks:
                    hook.remove()
            for index in sorted(stages, reverse=True):  # in the order of gradients
                for name, tensor in stages[index].state().items():
                    where = f"`{name.removeprefix('model.')}` of stage {index} after the update of step {step}"
                    seen.append((where, _digest(tensor)))
    finally:
        engine.close()
    return seen


def _watch(module: nn.Module, stage: int, step: int, seen: list[Digest]) -> Iterator[Any]:
    """Register hooks that record the inputs and outputs of every layer of a stage; yield the hooks."""

    def note(name: str, _: nn.Module, inputs: Any, output: Any = None) -> None:
        seen.append((f"{name} in step {step}, stage {stage}", _digest(inputs if output is None else output)))

    for name, layer in module.named_modules():
        if not name:
            first = "the data" if stage == 0 else "what the stage received"
            yield layer.register_forward_pre_hook(partial(note, first))
        else:
            yield layer.register_forward_pre_hook(partial(note, f"the input of layer `{name}`"))
            yield layer.register_forward_hook(partial(note, f"the output of layer `{name}`"))


def _digest(value: Any) -> bytes:
    """Return a digest of all tensors in a value."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in _tensors(value):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)
