"""Decoders with low-dimensional boundaries: k values per token cross, whatever the width of the model.

Subspace networks (Ramasinghe et al. 2025, 2506.01260; the reparametrised form as in the code of ProtocolNanoGPT). The basis U
(width x k, orthonormal columns) is drawn once, and the initial embedding tables F stay fixed. All learned layers add to the
residual stream x only within the span of U, so x = c Uᵀ + F[token] at every boundary, and c (k values) is sent with the tokens.
The last block and the head keep their full rank, and form one layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.notation import check_choice, check_integer
from raysim.values import UNNAMED, ModuleValue, Value, argument_of, only_float, value_of

FORMS = ("reparametrised", "projected")


def in_subspace(layers: nn.Sequential, size: object, form: object, added: Sequence[str]) -> nn.Sequential:
    """Return a decoder `embedding`, `block0`.., `head` with boundaries of `size` values per token; `layers` if `size` is None.

    `form`: with "reparametrised" the layers that add to the residual stream are U (W z + b) with W of `size` rows. With
    "projected" they keep their shape but are projected onto the span of U after each update, and their output is divided by
    its root mean square. Both start from the projected weights of `layers`, whose modules they reuse. `added`: names,
    within a block, of the linear layers whose output is added to the stream.

    The embedding tables (tokens, and positions if added) become F, and zero-initialised tables are trained in their place.
    With "projected" the rows of F are divided by their root mean square too. U is drawn from torch's default generator.
    Raises ValueError naming the rule.
    """
    form = check_choice("model.subspace_form", form, FORMS)
    if size is None:
        if form != FORMS[0]:
            raise ValueError("`model.subspace_form` has no effect without `model.subspace`. Leave it out.")
        return layers
    size = check_integer("model.subspace", size, 1)
    (_, embedding), *_, (_, head) = layers.named_children()
    table = _tables(embedding)[0]
    width = table.embedding_dim
    if size > width:
        raise ValueError(f"`model.subspace` must be at most the width of the model ({width}), but got {size}.")
    if any(parameter is table.weight for parameter in head.parameters()):
        raise ValueError(
            "`model.subspace` cannot be combined with a head that is tied to the embedding: the head has its full rank."
        )
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in layers.modules()):
        raise ValueError(
            "`model.dropout` must be 0 with `model.subspace`: dropout moves activations out of the subspace."
        )
    with _one_thread():
        return _build(layers, size, added, projected=form == "projected")


def _build(layers: nn.Sequential, size: int, added: Sequence[str], *, projected: bool) -> nn.Sequential:
    (_, embedding), *blocks, (last, block), (_, head) = layers.named_children()
    tables = _tables(embedding)
    drawn = [table.weight.detach() for table in tables]
    if projected:  # to the scale of the normalised outputs added to it
        drawn = [F.rms_norm(rows, rows.shape[-1:]) for rows in drawn]
    subspace = Subspace(size, *drawn)
    entry: CoordinateEmbedding = (
        ProjectedEmbedding(embedding, subspace) if projected else CoordinateEmbedding(embedding, subspace)
    )
    parts: OrderedDict[str, nn.Module] = OrderedDict(embedding=entry)
    for name, module in blocks:
        for path in added:
            linear = module.get_submodule(path)
            assert isinstance(linear, nn.Linear), f"{path} must be a linear layer"
            narrow = ProjectedLinear(linear, subspace) if projected else SubspaceLinear(linear, subspace)
            module.set_submodule(path, narrow)
        parts[name] = InnerBlock(module, subspace)
    parts["head"] = nn.Sequential(OrderedDict({last: LastBlock(block, subspace), "head": head}))
    return nn.Sequential(parts)


def out_of_subspace(layers: nn.Sequential) -> nn.Sequential:
    """Return an ordinary decoder equivalent to a reparametrised one, whose modules it reuses.

    Raises ValueError for the projected form, since ordinary decoders cannot normalise these outputs.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in layers.named_children():
        if isinstance(layer, ProjectedEmbedding):
            raise ValueError(
                "An ordinary decoder cannot normalise outputs as `model.subspace_form` = 'projected' does."
            )
        if isinstance(layer, CoordinateEmbedding):
            layer.make_ordinary()
            parts[name] = layer.embedding
        elif isinstance(layer, InnerBlock):
            for path, module in list(layer.block.named_modules()):
                if isinstance(module, SubspaceLinear):
                    layer.block.set_submodule(path, module.ordinary())
            parts[name] = layer.block
        else:
            parts |= {
                inner: module.block if isinstance(module, LastBlock) else module
                for inner, module in layer.named_children()
            }
    return nn.Sequential(parts)


class Subspace(nn.Module):
    """The constants U and F, shared by the layers of a stage; drawn from the seed, so not in checkpoints."""

    basis: Tensor
    tokens: Tensor
    positions: Tensor | None

    def __init__(self, size: int, tokens: Tensor, positions: Tensor | None = None) -> None:
        super().__init__()
        drawn = torch.randn(tokens.shape[1], size, dtype=torch.float64)
        self.register_buffer("basis", torch.linalg.qr(drawn).Q.float(), persistent=False)
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("positions", positions, persistent=False)

    def encode(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the coordinates (batch, length, size) of a residual stream."""
        with torch.autocast(x.device.type, enabled=False):
            return (x - self._fixed(tokens)) @ self.basis

    def decode(self, code: Tensor, tokens: Tensor) -> Tensor:
        """Return the residual stream (batch, length, width) from its coordinates."""
        with torch.autocast(code.device.type, enabled=False):
            return code.to(self.basis.dtype) @ self.basis.t() + self._fixed(tokens)

    def project(self, weight: Tensor) -> Tensor:
        """Return `weight`, whose first axis is the model's width, with its columns projected onto the span."""
        return self.basis @ (self.basis.t() @ weight)

    def _fixed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens)
        return x if self.positions is None else x + self.positions[: tokens.shape[1]]


class CoordinateEmbedding(nn.Module):
    """The embedding; returns coordinates and tokens."""

    def __init__(self, embedding: nn.Module, subspace: Subspace) -> None:
        super().__init__()
        self.embedding = embedding
        self.subspace = subspace
        columns = self._columns()
        for table in _tables(embedding):
            table.weight = nn.Parameter(torch.zeros(table.num_embeddings, columns))
            table.embedding_dim = columns

    def forward(self, tokens: Tensor) -> Value:
        value = value_of(self.embedding(tokens))
        name, x = only_float(value)
        others = {other: value[other] for other in value if other != name}
        sent = compact_tokens(tokens, len(self.subspace.tokens))
        return {name or "hidden": self._coordinates(x), "tokens": sent, **others}

    def make_ordinary(self) -> None:
        """Merge the constants into the tables, which then give the residual stream itself."""
        subspace = self.subspace
        for table, fixed in zip(_tables(self.embedding), (subspace.tokens, subspace.positions), strict=False):
            assert fixed is not None
            table.weight = nn.Parameter(table.weight.detach() @ subspace.basis.t() + fixed)
            table.embedding_dim = fixed.shape[1]

    def _columns(self) -> int:
        return self.subspace.basis.shape[1]

    def _coordinates(self, x: Tensor) -> Tensor:
        return x


class ProjectedEmbedding(CoordinateEmbedding):
    """The embedding at the model's full width, with rows kept in the span."""

    def constrain(self) -> None:
        """Project the rows; called after each update."""
        with torch.no_grad():
            for table in _tables(self.embedding):
                table.weight.copy_(self.subspace.project(table.weight.t()).t())

    def _columns(self) -> int:
        return self.subspace.basis.shape[0]

    def _coordinates(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x @ self.subspace.basis


class LastBlock(nn.Module):
    """The last block, of full rank; returns the residual stream."""

    def __init__(self, block: nn.Module, subspace: Subspace) -> None:
        super().__init__()
        self.block = block
        self.subspace = subspace

    def forward(self, value: Value) -> ModuleValue:
        name, code = only_float(value)
        rest = {other: x for other, x in value.items() if other not in ("tokens", name)}
        x = self.subspace.decode(code, whole_tokens(value["tokens"]))
        y: ModuleValue = self.block(argument_of({name if rest else UNNAMED: x, **rest}))
        return y


class InnerBlock(LastBlock):
    """A block between two boundaries."""

    def forward(self, value: Value) -> Value:
        """Return the next coordinates; the other tensors of the boundary are unchanged."""
        name, _ = only_float(value)
        _, x = only_float(value_of(super().forward(value)))
        return {**value, name: self.subspace.encode(x, whole_tokens(value["tokens"]))}


class SubspaceLinear(nn.Module):
    """A linear layer U (W z + b), with output in the span and exact gradients."""

    def __init__(self, linear: nn.Linear, subspace: Subspace) -> None:
        super().__init__()
        self.subspace = subspace
        basis = subspace.basis
        self.weight = nn.Parameter(basis.t() @ linear.weight.detach())
        self.bias = None if linear.bias is None else nn.Parameter(basis.t() @ linear.bias.detach())

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(F.linear(z, self.weight, self.bias), self.subspace.basis)

    def ordinary(self) -> nn.Linear:
        """Return an equivalent ordinary layer."""
        basis = self.subspace.basis
        linear = nn.Linear(self.weight.shape[1], len(basis), bias=self.bias is not None)
        linear.weight = nn.Parameter(basis @ self.weight.detach())
        if self.bias is not None:
            linear.bias = nn.Parameter(basis @ self.bias.detach())
        return linear


class ProjectedLinear(nn.Module):
    """A linear layer kept in the span, whose output is normalised without a learned gain."""

    def __init__(self, linear: nn.Linear, subspace: Subspace) -> None:
        super().__init__()
        self.subspace = subspace
        self.linear = linear
        self.constrain()

    def constrain(self) -> None:
        """Project weight and bias; called after each update."""
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(self.subspace.project(parameter))

    def forward(self, z: Tensor) -> Tensor:
        y: Tensor = self.linear(z)
        return F.rms_norm(y, y.shape[-1:])


def compact_tokens(tokens: Tensor, num_tokens: int) -> Tensor:
    """Return tokens in the smallest dtype: 1 byte each up to 256 tokens, 2 up to 65,536, else 4.

    >>> compact_tokens(torch.tensor([65_535]), 65_536), whole_tokens(compact_tokens(torch.tensor([65_535]), 65_536))
    (tensor([-1], dtype=torch.int16), tensor([65535]))
    """
    kind = torch.uint8 if num_tokens <= 2**8 else torch.int16 if num_tokens <= 2**16 else torch.int32
    return tokens.to(kind)


def whole_tokens(tokens: Tensor) -> Tensor:
    """Invert `compact_tokens`: return the tokens as int64."""
    return tokens.long() & 0xFFFF if tokens.dtype == torch.int16 else tokens.long()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, so that the bits of weights do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tables(embedding: nn.Module) -> list[nn.Embedding]:
    return [module for module in embedding.modules() if isinstance(module, nn.Embedding)]
