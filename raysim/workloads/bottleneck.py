"""Learned bottlenecks: a layer before each cut that leaves few features, and one behind it that makes them many again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from raysim.notation import check_integer
from raysim.random import derive_key
from raysim.workloads.costs import named_layers


def with_bottleneck(
    model: nn.Sequential, cuts: Sequence[tuple[str, tuple[int, ...]]], bottleneck: int | Sequence[int], seed: int
) -> tuple[nn.Sequential, list[str]]:
    """Return `model` with an encoder at the end of each stage that sends and a decoder at the start of the next, and its cuts.

    The autoencoder of Bian et al. (2024, 2301.02654): linear, without bias, trained with the model. The code crosses the
    boundary, and its gradient returns. It acts on the channels of images, by a convolution of 1 x 1, and on the last axis of other
    tensors. Weights are Xavier's, uniform in +-sqrt(6 / (width + code)), drawn from `seed` and the boundary alone.

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
            f"`bottleneck` must be one number or a list of one a boundary ({len(cuts)}), but got {widths}."
        )
    layers = named_layers(model)
    inserted: dict[str, tuple[nn.Module, nn.Module]] = {}
    for boundary, ((name, shape), width) in enumerate(zip(cuts, widths, strict=True)):
        if check_integer("bottleneck", width, 0 if isinstance(bottleneck, Sequence) else 1):
            inserted[name] = _pair(name, shape, int(width), derive_key(seed, "bottleneck", boundary))
    result: OrderedDict[str, nn.Module] = OrderedDict()
    ends = []
    for name, layer in layers.items():
        result[name] = layer
        if name not in inserted:
            continue
        for part, module in zip(("encoder", "decoder"), inserted[name], strict=True):
            if f"{name}_{part}" in layers:
                raise ValueError(f"`bottleneck` adds a layer `{name}_{part}`, but the model has one of that name.")
            result[f"{name}_{part}"] = module
    for name, _ in cuts:
        ends.append(f"{name}_encoder" if name in inserted else name)
    return nn.Sequential(result), ends


def _pair(name: str, shape: tuple[int, ...], code: int, key: int) -> tuple[nn.Module, nn.Module]:
    """Return encoder and decoder for the output of a layer, with `code` features between them."""
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
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)
        if len(shape) == 4:
            pair: list[nn.Conv2d | nn.Linear] = [
                nn.Conv2d(width, code, 1, bias=False),
                nn.Conv2d(code, width, 1, bias=False),
            ]
        else:
            pair = [nn.Linear(width, code, bias=False), nn.Linear(code, width, bias=False)]
        for layer in pair:
            nn.init.xavier_uniform_(layer.weight)
    return pair[0], pair[1]
