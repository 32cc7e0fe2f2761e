"""Models by name or by import path, and their initialisation from the seed alone.

A model is an `nn.Sequential` of named layers, each mapping one tensor to one tensor, so that it can be cut after any
layer (`partition`). Transformers models (`hf_layers`) and other modules (`traced_layers`) are converted to such layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raysim.notation import shown, suggestion
from raysim.random import derive_key
from raysim.workloads.feedforward_models import cnn, mlp, resnet18, resnet101, vgg16
from raysim.workloads.hf_layers import chain
from raysim.workloads.hf_model import hf, hf_structure
from raysim.workloads.language_models import gpt, gpt2, gpt2_structure, lstm
from raysim.workloads.options import bind_options, import_function, reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.traced_layers import traced
from raysim.workloads.weightless import check_memory_of_parameters, hollow

__all__ = ["MODELS", "build_model"]

_BUILDERS = (cnn, gpt, gpt2, hf, lstm, mlp, resnet18, resnet101, vgg16)
MODELS: dict[str, Callable[..., nn.Sequential]] = {builder.__name__: builder for builder in _BUILDERS}
BUILT_ALONE = MODELS.keys() - {"gpt2", "hf"}
"""The models that are built from their options alone, and read no files."""

NO_SUBSPACE: dict[Callable[..., nn.Sequential], str] = {
    cnn: "has no residual stream",
    gpt2: "has weights that were trained without one",
    lstm: "has no residual stream",
    mlp: "has no residual stream",
    resnet18: "has a residual stream whose width changes",
    resnet101: "has a residual stream whose width changes",
    vgg16: "has no residual stream",
}
"""The reasons why models cannot have boundaries in a subspace."""


def build_model(
    name: str,
    options: Mapping[str, object],
    shape: DataShape,
    seed: int,
    cuts: Sequence[str] = (),
    num_stages: int = 1,
) -> nn.Sequential:
    """Return the model `name`, initialised from `seed` alone; the caller's random state does not change.

    `name` is one of `MODELS`, or your own `package.module:function`, called with the options and, if it has an argument
    `shape`, the data's shape. It returns an `nn.Sequential` of layers, a transformers model, or any module that torch.fx can
    trace. The latter is split into layers that end at `cuts` or suffice for `num_stages`, see `traced`. `{seed}` in the option
    `path` is replaced by the seed, to load different weights for each. Raises ValueError naming the wrong option or the
    broken rule.

    >>> from raysim.workloads.data import DataShape
    >>> len(build_model("cnn", {"width": 8}, DataShape((1, 8, 8), "float32", 10), seed=0))
    7
    """
    function = import_function("Model", name) if ":" in name else MODELS.get(name)
    if function is None:
        raise ValueError(
            f"Unknown model {name!r}. Known: {', '.join(sorted(MODELS))}; your own is written `package.module:function`."
            f"{suggestion(name, MODELS)}"
        )
    arguments = bind_model(name, function, options, seed)
    if "shape" in inspect.signature(function).parameters:
        arguments["shape"] = shape
    if name in BUILT_ALONE:
        check_memory_of_parameters(name, _on_meta(name, function, arguments))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_key(seed, "model"))
        try:
            model = function(**arguments)
        except (Exception, SystemExit) as error:
            if name in MODELS:
                raise
            raise ValueError(f"Model `{name}` failed: {type(error).__name__}: {str(error).rstrip('.')}.") from error
        return _as_layers(name, model, shape, cuts, num_stages)


def bind_model(
    name: str, function: Callable[..., nn.Sequential], options: Mapping[str, object], seed: int
) -> dict[str, Any]:
    """Return the options of a model as keyword arguments; raises ValueError for an invalid option."""
    if "subspace" in options and function in NO_SUBSPACE:
        raise ValueError(
            f"`model.subspace` needs a decoder of new weights whose blocks add to one residual stream, as `gpt` and `hf` can be, but "
            f"`{name}` {NO_SUBSPACE[function]}."
        )
    arguments = bind_options("model", name, function, options)
    if name in MODELS and isinstance(path := arguments.get("path"), str):
        arguments["path"] = path.replace("{seed}", str(seed))
    return arguments


def _as_layers(name: str, model: object, shape: DataShape, cuts: Sequence[str], num_stages: int) -> nn.Sequential:
    """Return a model as a sequence of layers; raises ValueError if it cannot be cut."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"Model `{name}` must return an nn.Module, but got {type(model).__name__}.")
    if hasattr(model, "base_model_prefix") and hasattr(model, "config"):
        return chain(model, shape.padding, shape.separator)
    return traced(model, shape, cuts, num_stages)


def make_structure(name: str, function: Callable[..., nn.Sequential], arguments: Mapping[str, Any]) -> nn.Sequential:
    """Return one of `MODELS` with hollow parameters, built from its configuration alone."""
    if function is hf:
        return hollow(hf_structure(**arguments))
    if function is gpt2:
        return hollow(gpt2_structure(**arguments))
    return hollow(_on_meta(name, function, arguments))


def _on_meta(name: str, function: Callable[..., nn.Sequential], arguments: Mapping[str, Any]) -> nn.Sequential:
    """Return one of raysim's own models on the meta device, where parameters take no memory.

    Raises ValueError if no tensor can have the requested sizes.
    """
    try:
        with torch.device("meta"), _Unfilled():
            return function(**arguments)
    except (RuntimeError, OverflowError, TypeError) as error:
        options = ", ".join(f"model.{key}={shown(value)}" for key, value in arguments.items() if key != "shape")
        reason = reason_of(error)
        raise ValueError(f"Model `{name}` cannot be made with {options or 'its sizes'}: {reason}.") from None


class _Unfilled(TorchFunctionMode):
    """Skips parameter initialisation, which on the meta device would spend a second importing torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.normal_, Tensor.uniform_) else func(*args, **(kwargs or {}))
