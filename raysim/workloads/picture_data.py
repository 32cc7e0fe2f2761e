"""Data sets of images: folders of class folders, or Parquet with encoded images, decoded when they are read."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch
from raysim.workloads.mapped_arrays import cached
from raysim.workloads.options import check_path, import_hub, reason_of
from raysim.workloads.row_files import RowSource, coded_labels, open_rows_of, split_files
from raysim.workloads.splits import Data, DataShape, augmented, normalise, split_rows

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as models trained on it have them


class Pictures(Protocol):
    """Encoded images, read one by one."""

    def __len__(self) -> int:
        """Return how many there are."""

    def read(self, index: int) -> bytes:
        """Return an encoded image; raises OSError."""

    def name(self, index: int) -> str:
        """Return the name of an image in messages: its path, or its file and row."""


@dataclass(frozen=True)
class _Files:
    """Images in separate files."""

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()

    def name(self, index: int) -> str:
        return self.paths[index]


@dataclass(frozen=True)
class _Encoded:
    """Images in the first column of a mapped Arrow file, which pickles as its path."""

    path: str
    count: int
    source: RowSource

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> bytes:
        found: bytes = _arrow_column(self.path)[index].as_py()
        return found

    def name(self, index: int) -> str:
        return f"in {self.source.row(index + 1)}"


@lru_cache(maxsize=4)
def _arrow_column(path: str) -> pa.ChunkedArray:
    return pa.ipc.open_file(pa.memory_map(path)).read_all().column(0)


@dataclass(frozen=True, eq=False)
class PictureSplit:
    """Selected `rows` of images, decoded, resized and normalised when they are read.

    Images are scaled until the shorter side fits `size`, then centre-cropped. Without `size`, all images must have the
    size of the first.
    """

    pictures: Pictures
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
        """Return the labels, (batch,)."""
        return torch.from_numpy(self.labels[self.rows[ids]])

    def _decode(self, row: int) -> NDArray[np.uint8]:
        image = open_picture(self.pictures, row)
        height, width = self.size
        if self.resize and image.size != (width, height):
            scale = max(height / image.height, width / image.width)
            image = image.resize((max(width, round(image.width * scale)), max(height, round(image.height * scale))))
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        if image.size != (width, height):
            raise ValueError(
                f"The image {self.pictures.name(row)} is {image.width}x{image.height}, but the first one is "
                f"{width}x{height}. Give all one size by `data.size`."
            )
        return np.asarray(image).transpose(2, 0, 1)


def open_picture(pictures: Pictures, index: int) -> Any:
    """Return a decoded image in RGB; raises ValueError naming it if it cannot be read."""
    image = import_hub("PIL.Image")
    try:
        return image.open(io.BytesIO(pictures.read(index))).convert("RGB")
    except Exception as error:  # decoders raise of all kinds
        reason = "it is in no known format" if "BytesIO" in str(error) else reason_of(error)
        raise ValueError(f"The image {pictures.name(index)} cannot be read: {reason}.") from None


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
    """Return the images of a folder with a folder for each class, or of Parquet files with encoded images.

    The folder may hold folders train and test (or val), each with the class folders, or files train*.parquet and
    test*.parquet; of anything else a tenth, drawn once and for all, is the test split. `size` (a number, or height and
    width) is the size to which images are scaled; without it all must have one size. `column` ("image" or "img" by
    default) and `label` are columns of Parquet. `augment` concerns training alone: crops and flips are `random` (new in
    each epoch), `fixed` for each sample, or `none`. Pixels are normalised by `mean` and `std` of each channel,
    ImageNet's by default.
    """
    options = PictureOptions(size, augment, mean, std, train_samples, test_samples)
    folder = check_path("data.path", path).absolute()  # workers may run in another folder
    if folder.is_file() or next(folder.rglob("*.parquet"), None) is not None:
        sources = [open_rows_of(files) for files in split_files("data.path", folder, (".parquet",))]
        return pictures_of(sources, column, label, options)
    return _make_data(*_class_folders(folder), options)


class PictureOptions(NamedTuple):
    """Options of `images` for any source of images."""

    size: int | list[int] | None
    augment: str
    mean: list[float] | None
    std: list[float] | None
    train_samples: int | None
    test_samples: int | None


def pictures_of(sources: Sequence[RowSource], column: str | None, label: str, options: PictureOptions) -> Data:
    """Return the images of rows; see `images`."""
    names = sources[0].schema.names
    column = column or next((name for name in ("image", "img") if name in names), "image")
    for source in sources:
        source.check_column("data.column", column)
        source.check_column("data.label", label)
    parts = [_encoded(source, column) for source in sources]
    labels, num_classes = coded_labels(sources, label, from_zero=True)
    return _make_data(parts, labels, num_classes, options)


def _make_data(
    parts: Sequence[Pictures], labels: Sequence[NDArray[np.int64]], num_classes: int, options: PictureOptions
) -> Data:
    """Return the splits of images and their class numbers, from two parts, or from a single part that is split here."""
    check_choice("data.augment", options.augment, ["random", "fixed", "none"])
    counts = [len(each) for each in labels]
    train, test = split_rows("pictures", counts, options.train_samples, options.test_samples)
    if len(parts) == 2:
        test = test - counts[0]
    size = _size(options.size, parts[0])
    mean, std = _channels("data.mean", options.mean, MEAN), _channels("data.std", options.std, STD)
    splits = [
        PictureSplit(parts[part], labels[part], rows, size, options.size is not None, mean, std, augment)
        for part, rows, augment in ((0, train, options.augment), (-1, test, "none"))
    ]
    return Data(splits[0], splits[1], DataShape((3, *size), "float32", num_classes))


def _size(size: int | list[int] | None, pictures: Pictures) -> tuple[int, int]:
    if size is None:
        first = open_picture(pictures, 0)
        return first.height, first.width
    if isinstance(size, (list, tuple)):
        if len(size) != 2:
            raise ValueError(f"`data.size` must be a number, or height and width, but got {size!r}.")
        return check_integer("data.size", size[0], 1), check_integer("data.size", size[1], 1)
    side = check_integer("data.size", size, 1)
    return side, side


def _channels(field: str, given: list[float] | None, usual: tuple[float, ...]) -> tuple[float, ...]:
    if given is None:
        return usual
    if not isinstance(given, (list, tuple)) or len(given) != 3 or not all(isinstance(x, (int, float)) for x in given):
        raise ValueError(f"`{field}` must be three numbers, one per channel, but got {given!r}.")
    return tuple(float(value) for value in given)


def _class_folders(folder: Path) -> tuple[list[Pictures], list[NDArray[np.int64]], int]:
    """Return the images of each split, their class numbers, and the number of classes."""
    splits = [folder]
    if (folder / "train").is_dir():
        test = next((folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()), None)
        if test is None:
            raise ValueError(f"`data.path` must hold a folder test or val beside train, but {str(folder)!r} does not.")
        splits = [folder / "train", test]
    names = sorted(each.name for each in splits[0].iterdir() if each.is_dir() and not each.name.startswith("."))
    if len(names) < 2:
        raise ValueError(
            f"`data.path` must hold a folder of images for each class, or Parquet files, but {str(splits[0])!r} holds "
            f"{len(names)} folders."
        )
    parts: list[Pictures] = []
    labels: list[NDArray[np.int64]] = []
    for split in splits:
        found = [(str(file), number) for number, name in enumerate(names) for file in _files(split / name)]
        if not found:
            raise ValueError(f"`data.path` must hold images ({', '.join(SUFFIXES)}), but {str(split)!r} has none.")
        paths, numbers = zip(*found, strict=True)
        parts.append(_Files(paths))
        labels.append(np.array(numbers, np.int64))
    return parts, labels, len(names)


def _files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)


def _encoded(source: RowSource, column: str) -> _Encoded:
    """Return the images of a column, copied once to a mapped Arrow file."""

    def write(place: Path) -> None:
        schema = pa.schema([(column, pa.binary())])
        with pa.OSFile(str(place), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            row = 0
            for batch in source.batches([column]):
                encoded = [
                    _bytes_of(value, row + place_in, source) for place_in, value in enumerate(batch[0].to_pylist())
                ]
                writer.write_batch(pa.record_batch([pa.array(encoded, pa.binary())], schema))
                row += batch.num_rows

    path = str(cached("pictures", source.files, [source.name, column], write, ".arrow"))
    return _Encoded(path, len(_arrow_column(path)), source)


def _bytes_of(value: Any, row: int, source: RowSource) -> bytes:
    """Return an encoded image as stored in files of the hub: bytes, or {bytes, path}."""
    if isinstance(value, dict):
        value = value.get("bytes") or (Path(value["path"]).read_bytes() if value.get("path") else None)
    if not isinstance(value, bytes):
        raise ValueError(f"There is no encoded image in {source.row(row + 1)}.")
    return value
