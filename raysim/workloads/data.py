"""Data sets by name or by import path, and the order in which training reads them.

Splits are defined in `splits`, and the order in `order`. Options are keyword arguments of the loading functions; heavy
libraries are imported where a set needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raysim.notation import suggestion
from raysim.workloads.hub import hf
from raysim.workloads.images import cifar10, cifar100, digits
from raysim.workloads.options import bind_options, check_path, import_function
from raysim.workloads.order import batch_ids, steps_per_epoch
from raysim.workloads.own import own
from raysim.workloads.pictures import images
from raysim.workloads.splits import Data, DataShape, ImageSplit, Split, TextSplit
from raysim.workloads.table import table
from raysim.workloads.text import text, topics, wikitext2

__all__ = [
    "DATASETS",
    "Data",
    "DataShape",
    "ImageSplit",
    "Split",
    "TextSplit",
    "batch_ids",
    "bind_data",
    "load_data",
    "steps_per_epoch",
]

DATASETS: dict[str, Callable[..., Data]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "digits": digits,
    "hf": hf,
    "images": images,
    "table": table,
    "text": text,
    "topics": topics,
    "wikitext2": wikitext2,
}
ON_A_HUB = ("hf",)  # sets whose `path` may be a name on the hub


def load_data(name: str, options: Mapping[str, object], seed: int) -> Data:
    """Return the data set `name`; raises ValueError naming the wrong name, option (`data.length`) or path.

    Splits are the same for every `seed`, so that runs of different seeds are measured on the same samples: `seed` is
    for sets that are drawn, and none here is. The order is `batch_ids`; augmentation takes its key with each batch.

    >>> data = load_data("digits", {}, seed=0)
    >>> len(data.train), len(data.test), data.shape.input_shape, data.shape.num_classes
    (1437, 360, (1, 8, 8), 10)
    """
    arguments = bind_data(name, options)  # refuses an unknown name
    return own(name, arguments) if ":" in name else DATASETS[name](**arguments)


def bind_data(name: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments with which the data set `name` is loaded; raises ValueError for a wrong name, option or path."""
    if ":" in name:
        return bind_options("data", name, import_function("Data", name), options)
    if name not in DATASETS:
        raise ValueError(
            f"Unknown data set {name!r}. Known: {', '.join(sorted(DATASETS))}; your own is written "
            f"`package.module:function`.{suggestion(name, DATASETS)}"
        )
    arguments = bind_options("data", name, DATASETS[name], options)
    if "path" in arguments and name not in ON_A_HUB:
        check_path("data.path", arguments["path"])
    return arguments
