"""The parts of a transformers model in the order in which its forward uses them.

Many configurations carry a pipeline plan (`base_model_pp_plan`): the names of embedding, blocks and final norm. `LAYOUTS`
describes models without a plan in the same terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Layout(NamedTuple):
    """Names of submodules of a base model, in the order of its forward."""

    before: tuple[str, ...]
    """Modules that make the first hidden state, such as the embedding."""
    blocks: str
    """The `nn.ModuleList` of blocks; the model may be cut between any two of them."""
    after: tuple[str, ...]
    """Modules that take the last hidden state, such as the final norm."""


_BERT = Layout(("embeddings",), "encoder.layer", ("pooler",))

LAYOUTS = {
    "bert": _BERT,
    "convnext": Layout(("embeddings",), "encoder.stages", ("layernorm",)),
    "distilbert": Layout(("embeddings",), "transformer.layer", ()),
    "gpt2": Layout(("wte", "wpe", "drop"), "h", ("ln_f",)),
    "opt": Layout(
        ("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        "decoder.layers",
        ("decoder.final_layer_norm", "decoder.project_out"),
    ),
    "resnet": Layout(("embedder",), "encoder.stages", ("pooler",)),
    "roberta": _BERT,
    "vit": Layout(("embeddings",), "layers", ("layernorm", "pooler")),
}


def layout_of(config: Any, base: nn.Module) -> Layout:
    """Return the layout of a base model; raises ValueError for a kind of model that cannot be cut, or is not known."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"A model of type {kind!r} cannot be cut: it has an encoder and a decoder.")
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise ValueError(f"A model of type {kind!r} cannot be cut: it takes more than one kind of input.")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"A model of type {kind!r} cannot be cut: its blocks share keys and values.")
    if kind in LAYOUTS:
        return LAYOUTS[kind]
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    lists = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        known = ", ".join(sorted(LAYOUTS))
        raise ValueError(
            f"A model of type {kind!r} cannot be cut: its configuration has no pipeline plan of transformers, and raysim "
            f"knows only the layouts of {known}."
        )
    place = plan.index(lists[0])
    return Layout(tuple(plan[:place]), lists[0], tuple(plan[place + 1 :]))
