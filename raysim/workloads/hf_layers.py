"""A transformers model as a chain of layers: `embedding`, `block0`.., `head`.

Each layer runs the model's own code. The embedding is everything before the first block, the head is everything after the
last block, and each block gets the arguments (masks, rotary embeddings) that the model's own forward would pass to it. The
first two, and the arguments, come from copies of the model in which placeholders replace all other modules.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from raysim.values import ModuleValue, argument_of, only_float, value_of
from raysim.workloads.hf_config import ModelLayout, model_layout

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


def chain(model: Any, padding: int | None = None, separator: int | None = None) -> nn.Sequential:
    """Return the layers of a transformers model with a head; they share its parameters but have their own buffers.

    `padding`: the token that fills up short samples. With it, the attention mask crosses each boundary along with the hidden
    state. `separator`: the token that ends the first of two texts, for models with token types. Raises ValueError for a model that
    cannot be cut.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> layers = chain(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16)))
    >>> [name for name, _ in layers.named_children()]
    ['embedding', 'block0', 'block1', 'head']
    """
    layout = model_layout(model.config, model.base_model)
    arguments = Arguments(model.base_model, layout)
    layers: dict[str, nn.Module] = {"embedding": Embedding(model, layout, padding, separator)}
    for i, block in enumerate(model.base_model.get_submodule(layout.blocks)):
        layers[f"block{i}"] = Block(block, arguments, i)
    layers["head"] = Head(model, layout)
    chained = nn.Sequential(OrderedDict(layers))
    held = {id(parameter) for parameter in chained.parameters()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if missing:
        kind = model.config.model_type
        raise ValueError(f"A model of type {kind!r} cannot be cut: its parameter `{missing[0]}` belongs to no layer.")
    return chained


def original_names(layers: nn.Sequential, model: Any) -> dict[str, str]:
    """Map the parameter and buffer names of `chain(model)` to their names in the model.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    >>> original_names(chain(model), model)["block0.block.ln_1.weight"]
    'transformer.h.0.ln_1.weight'
    """
    blocks = f"{model.base_model_prefix}.{model_layout(model.config, model.base_model).blocks}"
    names = {}
    for name in layers.state_dict():
        layer, _, rest = name.split(".", 2)
        names[name] = f"{blocks}.{layer.removeprefix('block')}.{rest}" if layer.startswith("block") else rest
    return names


class Embedding(nn.Module):
    """The model before its first block: maps token ids or images to the first hidden state, with a mask if there is padding."""

    def __init__(self, model: Any, layout: ModelLayout, padding: int | None, separator: int | None) -> None:
        super().__init__()
        self.padding, self.separator = padding, separator
        base = model.base_model_prefix
        heads = [name for name, _ in model.named_children() if name != base]
        after = [f"{base}.{name}" for name in layout.after]
        self.model = without(model, [*_block_names(model, layout), *after, *heads])
        self._holes = holes(self.model)
        self._first = self._holes.index(self.model.get_submodule(f"{base}.{layout.blocks}.0"))

    def forward(self, x: Tensor) -> ModuleValue:
        base = self.model.base_model
        mask = None if self.padding is None else x != self.padding
        with filled(self._holes), _no_layer_drop(self.model):
            base(**{base.main_input_name: x}, **_mask_input(mask), **types_input(self.model, x, self.separator, mask))
            hidden: Tensor = self._holes[self._first].call.arrived
        return hidden if mask is None else {"hidden": hidden, "mask": mask}


class Block(nn.Module):
    """A block of the model, with the arguments that the model's forward passes to it."""

    def __init__(self, block: nn.Module, arguments: Arguments, index: int) -> None:
        super().__init__()
        self.block = block
        self.index = index
        self.arguments = arguments

    def forward(self, given: ModuleValue) -> ModuleValue:
        value = value_of(given)
        name, x = only_float(value)
        args, kwargs = self.arguments.of(self.index, x, value.get("mask"))
        y = self.block(x, *args, **kwargs)
        return argument_of({**value, name: y[0] if isinstance(y, tuple) else y})


class Head(nn.Module):
    """The model after its last block: maps the last hidden state to logits."""

    def __init__(self, model: Any, layout: ModelLayout) -> None:
        super().__init__()
        before = [f"{model.base_model_prefix}.{name}" for name in layout.before]
        self.model = without(model, [*_block_names(model, layout), *before])
        self._holes = holes(self.model)

    def forward(self, given: ModuleValue) -> Tensor:
        value = value_of(given)
        _, x = only_float(value)
        with filled(self._holes, x), _no_layer_drop(self.model):
            y: Tensor = self.model(**_hidden_input(self.model, x), **_mask_input(value.get("mask"))).logits
        return y


class Arguments:
    """The arguments of each block besides the hidden state, as the model's own forward computes them.

    They depend on the shape of the hidden state and on the mask, so they are computed once for each shape or mask, by a copy
    of the model without parameters. Blocks may have different shapes, as in a ResNet. Not a module, because all blocks of a
    stage share it.
    """

    def __init__(self, base: Any, layout: ModelLayout) -> None:
        blocks = [f"{layout.blocks}.{index}" for index in range(len(base.get_submodule(layout.blocks)))]
        self._model = without(base, [*layout.before, *blocks, *layout.after]).eval()
        self._holes = holes(self._model)
        self._blocks = [self._model.get_submodule(name) for name in blocks]
        self._mask: Tensor | None = None  # of the cached arguments
        self._kept: dict[Any, list[CallArguments]] = {}  # by shape, for all blocks

    def of(self, index: int, x: Tensor, mask: Tensor | None) -> CallArguments:
        """Return the positional and keyword arguments of a block for a hidden state like `x`."""
        key = (tuple(x.shape), x.dtype, x.device)
        if mask is not self._mask or len(self._kept) > len(self._blocks):  # too many batch sizes
            self._mask, self._kept = mask, {}
        if key not in self._kept:
            self._kept[key] = self._compute(x, mask)
        return self._kept[key][index]

    def _compute(self, x: Tensor, mask: Tensor | None) -> list[CallArguments]:
        with unset_fake_temporarily(), torch.no_grad():  # masks need real values, even while costs are counted
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
        copied = memo[id(self)] = Arguments.__new__(Arguments)
        with unset_fake_temporarily():
            copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return copied


def _block_names(model: Any, layout: ModelLayout) -> list[str]:
    path = f"{model.base_model_prefix}.{layout.blocks}"
    return [f"{path}.{index}" for index in range(len(model.get_submodule(path)))]


@contextmanager
def _no_layer_drop(model: nn.Module) -> Iterator[None]:
    """Keep a model from drawing random numbers for LayerDrop, as transformers 5.22 does even if `layerdrop` is 0."""
    stacks = [module for module in model.modules() if module.training and hasattr(module, "layerdrop")]
    for stack in stacks:
        stack.training = False
    try:
        yield
    finally:
        for stack in stacks:
            stack.training = True


def _hidden_input(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Return the hidden state as a keyword argument replacing token ids or images."""
    return {"inputs_embeds" if model.main_input_name == "input_ids" else model.main_input_name: x}


def _mask_input(mask: Tensor | None) -> dict[str, Tensor]:
    return {} if mask is None else {"attention_mask": mask.long()}


def types_input(model: Any, x: Tensor, separator: int | None, mask: Tensor | None) -> dict[str, Tensor]:
    """Return the token types of a model that has several: 1 in the second text, which begins after the first `separator`."""
    if separator is None or getattr(model.config, "type_vocab_size", 1) < 2:
        return {}
    ends = x == separator
    second = ends.cumsum(1) > ends.long()
    return {"token_type_ids": (second if mask is None else second & mask).long()}


@dataclass(eq=False)
class Call:
    """The last call of a placeholder, and the tensor to return instead of its input.

    A plain object, because setting an attribute of a module is slower than the call itself.
    """

    given: Tensor | None = None
    arrived: Any = None
    arguments: CallArguments = ((), {})


class Hole(nn.Module):
    """A placeholder for a module: records the arguments of its last call, and returns its input or a given tensor.

    Other attributes are looked up on the replaced module, with tensors on the meta device, since models read dtypes and
    sizes from them.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._replaced = _Replaced(replaced)
        self.call = Call()

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        call = self.call
        call.arrived, call.arguments = x, (args, kwargs)
        return x if call.given is None else call.given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._replaced.module, name)


class _Replaced:
    """A replaced module on the meta device, neither registered as a submodule of its hole nor copied with it."""

    def __init__(self, module: nn.Module) -> None:
        state: dict[int, Any] = {id(x): x.detach().to("meta") for x in [*module.parameters(), *module.buffers()]}
        self.module = copy.deepcopy(module, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replaced:
        return self


def without(model: Any, names: Iterable[str]) -> Any:
    """Return a copy of `model` with a `Hole` for each named submodule that exists, and without a KV cache.

    The copy shares the remaining parameters, but has its own buffers.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    memo |= {id(modules[name]): Hole(modules[name]) for name in names if name in modules}
    copied = copy.deepcopy(model, memo)
    if hasattr(copied.config, "use_cache"):
        copied.config.use_cache = False
    return copied


def holes(model: nn.Module) -> tuple[Hole, ...]:
    """Return the holes of a model in the order of its modules."""
    return tuple(module for module in model.modules() if isinstance(module, Hole))


@contextmanager
def filled(some: Iterable[Hole], x: Tensor | None = None) -> Iterator[None]:
    """Make holes return `x` if given; on exit they forget the arguments of their calls."""
    calls = [hole.call for hole in some]
    for call in calls:
        call.given = x
    try:
        yield
    finally:
        for call in calls:
            call.given = call.arrived = None
            call.arguments = ((), {})
