"""Image data sets held in memory: scikit-learn's digits, and CIFAR-10 and CIFAR-100 from Parquet files or the hub."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.notation import check_choice
from raysim.on_demand import torch
from raysim.random import derive_key
from raysim.workloads.picture_data import AUGMENT, COLUMNS, augmented, normalise, open_picture
from raysim.workloads.row_files import HubRows, RowSource, load_hub_set, open_splits
from raysim.workloads.splits import TEST_SHARE, Data, DataShape, Wanted, limits, permutation

if TYPE_CHECKING:
    from torch import Tensor

DIGITS_TEST = 360


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images stored as uint8 and normalised on access to (x / scale - mean) / std.

    `augment` shifts each image by up to 4 pixels (filling with black) and mirrors half of the images: `random` draws again
    in each epoch, `fixed` draws once for each sample, `none` does neither.

    >>> split = ImageSplit(np.full((1, 1, 2, 2), 51, np.uint8), np.array([7]), mean=(0.1,), std=(0.5,))
    >>> split.inputs(np.array([0]), epoch=0, key=0, training=True)
    tensor([[[[0.2000, 0.2000],
              [0.2000, 0.2000]]]])
    """

    images: NDArray[np.uint8]  # (sample, channel, height, width)
    labels: NDArray[np.int64]  # (sample,)
    mean: tuple[float, ...]  # per channel, of x / scale
    std: tuple[float, ...]
    scale: float = 255.0
    augment: str = "none"

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        images = augmented(self.images[ids], ids, epoch, key, self.augment if training else "none")
        return normalise(images, self.mean, self.std, self.scale)

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.labels[ids])


def digits(*, train_samples: int | None = None, test_samples: int | None = None) -> Data:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels, 16 grey levels: 1,437 to train, 360 to test.

    Needs no network. The split is random but fixed: the same for every run.
    """
    rows = _digits()
    order = permutation(len(rows), derive_key("digits", "split"))
    images, labels = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    first_test = len(order) - DIGITS_TEST
    num_train, num_test = limits((train_samples, test_samples), (first_test, DIGITS_TEST))
    train, test = (
        ImageSplit(images[ids], labels[ids], (0.3054,), (0.3763,), 16.0)
        for ids in (order[:num_train], order[first_test : first_test + num_test])
    )
    return Data(train, test, DataShape((1, 8, 8), "float32", 10))


@cache
def _digits() -> NDArray[np.float64]:
    """Return scikit-learn's digits and their labels, a row each."""
    package = find_spec("sklearn")  # its file alone: importing scikit-learn takes a second
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")


class Cifar(NamedTuple):
    """One of the two CIFAR data sets: its hub address, label column, and pixel normalisation."""

    hub: str
    label: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10 = Cifar(
    "uoft-cs/cifar10",
    "label",
    10,
    (0.4914, 0.4822, 0.4465),
    (0.2023, 0.1994, 0.2010),  # as in the code of Rudakov et al. 2023
)
CIFAR100 = Cifar("uoft-cs/cifar100", "fine_label", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def cifar10(
    *,
    path: str | None = None,
    augment: str = "random",
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return CIFAR-10 from `path`, or by default from the hub.

    `path`: a folder with train*.parquet and test*.parquet at any depth, or one Parquet file, whose last tenth is the
    test split. The columns are the hub's: `img` or `image` ({bytes, path}) and `label`. `augment`: crops and flips in
    training are `random`, new in each epoch (as in the paper), `fixed` for each sample, or `none`.
    """
    return _cifar(CIFAR10, path, augment, (train_samples, test_samples))


def cifar100(
    *,
    path: str | None = None,
    augment: str = "random",
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return CIFAR-100 with its hundred fine labels, column `fine_label`; otherwise like `cifar10`."""
    return _cifar(CIFAR100, path, augment, (train_samples, test_samples))


def _cifar(kind: Cifar, path: str | None, augment: str, wanted: Wanted) -> Data:
    check_choice("data.augment", augment, AUGMENT)
    if path is None:
        loaded = load_hub_set(kind.hub)
        sources = [RowSource(HubRows(f"{kind.hub}, split {split}", loaded[split])) for split in ("train", "test")]
    else:
        sources = open_splits(path, (".parquet",))
    parts = [_read(source, kind) for source in sources]
    if len(parts) == 1:
        encoded, labels = parts[0]
        cut = len(labels) - len(labels) // TEST_SHARE
        if cut == len(labels):
            raise ValueError(
                f"`data.path` must hold 10 images or more to test on a tenth, but {path!r} holds {len(labels)}."
            )
        parts = [(encoded[:cut], labels[:cut]), (encoded[cut:], labels[cut:])]
    splits = []
    counts = limits(wanted, [len(labels) for _, labels in parts])
    for (encoded, labels), count, style in zip(parts, counts, (augment, "none"), strict=True):
        classes = np.asarray(labels[:count])
        splits.append(ImageSplit(_decode(encoded[:count]), classes, kind.mean, kind.std, augment=style))
        if classes.dtype.kind not in "iu" or classes.min() < 0 or classes.max() >= kind.num_classes:
            raise ValueError(f"Column `{kind.label}` must hold integers from 0 to {kind.num_classes - 1}.")
    train, test = splits
    if train.images.shape[1:] != test.images.shape[1:]:
        sizes = [split.images.shape[2:] for split in splits]
        raise ValueError(f"Images to train and to test on must be of one size, but got {sizes[0]} and {sizes[1]}.")
    return Data(train, test, DataShape(train.images.shape[1:], "float32", kind.num_classes))


def _read(source: RowSource, kind: Cifar) -> tuple[list[bytes], list[int]]:
    """Return encoded images and their labels."""
    schema = source.schema
    column = next((name for name in COLUMNS if name in schema.names), None)
    if column is None or kind.label not in schema.names:
        raise ValueError(
            f"{source.name} must have a column `img` or `image` and a column `{kind.label}`, but has {', '.join(schema.names)}."
        )
    held = schema.field(column).type
    if not pa.types.is_struct(held) or held.get_field_index("bytes") < 0:
        raise ValueError(f"Column `{column}` of {source.name} must hold {{bytes, path}}, but holds {held}.")
    images: list[bytes] = []
    labels: list[int] = []
    for batch in source.batches([column, kind.label]):
        images += batch.column(column).field("bytes").to_pylist()
        labels += batch.column(kind.label).to_pylist()
    return images, labels


def _decode(encoded: list[bytes]) -> NDArray[np.uint8]:
    """Return (sample, channel, height, width); single-threaded, since lock contention outweighs such small images."""
    images: NDArray[np.uint8] | None = None
    for i, each in enumerate(encoded):
        pixels = np.asarray(open_picture(each, f"number {i} under `data.path`"))
        if images is None:
            images = np.empty((len(encoded), *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            raise ValueError(
                f"Images under `data.path` must be of one size, but number {i} is {pixels.shape[:2]} "
                f"and the first {images.shape[1:3]}."
            )
        images[i] = pixels
    if images is None:
        raise ValueError("`data.path` must hold images, but has none.")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
