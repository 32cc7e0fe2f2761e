"""Learned bottlenecks: an encoder and a decoder around a boundary, trained with the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.notation import check_integer
from raysim.random import derive_key
from raysim.workloads.stage_costs import named_layers

FORMS = ("linear", "residual", "orthonormal")


def with_bottleneck(
    model: nn.Sequential,
    cuts: Sequence[tuple[str, tuple[int, ...]]],
    bottleneck: int | Sequence[int],
    seed: int,
    form: str = "linear",
) -> tuple[nn.Sequential, list[str]]:
    """Return `model` with an encoder before each cut and a decoder after it, and the new cuts.

    Only the code and its gradient cross the boundary. Both layers are linear, without bias, and trained with the model. They act
    on the channels of images and on the last axis of other tensors. Weights are drawn from `seed` and the boundary alone. Forms:

    - `linear`: the autoencoder of Bian et al. (2024, 2301.02654), weights uniform in +-sqrt(6 / (width + code)) (Xavier);
    - `residual`: as in ResBM (Aboudib et al. 2026, 2604.11947), the code is the first features of x plus W x, and the output is the
      code padded with zeros plus V times the code. W and V start at zero;
    - `orthonormal`: as in MAPL (Janson et al. 2026, 2606.05484), the encoder multiplies by A and the decoder by its transpose. The
      columns of the shared A are made orthonormal again after each update.

    `cuts`: the layers before the cuts and the shapes of their outputs. `bottleneck`: features of the code, one number for all
    boundaries or one each, 0 for none. The returned model shares the layers of `model`, which is unchanged. Raises ValueError
    naming the rule.

    >>> model = nn.Sequential(OrderedDict(first=nn.Linear(8, 16), last=nn.Linear(16, 4)))
    >>> widened, cuts = with_bottleneck(model, [("first", (2, 16))], 3, seed=0)
    >>> list(named_layers(widened)), cuts
    (['first', 'first_encoder', 'first_decoder', 'last'], ['first_encoder'])
    """
    widths = [bottleneck] * len(cuts) if isinstance(bottleneck, int) else list(bottleneck)
    if len(widths) != len(cuts):
        raise ValueError(
            f"`bottleneck` must be one number or a list with one per boundary ({len(cuts)}), but got {widths}."
        )
    layers = named_layers(model)
    ends = {name: name for name, _ in cuts}
    inserted: dict[str, list[tuple[str, nn.Module]]] = {}
    for boundary, ((name, shape), width) in enumerate(zip(cuts, widths, strict=True)):
        if check_integer("bottleneck", width, 0 if isinstance(bottleneck, Sequence) else 1):
            pair = _pair(name, shape, int(width), derive_key(seed, "bottleneck", boundary), form)
            names = f"{name}_encoder", f"{name}_decoder"
            if clash := next((new for new in names if new in layers), None):
                raise ValueError(f"`bottleneck` adds a layer `{clash}`, but the model has one of that name.")
            inserted[name] = list(zip(names, pair, strict=True))
            ends[name] = names[0]
    result: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in layers.items():
        result |= {name: layer, **dict(inserted.get(name, ()))}
    return nn.Sequential(result), list(ends.values())


def _pair(name: str, shape: tuple[int, ...], code: int, key: int, form: str) -> tuple[nn.Module, nn.Module]:
    """Return the encoder and the decoder for a layer's output, with `code` features between them."""
    if len(shape) not in (2, 3, 4):
        raise ValueError(
            f"`bottleneck` works on features (samples, width), (samples, length, width) and (samples, channels, height, width), "
            f"but layer `{name}` returns the shape {shape}. Cut elsewhere."
        )
    width = shape[1] if len(shape) == 4 else shape[-1]
    if code >= width:
        raise ValueError(
            f"`bottleneck` must be less than the features that cross ({width} after layer `{name}`), but got {code}."
        )
    if form == "residual":
        return ResidualLinear(width, code), ResidualLinear(code, width)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)
        if form == "orthonormal":
            basis = nn.Parameter(_nearest_orthonormal(torch.randn(width, code)))
            return Encoder(basis), Decoder(basis)
        make: Any = partial(nn.Conv2d, kernel_size=1) if len(shape) == 4 else nn.Linear
        encoder, decoder = make(width, code, bias=False), make(code, width, bias=False)
        for layer in (encoder, decoder):
            nn.init.xavier_uniform_(layer.weight)
    return encoder, decoder


class ResidualLinear(nn.Module):
    """A linear layer plus the identity, which is truncated or zero-padded to the width of the output."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, width))

    def forward(self, x: Tensor) -> Tensor:
        last = _features_last(x)
        out, width = self.weight.shape
        kept = F.pad(last, (0, out - width))  # a negative padding truncates
        return _as_given(F.linear(last, self.weight) + kept, x)


class Encoder(nn.Module):
    """The coordinates of features in an orthonormal basis."""

    def __init__(self, basis: nn.Parameter) -> None:
        super().__init__()
        self.basis = basis

    def constrain(self) -> None:
        """Make the basis orthonormal; called after each update."""
        with torch.no_grad():
            self.basis.copy_(_nearest_orthonormal(self.basis))

    def forward(self, x: Tensor) -> Tensor:
        return _as_given(_features_last(x) @ self.basis, x)


class Decoder(Encoder):
    """The features reconstructed from coordinates in an orthonormal basis."""

    def forward(self, x: Tensor) -> Tensor:
        return _as_given(_features_last(x) @ self.basis.t(), x)


def _features_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1) if x.ndim == 4 else x


def _as_given(y: Tensor, x: Tensor) -> Tensor:
    """Return the result for `x` with the axes in the order of `x`."""
    return y.movedim(-1, 1) if x.ndim == 4 else y


def _nearest_orthonormal(basis: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns, the polar factor."""
    left, _, right = torch.linalg.svd(basis.double(), full_matrices=False)
    nearest: Tensor = (left @ right).to(basis.dtype)
    return nearest
