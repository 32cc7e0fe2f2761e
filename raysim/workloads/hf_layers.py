"""A transformers model as a chain of layers: `embedding`, `block0`.., `head`.

Each layer runs the model's own code. The embedding is the model up to its first block, the head is the model from its last
block on, and each block gets the arguments (masks, rotary embeddings) that the model's own forward would pass to it.

The names of embedding, blocks and final norm come from the pipeline plan of many configurations (`base_model_pp_plan`); `LAYOUTS`
describes models without a plan in the same terms.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from raysim.values import Value, join, split_one
from raysim.workloads.placeholders import filled, holes, without


def chain(model: Any, padding: int | None = None) -> nn.Sequential:
    """Return the layers of a transformers model with a head; they share its parameters and have buffers of their own.

    `padding`: the token that fills up short samples. The mask of the other tokens then crosses each boundary beside the hidden
    state. Raises ValueError for a model that cannot be cut.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> layers = chain(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16)))
    >>> [name for name, _ in layers.named_children()]
    ['embedding', 'block0', 'block1', 'head']
    """
    layout = layout_of(model.config, model.base_model)
    arguments = Arguments(model.base_model, layout)
    layers: dict[str, nn.Module] = {"embedding": Embedding(model, layout, padding)}
    for index, block in enumerate(model.base_model.get_submodule(layout.blocks)):
        layers[f"block{index}"] = Block(block, arguments, index)
    layers["head"] = Head(model, layout)
    found = nn.Sequential(OrderedDict(layers))
    held = {id(parameter) for parameter in found.parameters()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if missing:
        kind = model.config.model_type
        raise ValueError(f"A model of type {kind!r} cannot be cut: its parameter `{missing[0]}` belongs to no layer.")
    return found


def original_names(layers: nn.Sequential, model: Any) -> dict[str, str]:
    """Return the name that each parameter and buffer of `chain(model)` has in the model.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    >>> original_names(chain(model), model)["block0.block.ln_1.weight"]
    'transformer.h.0.ln_1.weight'
    """
    blocks = f"{model.base_model_prefix}.{layout_of(model.config, model.base_model).blocks}"
    names = {}
    for name in layers.state_dict():
        layer, _, rest = name.split(".", 2)
        names[name] = f"{blocks}.{layer.removeprefix('block')}.{rest}" if layer.startswith("block") else rest
    return names


class Embedding(nn.Module):
    """The model up to its first block."""

    def __init__(self, model: Any, layout: Layout, padding: int | None = None) -> None:
        super().__init__()
        self.padding = padding
        base = model.base_model_prefix
        heads = [name for name, _ in model.named_children() if name != base]
        after = [f"{base}.{name}" for name in layout.after]
        self.model = _trimmed(model, [*_block_names(model, layout), *after, *heads])
        self._holes = holes(self.model)
        self._first = self._holes.index(self.model.get_submodule(f"{base}.{layout.blocks}.0"))

    def forward(self, x: Tensor) -> Value:
        """Return the first hidden state of token ids or images, with the mask if there is padding."""
        base = self.model.base_model
        mask = None if self.padding is None else x != self.padding
        with filled(self._holes), _no_layer_drop(self.model):
            base(**{base.main_input_name: x}, **_mask_input(mask))
            hidden: Tensor = self._holes[self._first].call.arrived
        return hidden if mask is None else {"hidden": hidden, "mask": mask}


class Block(nn.Module):
    """A block of the model, with the arguments that the model's forward passes to it."""

    def __init__(self, block: nn.Module, arguments: Arguments, index: int) -> None:
        super().__init__()
        self.block = block
        self.index = index
        self.arguments = arguments

    def forward(self, value: Value) -> Value:
        """Return the next hidden state."""
        x, name, beside = split_one(value)
        args, kwargs = self.arguments.of(self.index, x, beside.get("mask"))
        y = self.block(x, *args, **kwargs)
        return join({name: y[0] if isinstance(y, tuple) else y}, beside)


class Head(nn.Module):
    """The model from its last block on."""

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__()
        before = [f"{model.base_model_prefix}.{name}" for name in layout.before]
        self.model = _trimmed(model, [*_block_names(model, layout), *before])
        self._holes = holes(self.model)

    def forward(self, value: Value) -> Tensor:
        """Return the logits of the last hidden state."""
        x, _, beside = split_one(value)
        with filled(self._holes, x), _no_layer_drop(self.model):
            y: Tensor = self.model(**_hidden_input(self.model, x), **_mask_input(beside.get("mask"))).logits
        return y


class Arguments:
    """The arguments of each block besides the hidden state, as the model's own forward computes them.

    They depend on the shape of the hidden state and on the mask, so they are computed once for each shape or mask, by a copy
    of the model that has no parameters. Blocks may be given different shapes, as in a ResNet. This is not a module: all blocks
    of a stage share it.
    """

    def __init__(self, base: Any, layout: Layout) -> None:
        blocks = [f"{layout.blocks}.{index}" for index in range(len(base.get_submodule(layout.blocks)))]
        self._model = _trimmed(base, [*layout.before, *blocks, *layout.after]).eval()
        self._holes = holes(self._model)
        self._blocks = [self._model.get_submodule(name) for name in blocks]
        self._mask: Tensor | None = None  # of the arguments at hand
        self._kept: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}  # by shape, for all blocks

    def of(self, index: int, x: Tensor, mask: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the named arguments of a block for a hidden state like `x`."""
        key = (tuple(x.shape), x.dtype, x.device)
        if mask is not self._mask or len(self._kept) > len(self._blocks):  # of batches of another size, too
            self._mask, self._kept = mask, {}
        if key not in self._kept:
            self._kept[key] = self._compute(x, mask)
        return self._kept[key][index]

    def _compute(self, x: Tensor, mask: Tensor | None) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        with unset_fake_temporarily(), torch.no_grad():  # masks have values, even while costs are counted
            hidden = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            if isinstance(mask, FakeTensor):
                mask = torch.ones(mask.shape, dtype=torch.bool, device=x.device)
                mask[:, -1] = False  # as with padding
            self._model.to(x.device)
            with filled(self._holes, hidden):
                self._model(**_hidden_input(self._model, hidden), **_mask_input(mask))
                return [block.call.arguments for block in self._blocks]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mask": None, "_kept": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Arguments:
        found = memo[id(self)] = Arguments.__new__(Arguments)
        with unset_fake_temporarily():
            found.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return found


def _block_names(model: Any, layout: Layout) -> list[str]:
    path = f"{model.base_model_prefix}.{layout.blocks}"
    return [f"{path}.{index}" for index in range(len(model.get_submodule(path)))]


def _trimmed(model: Any, names: list[str]) -> Any:
    """Return the model without the named modules, and without a cache of keys and values."""
    found = without(model, names)
    if hasattr(found.config, "use_cache"):
        found.config.use_cache = False
    return found


@contextmanager
def _no_layer_drop(model: nn.Module) -> Iterator[None]:
    """Keep a model from drawing which blocks to skip, as transformers 5.22 does even for a `layerdrop` of 0."""
    stacks = [module for module in model.modules() if module.training and hasattr(module, "layerdrop")]
    for stack in stacks:
        stack.training = False
    try:
        yield
    finally:
        for stack in stacks:
            stack.training = True


def _hidden_input(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Return the hidden state as the input that a model takes in place of token ids or images."""
    return {"inputs_embeds" if model.main_input_name == "input_ids" else model.main_input_name: x}


def _mask_input(mask: Tensor | None) -> dict[str, Tensor]:
    return {} if mask is None else {"attention_mask": mask.long()}


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
    if getattr(config, "layerdrop", 0):
        raise ValueError(
            f"A model of type {kind!r} cannot be cut with `layerdrop`, which skips blocks at random: set it to 0."
        )
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
