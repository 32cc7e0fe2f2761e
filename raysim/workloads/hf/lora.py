"""Low-rank adaptation by peft: small trained matrices beside frozen weights (Hu et al. 2021, 2106.09685)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from raysim.notation import check_integer, check_real, suggestion
from raysim.workloads.options import import_hub

_OPTIONS = ("rank", "alpha", "dropout", "targets")


def add_lora(model: Any, options: Mapping[str, Any], trained: Sequence[str] = ()) -> Any:
    """Put adapters into a transformers model, freeze all its other weights, and return peft's model around it.

    `options`: `rank` (8), `alpha` (twice the rank), `dropout` (0), and `targets`, the names of the linear layers to adapt (default:
    peft's choice for the model's type). `trained`: submodules that are trained as a whole, such as a new head. Raises ValueError
    naming the wrong option.
    """
    if not isinstance(options, Mapping):
        raise ValueError(f"`model.lora` must be a table such as {{rank = 8}}, but got {options!r}.")
    for option in options:
        if option not in _OPTIONS:
            near = suggestion(option, _OPTIONS).replace("`", "`model.lora.", 1)
            raise ValueError(f"Unknown option `model.lora.{option}`. Known: {', '.join(_OPTIONS)}.{near}")
    rank = check_integer("model.lora.rank", options.get("rank", 8), 1)
    targets = options.get("targets")
    if targets is not None and not (
        isinstance(targets, (list, tuple)) and all(isinstance(each, str) for each in targets)
    ):
        raise ValueError(f"`model.lora.targets` must be a list of names of linear layers, but got {targets!r}.")
    peft = import_hub("peft")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=check_real("model.lora.alpha", options.get("alpha", 2 * rank), 0, float("inf"), open_low=True),
        lora_dropout=check_real("model.lora.dropout", options.get("dropout", 0.0), 0, 1),
        target_modules=list(targets) if targets is not None else None,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that keep their weights transposed, which it then handles
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"`model.lora.targets` fits no layers of a {model.config.model_type}: {reason}.") from error
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    return adapted
