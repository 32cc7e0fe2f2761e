"""Tensors without memory: hollow parameters, each a single number expanded to its shape, and fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from raysim.limits import process_memory


@contextmanager
def hollow_parameters() -> Iterator[None]:
    """Create parameters without memory and skip their initialisation, by patching `torch.empty`.

    Buffers are created by other functions and keep their values, unlike on the meta device. The random state does not
    change.
    """
    with torch.random.fork_rng(devices=[]), _Hollow():
        yield


def hollow(model: nn.Sequential) -> nn.Sequential:
    """Replace all parameters by hollow ones on the CPU, and buffers on the meta device by zeros; returns the model.

    The cost model runs on CPU tensors, since the kernels for CPUs save the same tensors as a real run. `deepcopy` keeps hollow
    parameters hollow.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                empty = nn.Parameter(_expanded(parameter), parameter.requires_grad)
                empty.__deepcopy__ = partial(_itself, empty)  # type: ignore[method-assign]
                made[id(parameter)] = empty
            module.register_parameter(name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                kept = name not in module._non_persistent_buffers_set
                module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype), persistent=kept)
    return model


def check_memory_of_parameters(name: str, model: nn.Module) -> None:
    """Raise ValueError if this process cannot hold the parameters of a model and their copies in the stages."""
    size = 2 * sum(parameter.nbytes for parameter in model.parameters())
    memory = process_memory()
    if size > memory.size:
        raise ValueError(
            f"Model `{name}` needs {size / 1e9:.1f} GB for its parameters and their copies in stages, but {memory}. "
            "Make the model smaller."
        )


class _Hollow(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return _expanded(func(*args, **{**kwargs, "device": "meta"}))
        name, written = func.__name__, next(iter((*args, *kwargs.values())), None)
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and isinstance(written, Tensor) and written.numel() > 1 and 0 in written.stride():
            return written  # a single number cannot hold the initial values
        return func(*args, **kwargs)


def _expanded(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def _itself(parameter: nn.Parameter, _memo: object) -> nn.Parameter:
    return parameter


@contextmanager
def fake(mode: FakeTensorMode) -> Iterator[None]:
    """Enter a mode of fake tensors, without torch's log message for failing operations.

    The experts of a layer multiply rows by one matrix each, whichever it is: torch has no fake kernel for this in float32.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with mode, mock.patch.object(nn.functional, "grouped_mm", _rows_times_one, create=True):
            yield
    finally:
        log.disabled = before


def _rows_times_one(rows: Tensor, matrices: Tensor, **_offsets: object) -> Tensor:
    """Return a product of the size and cost of `torch.nn.functional.grouped_mm`."""
    return rows @ matrices[0]
