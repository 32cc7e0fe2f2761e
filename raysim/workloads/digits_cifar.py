"""Data sets of images: scikit-learn's digits, CIFAR-10 and CIFAR-100 from Parquet files or from the hub."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.notation import check_choice
from raysim.random import derive_key
from raysim.workloads.options import check_path, load_hub_set
from raysim.workloads.picture_data import open_picture
from raysim.workloads.row_files import HubRows, RowSource, open_rows_of, split_files
from raysim.workloads.splits import TEST_SHARE, Data, DataShape, ImageSplit, limit, permutation

DIGITS_TEST = 360
DIGITS_CLASSES = 10
IMAGE_COLUMNS = ("img", "image")


class Cifar(NamedTuple):
    """One of the two CIFAR sets: its address, the names of its labels, and the normalisation of its pixels."""

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
    (0.2023, 0.1994, 0.2010),  # as the code of Rudakov et al. 2023 has them
)
CIFAR100 = Cifar("uoft-cs/cifar100", "fine_label", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def digits(*, train_samples: int | None = None, test_samples: int | None = None) -> Data:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels, 16 grey levels: 1,437 to train, 360 to test.

    Needs no network. The split is random but fixed: the same for every run.
    """
    place = find_spec("sklearn")  # its file alone: importing scikit-learn takes a second
    assert place is not None
    assert place.origin is not None
    rows = np.loadtxt(Path(place.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    order = permutation(len(rows), derive_key("digits", "split"))
    images, labels = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    train = order[: limit("data.train_samples", train_samples, len(order) - DIGITS_TEST)]
    test = order[len(order) - DIGITS_TEST :][: limit("data.test_samples", test_samples, DIGITS_TEST)]
    mean, std, scale = (0.3054,), (0.3763,), 16.0
    return Data(
        ImageSplit(images[train], labels[train], mean, std, scale),
        ImageSplit(images[test], labels[test], mean, std, scale),
        DataShape((1, 8, 8), "float32", DIGITS_CLASSES),
    )


def cifar10(
    *,
    path: str | None = None,
    augment: str = "random",
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return CIFAR-10 from `path`, or from the hub without one.

    `path` is a folder that holds train*.parquet and test*.parquet at any depth, or one Parquet file, of which the last
    tenth is the test split. The columns are the hub's: `img` or `image` ({bytes, path}) and `label`. `augment` affects
    only training: crops and flips are `random`, new in each epoch (as in the paper), `fixed` for each sample, or
    `none`.
    """
    return _cifar(CIFAR10, path, augment, train_samples, test_samples)


def cifar100(
    *,
    path: str | None = None,
    augment: str = "random",
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return CIFAR-100 with its hundred fine labels, column `fine_label`; otherwise like `cifar10`."""
    return _cifar(CIFAR100, path, augment, train_samples, test_samples)


def _cifar(kind: Cifar, path: str | None, augment: str, train_samples: int | None, test_samples: int | None) -> Data:
    check_choice("data.augment", augment, ["random", "fixed", "none"])
    train, test = _read_folder(path, kind) if path is not None else _read_hub(kind)
    splits = []
    for (encoded, labels), wanted, field, style in (
        (train, train_samples, "data.train_samples", augment),
        (test, test_samples, "data.test_samples", "none"),
    ):
        count = limit(field, wanted, len(encoded))
        images = _decode(encoded[:count])
        splits.append(ImageSplit(images, _labels(labels[:count], kind), kind.mean, kind.std, augment=style))
    if splits[0].images.shape[1:] != splits[1].images.shape[1:]:
        sizes = [split.images.shape[2:] for split in splits]
        raise ValueError(f"Images to train and to test on must be of one size, but got {sizes[0]} and {sizes[1]}.")
    return Data(splits[0], splits[1], DataShape(splits[0].images.shape[1:], "float32", kind.num_classes))


Rows = tuple[list[bytes], list[int]]  # encoded images and their labels


def _read_folder(path: str, kind: Cifar) -> list[Rows]:
    parts = [
        _read(open_rows_of(files), kind)
        for files in split_files("data.path", check_path("data.path", path), (".parquet",))
    ]
    if len(parts) == 2:
        return parts
    images, labels = parts[0]
    cut = len(labels) - len(labels) // TEST_SHARE
    if cut == len(labels):
        raise ValueError(
            f"`data.path` must hold 10 images or more to test on a tenth, but {path!r} holds {len(labels)}."
        )
    return [(images[:cut], labels[:cut]), (images[cut:], labels[cut:])]


def _read_hub(kind: Cifar) -> list[Rows]:
    loaded = load_hub_set(kind.hub)
    return [_read(HubRows(f"{kind.hub}, split {split}", loaded[split]), kind) for split in ("train", "test")]


def _read(source: RowSource, kind: Cifar) -> Rows:
    schema = source.schema
    column = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
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


@dataclass(frozen=True)
class _Encoded:
    """Encoded images under `data.path`."""

    images: list[bytes]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> bytes:
        return self.images[index]

    def name(self, index: int) -> str:
        return f"number {index} under `data.path`"


def _decode(encoded: list[bytes]) -> NDArray[np.uint8]:
    """Return (sample, channel, height, width).

    In one thread: on images this small, threads that wait for each other's lock take longer than a single one.
    """
    images: NDArray[np.uint8] | None = None
    for index in range(len(encoded)):
        pixels = np.asarray(open_picture(_Encoded(encoded), index))
        if images is None:
            images = np.empty((len(encoded), *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            raise ValueError(
                f"Images under `data.path` must be of one size, but number {index} is {pixels.shape[:2]} "
                f"and the first {images.shape[1:3]}."
            )
        images[index] = pixels
    if images is None:
        raise ValueError("`data.path` must hold images, but has none.")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _labels(labels: list[int], kind: Cifar) -> NDArray[np.int64]:
    array = np.asarray(labels)
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= kind.num_classes:
        raise ValueError(f"Column `{kind.label}` must hold integers from 0 to {kind.num_classes - 1}.")
    return array.astype(np.int64)
