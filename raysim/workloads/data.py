"""Data sets by name or by import path.

Splits and the order of samples are defined in `splits`. A custom data set is two objects with a length and samples by
index, such as torch's data sets. Options are keyword arguments of the loading functions; heavy libraries are imported
only for the data sets that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raysim.notation import suggestion
from raysim.on_demand import torch
from raysim.workloads.answer_data import addition, brackets, copying
from raysim.workloads.digits_cifar import cifar10, cifar100, digits
from raysim.workloads.hub_data import hf
from raysim.workloads.losses import IGNORED
from raysim.workloads.options import bind_options, check_path, import_function
from raysim.workloads.picture_data import images
from raysim.workloads.splits import Data, DataShape, ImageSplit, Split, TextSplit, batch_ids, steps_per_epoch
from raysim.workloads.table_data import table
from raysim.workloads.text_data import text, topics, wikitext2

if TYPE_CHECKING:
    from torch import Tensor

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
    "addition": addition,
    "brackets": brackets,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "copying": copying,
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
    """Return the data set `name`; raises ValueError naming a wrong name, option (`data.length`) or path.

    Splits are the same for every `seed`, so runs of different seeds are measured on the same samples. `batch_ids` gives
    the order; augmentation gets a key with each batch.

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


class Samples(Protocol):
    """The protocol of a split: its length, and pairs of input and target by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return the input and the target of a sample."""


@dataclass(frozen=True, eq=False)
class OwnSplit:
    """Samples read one by one. `known` holds targets that have been read already: a class or some numbers each."""

    name: str
    samples: Samples
    shape: DataShape
    known: NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.samples)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return (batch, ...), shaped as in `DataShape`; raises ValueError naming a sample of another shape."""
        found = [_input_of(self.name, self.samples, int(index)) for index in ids]
        for index, x in zip(ids, found, strict=True):
            if tuple(x.shape) != self.shape.input_shape:
                raise ValueError(
                    f"The input of sample {index} of {self.name} has the shape {tuple(x.shape)}, but that of sample 0 "
                    f"{self.shape.input_shape}."
                )
        return torch.stack(found).to(getattr(torch, self.shape.input_dtype))

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the targets of samples, stacked to (batch, ...)."""
        if self.known is not None:
            return torch.from_numpy(self.known[ids])
        return torch.stack([target_of(self.name, self.samples, int(index), self.shape) for index in ids])


def own(name: str, arguments: Mapping[str, Any]) -> Data:
    """Return the data that `package.module:function` returns: two objects, to train and to test on.

    Each has a length and, by index, pairs of an input and a target: tensors, arrays or numbers. Whole numbers are tokens as
    inputs and classes as targets; a target of -100 does not count. The number of classes is one more than the greatest target,
    or the length of an attribute `classes` of the training samples. Targets that are no sequences are read once, before
    anything starts.
    Raises ValueError with the rule that the objects break.
    """
    function: Callable[..., Any] = import_function("Data", name)
    try:
        found = function(**arguments)
    except (Exception, SystemExit) as error:
        raise ValueError(f"Data `{name}` failed: {type(error).__name__}: {str(error).rstrip('.')}.") from error
    parts = tuple(found) if isinstance(found, (tuple, list)) and len(found) == 2 else ()
    if not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") and len(part) for part in parts) or not parts:
        raise ValueError(
            f"Data `{name}` must return two objects with a length and samples by index, to train and to test on, "
            f"but got {type(found).__name__}."
        )
    names = [f"`{name}`, {split} split" for split in ("training", "test")]
    x, y = _input_of(names[0], parts[0], 0), _target_of(names[0], parts[0], 0)
    of_tokens, of_classes = (not part.is_floating_point() for part in (x, y))
    target_shape = tuple(y.shape) if of_classes or y.ndim else (1,)
    shape = DataShape(
        tuple(x.shape),
        "int64" if of_tokens else "float32",
        1 if of_classes else target_shape[-1],
        target_shape,
        "int64" if of_classes else "float32",
        has_ignored=of_classes and bool(target_shape),
    )
    known: list[NDArray[Any] | None] = [None, None]
    if len(target_shape) <= (0 if of_classes else 1):
        known = [_read_targets(each, part, shape) for each, part in zip(names, parts, strict=True)]
    if of_classes:
        classes = getattr(parts[0], "classes", None)
        num_classes = len(classes) if classes is not None else _count_classes(names, parts, known, shape)
        shape = shape._replace(num_classes=num_classes)
    train, test = (
        OwnSplit(*each, shape, seen) for each, seen in zip(zip(names, parts, strict=True), known, strict=True)
    )
    return Data(train, test, shape)


def read(name: str, samples: Samples, index: int) -> tuple[Any, Any]:
    """Return a sample; raises ValueError naming it if it cannot be read or is not a pair."""
    try:
        sample = samples[index]
    except Exception as error:
        raise ValueError(f"Sample {index} of {name} cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise ValueError(
            f"Sample {index} of {name} must be a pair of input and target, but is {type(sample).__name__}."
        )
    return sample[0], sample[1]


def target_of(name: str, samples: Samples, index: int, shape: DataShape) -> Tensor:
    """Return the target of a sample with the type and shape of `shape`; raises ValueError naming a sample that differs."""
    y = _target_of(name, samples, index)
    y = y.reshape(1) if not shape.classifies and not y.ndim else y
    if tuple(y.shape) != shape.target_shape or (shape.classifies and y.is_floating_point()):
        raise ValueError(
            f"The target of sample {index} of {name} must have the shape {shape.target_shape} and hold "
            f"{'classes' if shape.classifies else 'numbers'}, as that of sample 0, but is of {y.dtype} and has {tuple(y.shape)}."
        )
    return y.to(getattr(torch, shape.target_dtype))


def _read_targets(name: str, samples: Samples, shape: DataShape) -> NDArray[Any]:
    """Return all targets: from an attribute `targets`, which torchvision's sets have, or from the samples one by one."""
    given = getattr(samples, "targets", None)
    if given is not None and len(given) == len(samples):
        y = _tensor(given, f"The attribute `targets` of {name}")
        y = y.reshape(-1, 1) if shape.target_shape == (1,) else y
        if tuple(y.shape[1:]) != shape.target_shape:
            raise ValueError(
                f"The attribute `targets` of {name} must hold targets of the shape {shape.target_shape}, as sample 0 has, but "
                f"has {tuple(y.shape)}."
            )
        return y.to(getattr(torch, shape.target_dtype)).numpy()
    found: NDArray[Any] = torch.stack([target_of(name, samples, index, shape) for index in range(len(samples))]).numpy()
    return found


def _count_classes(names: list[str], parts: tuple[Any, ...], known: list[NDArray[Any] | None], shape: DataShape) -> int:
    """Return one more than the greatest target; raises ValueError for one below 0 that is not ignored."""
    greatest = 0
    for name, part, targets in zip(names, parts, known, strict=True):
        each = [targets] if targets is not None else (target_of(name, part, i, shape).numpy() for i in range(len(part)))
        for values in each:
            counted = values[values != IGNORED]
            if counted.size and counted.min() < 0:
                raise ValueError(f"Targets of {name} must be classes from 0, or -100, but one is {counted.min()}.")
            greatest = max(greatest, int(counted.max(initial=0)))
    return greatest + 1


def _input_of(name: str, samples: Samples, index: int) -> Tensor:
    return _tensor(read(name, samples, index)[0], f"The input of sample {index} of {name}")


def _target_of(name: str, samples: Samples, index: int) -> Tensor:
    return _tensor(read(name, samples, index)[1], f"The target of sample {index} of {name}")


def _tensor(value: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(np.asarray(value) if isinstance(value, (list, tuple)) else value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{what} must be a tensor, an array, or numbers of one shape, but is {type(value).__name__}."
        ) from None
