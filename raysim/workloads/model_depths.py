"""Numbers of layers of raysim's own models, by name and options, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Depth(NamedTuple):
    """A number of layers: `fixed` layers plus the value of an option, `default` if it is not given."""

    fixed: int
    option: str | None = None
    default: int = 0


DEPTHS = {
    "cnn": Depth(7),
    "gpt": Depth(2, "num_blocks", 4),
    "lstm": Depth(2, "num_layers", 2),
    "mlp": Depth(0, "num_layers", 4),
    "resnet18": Depth(6),
    "resnet101": Depth(6),
    "vgg16": Depth(8),
}


def num_layers(name: str, options: Mapping[str, object]) -> int | None:
    """Return the number of layers of a model; None if it is not known before the model is made.

    >>> num_layers("cnn", {}), num_layers("gpt", {"num_blocks": 6}), num_layers("my_package:model", {})
    (7, 8, None)
    """
    depth = DEPTHS.get(name)
    if depth is None or options.get("subspace") is not None:  # which joins layers
        return None
    given = options.get(depth.option, depth.default) if depth.option else 0
    return depth.fixed + given if isinstance(given, int) and given >= 0 else None


def check_num_stages(num_stages: int, layers: int) -> None:
    """Raise ValueError for more stages than layers."""
    if num_stages > layers:
        raise ValueError(f"`num_stages` must be at most the number of layers ({layers}), but got {num_stages}.")
