"""Data sets by name, by import path, or from Hugging Face.

Splits and the order of samples are defined in `splits`. A custom data set is two objects with a length and samples by
index, such as torch's data sets. Options are keyword arguments of the loading functions; heavy libraries are imported
only for the data sets that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.notation import check_integer, shown, suggestion
from raysim.on_demand import torch
from raysim.workloads.answer_data import addition, brackets, copying
from raysim.workloads.digits_cifar import ImageSplit, cifar10, cifar100, digits
from raysim.workloads.labels import check_codes
from raysim.workloads.losses import IGNORED
from raysim.workloads.options import bind_options, check_path, import_function, import_hub, reason_of
from raysim.workloads.picture_data import PictureOptions, images, pictures_of
from raysim.workloads.row_files import HubRows, RowSource
from raysim.workloads.splits import Data, DataShape, Split, batch_ids, steps_per_epoch
from raysim.workloads.table_data import table, table_of_rows
from raysim.workloads.text_data import TextSplit, labelled_texts, packed_texts, text, topics, wikitext2
from raysim.workloads.tokenizers import make_tokenizer

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


def load_data(name: str, options: Mapping[str, object], seed: int) -> Data:
    """Return the data set `name`; raises ValueError naming a wrong name, option (`data.length`) or path.

    Splits are the same for every `seed`, so runs of different seeds are tested on the same samples. `batch_ids` defines
    the order; augmentation gets a key with each batch.

    >>> data = load_data("digits", {}, seed=0)
    >>> len(data.train), len(data.test), data.shape.input_shape, data.shape.num_classes
    (1437, 360, (1, 8, 8), 10)
    """
    arguments = bind_data(name, options)  # refuses an unknown name
    return own(name, arguments) if ":" in name else DATASETS[name](**arguments)


def bind_data(name: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the loading arguments of the data set `name`; raises ValueError for a wrong name, option or path."""
    if ":" in name:
        return bind_options("data", name, import_function("Data", name), options)
    if name not in DATASETS:
        raise ValueError(
            f"Unknown data set {name!r}. Known: {', '.join(sorted(DATASETS))}; your own is written "
            f"`package.module:function`.{suggestion(name, DATASETS)}"
        )
    arguments = bind_options("data", name, DATASETS[name], options)
    if "path" in arguments and name != "hf":  # the path of `hf` may be a name on the hub
        check_path("data.path", arguments["path"])
    return arguments


def hf(
    *,
    path: str,
    name: str | None = None,
    column: str | list[str] | None = None,
    target: str | None = None,
    pair: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    tokenizer: str | None = None,
    length: int = 128,
    classes: bool | None = None,
    size: int | list[int] | None = None,
    augment: str = "none",
    mean: list[float] | None = None,
    std: list[float] | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return a Hugging Face data set, from a hub name, a folder written by `save_to_disk`, or a folder of data files.

    `name`: the configuration if there are several. `column`: the input, whose type decides the kind of samples: images
    (see `images`), texts (see `text`; packed without a `target`), or numbers (one column or a list; see `table`).
    `target`: the column to predict. `test_split`: if the set has no `test`, or trains on it, a tenth of the rows is the test split.
    """
    sources, wanted = _hub_splits(path, name, train_split, test_split), (train_samples, test_samples)
    schema = sources[0].schema
    column = column or next((usual for usual in ("text", "image", "img", "sentence") if usual in schema.names), None)
    if column is None:
        raise ValueError(f"`data.column` must be given: the columns of {path!r} are {', '.join(schema.names)}.")
    first = column if isinstance(column, str) else column[0]
    kind = schema.field(sources[0].check_column("data.column", first)).type
    if pa.types.is_struct(kind) or pa.types.is_binary(kind):
        return pictures_of(sources, first, target or "label", PictureOptions(size, augment, mean, std, wanted))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        length, reader = check_integer("data.length", length, 1), make_tokenizer(tokenizer)
        if target is None:
            return packed_texts(sources, reader, length, first, wanted)
        return labelled_texts(sources, reader, length, first, pair, target, wanted)
    if target is None:
        raise ValueError(f"`data.target` must be given if inputs are numbers, as column {first!r} of {path!r} holds.")
    return table_of_rows(sources, target, [column] if isinstance(column, str) else list(column), classes, wanted)


def _hub_splits(path: str, name: str | None, train_split: str, test_split: str) -> list[RowSource]:
    """Return the rows of the training split, and of the test split if there is one."""
    datasets = import_hub("datasets")
    folder = Path(path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else path, name)
    except Exception as error:  # the library raises many types
        reason = reason_of(error)
        raise ValueError(f"`data.path` = {path!r} cannot be loaded as a data set: {reason}.") from None
    splits = loaded if isinstance(loaded, dict) else {train_split: loaded}
    for field, split in (("train", train_split), ("test", test_split)):
        if split not in splits and (field, split) != ("test", "test"):
            raise ValueError(
                f"`data.{field}_split` must be a split of {path!r} ({', '.join(splits)}), but got {split!r}."
            )
    known = list(dict.fromkeys([train_split, *([test_split] if test_split in splits else [])]))
    held_out = [split for split in splits if split not in known and split.startswith(("val", "dev"))]
    remedy = f"Try `data.test_split={held_out[0]}`." if held_out else "Leave these rows out."
    return [RowSource(HubRows(f"{path}, split {split}", splits[split], remedy=remedy)) for split in known]


_LOADERS = (addition, brackets, cifar10, cifar100, copying, digits, hf, images, table, text, topics, wikitext2)
DATASETS: dict[str, Callable[..., Data]] = {loader.__name__: loader for loader in _LOADERS}


@dataclass(frozen=True, eq=False)
class OwnSamples:
    """Samples of a user's data set, read one by one; errors name the sample and the split."""

    name: str
    samples: Any

    def __len__(self) -> int:
        return len(self.samples)

    def contents(self) -> Iterator[bytes]:
        """Yield nothing: a user's object may read other samples each time."""
        return iter(())

    def input(self, index: int) -> Tensor:
        """Return the input of a sample."""
        return _tensor(self._pair(index)[0], f"The input of sample {index} of {self.name}")

    def target(self, index: int, shape: DataShape | None = None) -> Tensor:
        """Return the target of a sample; if `shape` is given, checked against it and converted to its dtype."""
        y = _tensor(self._pair(index)[1], f"The target of sample {index} of {self.name}")
        if shape is None:
            return y
        y = y.reshape(1) if not shape.classifies and not y.ndim else y
        if tuple(y.shape) != shape.target_shape or (shape.classifies and y.is_floating_point()):
            raise ValueError(
                f"The target of sample {index} of {self.name} must have the shape {shape.target_shape} and hold "
                f"{'classes' if shape.classifies else 'numbers'}, as that of sample 0, but is of {y.dtype} and has {tuple(y.shape)}."
            )
        return y.to(getattr(torch, shape.target_dtype))

    def all_targets(self, shape: DataShape) -> NDArray[Any]:
        """Return the targets of all samples; an attribute `targets` may lack the transforms of `__getitem__`, and is not read."""
        return torch.stack([self.target(i, shape) for i in range(len(self))]).numpy()

    def num_classes(self, known: NDArray[Any] | None, shape: DataShape) -> int:
        """Return the greatest target plus 1; `known` targets are not read again. Raises ValueError for negative targets except -100."""
        greatest = 0
        parts = [known] if known is not None else (self.target(i, shape).numpy() for i in range(len(self)))
        for targets in parts:
            counted = targets[targets != IGNORED]
            if counted.size and counted.min() < 0:
                raise ValueError(f"Targets of {self.name} must be classes from 0, or -100, but one is {counted.min()}.")
            greatest = max(greatest, int(counted.max(initial=0)))
        return greatest + 1

    def _pair(self, index: int) -> tuple[Any, Any]:
        try:
            sample = self.samples[index]
        except Exception as error:
            raise ValueError(
                f"Sample {index} of {self.name} cannot be read: {type(error).__name__}: {error}."
            ) from error
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ValueError(
                f"Sample {index} of {self.name} must be a pair of input and target, but is {type(sample).__name__}."
            )
        return sample[0], sample[1]


@dataclass(frozen=True, eq=False)
class OwnSplit:
    """A split of `OwnSamples`. `known` holds the targets if they have been read already: a class or some numbers each."""

    samples: OwnSamples
    shape: DataShape
    known: NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.samples)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return (batch, ...), shaped as in `DataShape`; raises ValueError naming a sample with a different shape."""
        inputs = [self.samples.input(int(index)) for index in ids]
        for index, x in zip(ids, inputs, strict=True):
            if tuple(x.shape) != self.shape.input_shape:
                raise ValueError(
                    f"The input of sample {index} of {self.samples.name} has the shape {tuple(x.shape)}, but sample 0 has "
                    f"{self.shape.input_shape}."
                )
        return torch.stack(inputs).to(getattr(torch, self.shape.input_dtype))

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        if self.known is not None:
            return torch.from_numpy(self.known[ids])
        return torch.stack([self.samples.target(int(index), self.shape) for index in ids])


def own(name: str, arguments: Mapping[str, Any]) -> Data:
    """Return the data of `package.module:function`.

    The function returns two objects, the training and the test samples. Each has a length and, by index, pairs of an input
    and a target: tensors, arrays or numbers. Integers are tokens as inputs and classes as targets; targets of -100 are ignored.
    The number of classes is the greatest target plus 1, or given by the training object's attribute `classes`. Targets
    other than sequences are read once, before anything starts. Raises ValueError naming the broken rule.
    """
    function: Callable[..., Any] = import_function("Data", name)
    try:
        result = function(**arguments)
    except (Exception, SystemExit) as error:
        raise ValueError(f"Data `{name}` failed: {type(error).__name__}: {str(error).rstrip('.')}.") from error
    pair = result if isinstance(result, (tuple, list)) and len(result) == 2 else ()
    if not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") and len(part) for part in pair) or not pair:
        raise ValueError(
            f"Data `{name}` must return two objects with a length and samples by index, to train and to test on, "
            f"but got {type(result).__name__}."
        )
    parts = [
        OwnSamples(f"`{name}`, {split} split", part) for split, part in zip(("training", "test"), pair, strict=True)
    ]
    x, y = parts[0].input(0), parts[0].target(0)
    of_classes = not y.is_floating_point()
    target_shape = tuple(y.shape) if of_classes or y.ndim else (1,)
    shape = DataShape(
        tuple(x.shape),
        "float32" if x.is_floating_point() else "int64",
        1 if of_classes else target_shape[-1],
        target_shape,
        "int64" if of_classes else "float32",
    )
    read_once = len(target_shape) <= (0 if of_classes else 1)
    known = [part.all_targets(shape) if read_once else None for part in parts]
    if of_classes:
        ignores = any(targets is None or bool((targets == IGNORED).any()) for targets in known)
        shape = shape._replace(has_ignored=ignores)
        declared = _declared(name, getattr(pair[0], "classes", None))
        counts = [part.num_classes(targets, shape) for part, targets in zip(parts, known, strict=True)]
        learned = known[0] is None or bool((known[0] != IGNORED).any())  # otherwise the data are refused for that
        for part, targets, count in zip(parts, known, counts, strict=True):
            if targets is not None and learned and count > (declared or counts[0]):
                raise ValueError(
                    f"A target of {part.name} is {count - 1}, but {'`classes` declares' if declared else 'the training split has'} "
                    f"{declared or counts[0]} classes from 0. Leave such samples out, or give the number as an attribute `classes`."
                )
        if known[0] is not None and declared is None:
            check_codes(f"The training split of `{name}`", len(np.unique(known[0])), counts[0])
        shape = shape._replace(num_classes=declared or max(counts))
    train, test = (OwnSplit(part, shape, targets) for part, targets in zip(parts, known, strict=True))
    return Data(train, test, shape)


def _declared(name: str, classes: Any) -> int | None:
    """Return the number of classes given by an attribute `classes`: their names, or their number."""
    if classes is None:
        return None
    count = len(classes) if hasattr(classes, "__len__") else classes
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(
            f"The attribute `classes` of `{name}` must list the classes or be their number, but is {shown(classes)}."
        )
    return int(count)


def _tensor(value: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(np.asarray(value) if isinstance(value, (list, tuple)) else value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a tensor, an array, or numbers of one shape, but is {type(value).__name__}."
        ) from None
