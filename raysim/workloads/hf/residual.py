"""Models of transformers in a subspace: the layers of a block that add to the residual stream, by type of model."""

from __future__ import annotations

from typing import Any

from torch import nn

from raysim.workloads.subspace import in_subspace

_LLAMA = ("block.self_attn.o_proj", "block.mlp.down_proj")
ADDED = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA)
"""Names within a block of the layers whose output is added to the stream as it is: no norm, gain or scale comes between."""


def with_subspace(layers: nn.Sequential, settings: Any, size: object, form: object) -> nn.Sequential:
    """Return the layers of a new causal language model with boundaries in a subspace, see `in_subspace`.

    `settings`: the configuration of transformers. Raises ValueError for a type of model that is not known to have a plain stream.
    """
    kind = settings.model_type
    if size is not None and kind not in ADDED:
        raise ValueError(
            f"`model.subspace` needs blocks that add to one residual stream as those of {', '.join(ADDED)} do, but "
            f"`model.config.model_type` is {kind!r}."
        )
    return in_subspace(layers, size, form, added=ADDED.get(kind, ()))
