"""A multilayer perceptron, for tables."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from raysim.notation import check_integer
from raysim.workloads.splits import DataShape


def mlp(*, shape: DataShape, width: int = 64, num_layers: int = 4, dropout: float = 0.0) -> nn.Sequential:
    """Return `num_layers` linear layers, with ReLU after all but the last, of `width` features between them.

    >>> [name for name, _ in mlp(shape=DataShape((5,), "float32", 1), num_layers=3).named_children()]
    ['layer0', 'layer1', 'head']
    """
    width, num_layers = check_integer("model.width", width, 1), check_integer("model.num_layers", num_layers, 1)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"`model.dropout` must be in [0, 1), but got {dropout!r}.")
    features = math.prod(shape.input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index in range(num_layers - 1):
        first: list[nn.Module] = [] if index or len(shape.input_shape) == 1 else [nn.Flatten()]
        last: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
        layers[f"layer{index}"] = nn.Sequential(*first, nn.Linear(features, width), nn.ReLU(), *last)
        features = width
    layers["head"] = nn.Linear(features, shape.num_classes)
    return nn.Sequential(layers)
