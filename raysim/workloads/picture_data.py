"""Image data sets: folders of class folders, or Parquet with encoded images, decoded when they are read.

Augmentation is counter-based (`raysim.random.derive_key`), so a sample does not depend on its batch.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch
from raysim.random import derive_key
from raysim.workloads.labels import coded_labels
from raysim.workloads.options import check_path, import_hub, reason_of
from raysim.workloads.row_files import RowSource, open_splits
from raysim.workloads.splits import Data, DataShape, Wanted, cached, contents_of, split_rows

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
COLUMNS = ("image", "img")
AUGMENT = ("random", "fixed", "none")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as used by pretrained models
_SPLITS = ("train", "training", "test", "testing", "val", "valid", "validation", "dev")
_BITS_PER_SAMPLE = 258  # a tag of TIFF
PADDING = 4  # the largest shift of a random crop, in pixels


@dataclass(frozen=True)
class _Files:
    """Images in separate files."""

    paths: tuple[str, ...]

    def encoded(self, index: int) -> Path:
        return Path(self.paths[index])

    def name(self, index: int) -> str:
        return self.paths[index]

    def contents(self) -> Iterator[bytes]:
        return contents_of([Path(path) for path in self.paths])


@dataclass(frozen=True)
class _Encoded:
    """Images in the first column of a memory-mapped Arrow file, pickled as its path."""

    path: str
    source: RowSource

    def encoded(self, index: int) -> bytes:
        image: bytes = _arrow_column(self.path)[index].as_py()
        return image

    def name(self, index: int) -> str:
        return f"in {self.source.row(index + 1)}"

    def contents(self) -> Iterator[bytes]:
        return contents_of([Path(self.path)])


@lru_cache(maxsize=4)
def _arrow_column(path: str) -> pa.ChunkedArray:
    return pa.ipc.open_file(pa.memory_map(path)).read_all().column(0)


@dataclass(frozen=True, eq=False)
class PictureSplit:
    """Selected `rows` of images, decoded, resized and normalised when they are read.

    With `resize`, images are scaled until the shorter side fits `size`, then centre-cropped; otherwise all must have this
    size.
    """

    pictures: _Files | _Encoded
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]
    size: tuple[int, int]  # height, width
    resize: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str = "none"

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return (batch, 3, height, width) in float32; raises ValueError naming an image that cannot be read."""
        images = np.stack([self._decode(int(row)) for row in self.rows[ids]])
        return normalise(augmented(images, ids, epoch, key, self.augment if training else "none"), self.mean, self.std)

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.labels[self.rows[ids]])

    def _decode(self, row: int) -> NDArray[np.uint8]:
        image = open_picture(self.pictures.encoded(row), self.pictures.name(row))
        height, width = self.size
        if self.resize and image.size != (width, height):
            scale = max(height / image.height, width / image.width)
            image = image.resize((max(width, round(image.width * scale)), max(height, round(image.height * scale))))
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        if image.size != (width, height):
            raise ValueError(
                f"The image {self.pictures.name(row)} is {image.width}x{image.height}, but the first one is "
                f"{width}x{height}. Set `data.size` to resize all."
            )
        return np.asarray(image).transpose(2, 0, 1)


def open_picture(encoded: bytes | Path, name: str) -> Any:
    """Return a decoded image in RGB; raises ValueError naming it if it cannot be read."""
    image = import_hub("PIL.Image")
    try:
        content = encoded.read_bytes() if isinstance(encoded, Path) else encoded
        return _in_bytes(image.open(io.BytesIO(content))).convert("RGB")
    except Exception as error:  # decoders raise many types
        reason = "it is in no known format" if "BytesIO" in str(error) else reason_of(error)
        raise ValueError(f"The image {name} cannot be read: {reason}.") from None


def _in_bytes(image: Any) -> Any:
    """Reduce a 16-bit grey image to its high bytes, and return others unchanged; raises ValueError for 32 bits and floats.

    Pillow itself clips such values at 255.
    """
    of_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if of_16_bits:
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]  # TIFF may hold 12
        return import_hub("PIL.Image").fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(f"its pixels are {kind}, which have no range; save it with 8 or 16 bits")
    return image


def images(
    *,
    path: str,
    size: int | list[int] | None = None,
    augment: str = "none",
    column: str | None = None,
    label: str = "label",
    mean: list[float] | None = None,
    std: list[float] | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return images from a folder with one folder per class, or from Parquet files with encoded images.

    The folder may hold folders train and test (or val), each with the class folders, or files train*.parquet and
    test*.parquet. Otherwise a fixed random tenth is the test split. `size`: images are scaled to it (a number, or height
    and width); without it all must have the same size. `column` ("image" or "img" by default) and `label`: columns of
    Parquet files. `augment`: crops and flips in training are `random` (new in each epoch), `fixed` for each sample, or
    `none`. `mean` and `std`: pixels are normalised by these values per channel, ImageNet's by default.
    """
    options = PictureOptions(size, augment, mean, std, (train_samples, test_samples))
    folder = check_path("data.path", path).absolute()  # workers may run in another folder
    if folder.is_file() or next(folder.rglob("*.parquet"), None) is not None:
        return pictures_of(open_splits(folder, (".parquet",)), column, label, options)
    return _make_data(*_class_folders(folder), options)


class PictureOptions(NamedTuple):
    """The options of `images` that apply to any source of images."""

    size: int | list[int] | None
    augment: str
    mean: list[float] | None
    std: list[float] | None
    wanted: Wanted


def pictures_of(sources: Sequence[RowSource], column: str | None, label: str, options: PictureOptions) -> Data:
    """Return the image data set stored in rows; see `images`."""
    names = sources[0].schema.names
    column = column or next((name for name in COLUMNS if name in names), COLUMNS[0])
    for source in sources:
        source.check_column("data.column", column)
        source.check_column("data.label", label)
    parts = [_encoded(source, column) for source in sources]
    labels, num_classes = coded_labels(sources, label, from_zero=True)
    return _make_data(parts, labels, num_classes, options)


def _make_data(
    parts: Sequence[_Files | _Encoded], labels: Sequence[NDArray[np.int64]], num_classes: int, options: PictureOptions
) -> Data:
    """Return the data set of images and class numbers, from two parts or from one part to be split here."""
    check_choice("data.augment", options.augment, AUGMENT)
    counts = [len(numbers) for numbers in labels]
    train, test = split_rows("pictures", counts, options.wanted, np.concatenate(labels))
    if len(parts) == 2:
        test = test - counts[0]
    size = _size(options.size, parts[0])
    mean, std = _channels("data.mean", options.mean, MEAN), _channels("data.std", options.std, STD)
    splits = [
        PictureSplit(parts[part], labels[part], rows, size, options.size is not None, mean, std, augment)
        for part, rows, augment in ((0, train, options.augment), (-1, test, "none"))
    ]
    return Data(splits[0], splits[1], DataShape((3, *size), "float32", num_classes))


def _size(size: int | list[int] | None, pictures: _Files | _Encoded) -> tuple[int, int]:
    if size is None:
        first = open_picture(pictures.encoded(0), pictures.name(0))
        return first.height, first.width
    sides = size if isinstance(size, (list, tuple)) else [size, size]
    if len(sides) != 2:
        raise ValueError(f"`data.size` must be a number, or height and width, but got {size!r}.")
    return check_integer("data.size", sides[0], 1), check_integer("data.size", sides[1], 1)


def _channels(field: str, given: list[float] | None, usual: tuple[float, ...]) -> tuple[float, ...]:
    if given is None:
        return usual
    if not isinstance(given, (list, tuple)) or len(given) != 3 or not all(isinstance(x, (int, float)) for x in given):
        raise ValueError(f"`{field}` must be three numbers, one per channel, but got {given!r}.")
    return tuple(map(float, given))


def _class_folders(folder: Path) -> tuple[list[_Files], list[NDArray[np.int64]], int]:
    """Return the images of each split, their class numbers, and the number of classes."""
    splits = [folder]
    if (folder / "train").is_dir():
        test = next((folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()), None)
        if test is None:
            raise ValueError(f"`data.path` must hold a folder test or val next to train, but {str(folder)!r} does not.")
        splits = [folder / "train", test]
    names = sorted(each.name for each in splits[0].iterdir() if each.is_dir() and not each.name.startswith("."))
    if len(names) < 2:
        raise ValueError(
            f"`data.path` must hold a folder of images for each class, or Parquet files, but {str(splits[0])!r} holds "
            f"{len(names)} folders."
        )
    if {name.lower() for name in names} <= {*_SPLITS}:
        raise ValueError(
            f"`data.path` must hold folders train and test, or a folder for each class, but {str(splits[0])!r} holds "
            f"{', '.join(names)}, which look like splits. Rename them."
        )
    parts, labels = [], []
    for split in splits:
        other = sorted(
            each.name for each in split.iterdir() if each.is_dir() and each.name[0] != "." and each.name not in names
        )
        if other:
            raise ValueError(
                f"`data.path` must hold the same class folders for each split, but {str(split)!r} has {other[0]!r} and "
                f"{str(splits[0])!r} does not."
            )
        by_class = [
            sorted(file for file in (split / name).rglob("*") if file.suffix.lower() in SUFFIXES) for name in names
        ]
        parts.append(_Files(tuple(map(str, itertools.chain(*by_class)))))
        labels.append(np.repeat(np.arange(len(names)), [len(files) for files in by_class]))
        if not len(labels[-1]):
            raise ValueError(f"`data.path` must hold images ({', '.join(SUFFIXES)}), but {str(split)!r} has none.")
    return parts, labels, len(names)


def _encoded(source: RowSource, column: str) -> _Encoded:
    """Return the images of a column, copied once to a memory-mapped Arrow file."""

    def write(path: Path) -> None:
        schema = pa.schema([(column, pa.binary())])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            row = 0
            for batch in source.batches([column]):
                encoded = [_bytes_of(value, row + i, source) for i, value in enumerate(batch[0].to_pylist(), 1)]
                writer.write_batch(pa.record_batch([pa.array(encoded, pa.binary())], schema))
                row += batch.num_rows

    return _Encoded(str(cached("pictures", source.files, [source.name, column], write, ".arrow")), source)


def _bytes_of(value: Any, row: int, source: RowSource) -> bytes:
    """Return an encoded image from a hub file's value: bytes, or {bytes, path}."""
    if isinstance(value, dict):
        value = value.get("bytes") or (Path(value["path"]).read_bytes() if value.get("path") else None)
    if not isinstance(value, bytes):
        raise ValueError(f"There is no encoded image in {source.row(row)}.")
    return value


def normalise(
    images: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...], scale: float = 255.0
) -> Tensor:
    """Return (x / scale - mean) / std in float32; shape (batch, channel, height, width)."""
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return torch.from_numpy(images).float().div_(scale).sub_(means).div_(stds)


def augmented(images: NDArray[np.uint8], ids: NDArray[np.int64], epoch: int, key: int, style: str) -> NDArray[np.uint8]:
    """Crop and mirror images at random: again in each epoch (`random`), once for each id (`fixed`), or not (`none`)."""
    if style == "none":
        return images
    offsets = 2 * PADDING + 1
    key = derive_key(key, "augment", epoch if style == "random" else "fixed")
    ways = draws(ids, key) % np.uint64(2 * offsets * offsets)
    corner, mirrored = np.divmod(ways.astype(np.int64), 2)
    top, left = np.divmod(corner, offsets)
    padded = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    windows = sliding_window_view(padded, images.shape[2:], axis=(2, 3))  # (batch, channel, top, left, height, width)
    moved = windows[np.arange(len(ids)), :, top, left]
    flips = np.flatnonzero(mirrored)
    moved[flips] = moved[flips][..., ::-1]
    return moved


def draws(ids: NDArray[np.int64], key: int) -> NDArray[np.uint64]:
    """Return one random 64-bit number per sample, a function of `key` and its id: SplitMix64 at counter id + 1.

    >>> draws(np.array([3, 5]), key=1) == draws(np.array([5, 3]), key=1)[::-1]
    array([ True,  True])
    """
    z = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
