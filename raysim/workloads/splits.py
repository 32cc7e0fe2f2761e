"""Data sets: two splits of samples in arrays, read by id, and the order of samples in training.

Splits pickle without copying their arrays, which may be read-only after unpickling. The order of samples depends on the seed and
the step alone, so a resumed run sees the same samples; it is drawn from Philox, whose bits are the same in every version of numpy.

Arrays read from files are written once to a cache folder. Small ones are read into memory and sent to workers whole. Large ones
are memory-mapped and sent as a path, so on a cluster all nodes must share the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from raysim.notation import check_integer
from raysim.random import derive_key
from raysim.storage.files import CACHE, cache_folder

if TYPE_CHECKING:
    from torch import Tensor

IN_MEMORY = 2**28  # arrays up to this many bytes are read into memory
_AT_ONCE = 2**16  # rows of a mapped array read at once
TEST_SHARE = 10  # one in this many samples is a test sample, if the data have no test split

Wanted = tuple[int | None, int | None]  # numbers of training and test samples; None for all of a split


class DataShape(NamedTuple):
    """Shapes and dtypes of one sample, and the number of classes, for models, losses and metrics."""

    input_shape: tuple[int, ...]  # (channel, height, width), (length,) or (features,)
    input_dtype: str  # "float32" or "int64"
    num_classes: int  # or, if targets are numbers, how many per sample or position
    target_shape: tuple[int, ...] = ()  # () for one class, (length,) for a class a token, (..., k) for k numbers
    target_dtype: str = "int64"  # "int64" for classes, "float32" for numbers
    target_scale: tuple[float, ...] = ()  # factors that convert numeric targets back to their original units
    num_tokens: int = 0  # vocabulary size of the inputs; if 0, it is `num_classes`, or inputs are not tokens
    padding: int | None = None  # the token that fills up short inputs
    separator: int | None = (
        None  # the token that ends the first of two texts, if the tokenizer numbers the texts of tokens
    )
    has_ignored: bool = False  # whether ignored targets (-100) may occur
    given: int = 0  # leading targets that belong to the prompt, and are never generated

    @property
    def classifies(self) -> bool:
        """True if targets are classes, not numbers."""
        return self.target_dtype == "int64"


class Split(Protocol):
    """Samples 0..len-1, read in batches."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return the inputs of the samples `ids`; `epoch` and `key` seed the augmentation, used in training only."""

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the targets of the samples `ids`, of the shape and dtype in `DataShape`."""


class Data(NamedTuple):
    """A data set: the training samples, the test samples, and the shape of both."""

    train: Split
    test: Split
    shape: DataShape


def limits(wanted: Wanted, available: Sequence[int]) -> tuple[int, int]:
    """Return the number of samples to take from each split; raises ValueError for more than it has."""
    for name, number, most in zip(("train", "test"), wanted, available, strict=True):
        if number is not None and check_integer(f"data.{name}_samples", number, 1) > most:
            raise ValueError(f"`data.{name}_samples` must be at most the number of samples ({most}), but got {number}.")
    train, test = (most if number is None else int(number) for number, most in zip(wanted, available, strict=True))
    return train, test


def split_rows(
    kind: str, counts: Sequence[int], wanted: Wanted, classes: Rows | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the training and the test rows, up to the wanted numbers of each.

    `counts`: numbers of rows in the training and the test part, indexed consecutively. From a single part, a tenth
    becomes the test split, drawn from `kind` alone and so the same in every run. Of fewer rows than there are, the first are taken, or
    evenly spread ones if `classes` of all rows are sorted. Raises ValueError if there are too few rows.
    """
    if len(counts) == 2:
        train, test = np.arange(counts[0]), np.arange(counts[0], sum(counts))
    else:
        count = counts[0]
        if count < 2:
            raise ValueError(f"`data.path` must hold 2 samples or more, to train and to test on, but holds {count}.")
        order, num_test = permutation(count, derive_key(kind, "split")), max(1, count // TEST_SHARE)
        train, test = np.sort(order[num_test:]), np.sort(order[:num_test])
    num_train, num_test = limits(wanted, (len(train), len(test)))
    return _limited(train, num_train, classes), _limited(test, num_test, classes)


def _limited(rows: NDArray[np.int64], number: int, classes: Rows | None) -> NDArray[np.int64]:
    if classes is not None and number < len(rows) and are_sorted(classes[rows]):
        return rows[np.arange(number) * len(rows) // number]
    return rows[:number]


def are_sorted(classes: NDArray[Any]) -> bool:
    """Return whether samples of each of several classes follow one another, so that the first ones are not like all."""
    return bool(np.count_nonzero(classes[1:] != classes[:-1]) == len(np.unique(classes)) - 1 > 0)


def permutation(count: int, key: int) -> NDArray[np.int64]:
    """Return a random permutation of 0..count-1: the order of `count` 64-bit numbers drawn with `key`.

    >>> permutation(5, 0)
    array([0, 2, 1, 4, 3])
    """
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return the number of whole batches in an epoch; raises ValueError if there is none.

    >>> steps_per_epoch(50_000, 128)
    390
    """
    if not 1 <= batch_size <= num_samples:
        raise ValueError(
            f"`batch_size` must be from 1 to the number of training samples ({num_samples}), but got {batch_size}."
        )
    return num_samples // batch_size


def batch_ids(num_samples: int, batch_size: int, seed: int, step: int) -> tuple[int, NDArray[np.int64]]:
    """Return the epoch of `step` (from 0) and its sample ids; an incomplete last batch of an epoch is dropped.

    >>> epoch, ids = batch_ids(10, 4, seed=0, step=2)
    >>> epoch, ids.tolist()
    (1, [1, 0, 5, 3])
    """
    epoch, batch = divmod(step, steps_per_epoch(num_samples, batch_size))
    return epoch, _epoch_order(num_samples, seed, epoch)[batch * batch_size : (batch + 1) * batch_size].copy()


@lru_cache(maxsize=2)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permutation(num_samples, derive_key(seed, "order", epoch))


@dataclass(frozen=True, eq=False)
class Mapped:
    """Rows `start` to `stop` of an array in a .npy file, pickled as its path. Raises ValueError if the file is gone.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "x.npy"
    >>> np.save(path, np.arange(10))
    >>> Mapped(str(path), 2, 10)[np.array([0, 3])], len(Mapped(str(path), 2, 10)[:3])
    (array([2, 5]), 3)
    """

    path: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return Mapped(self.path, self.start + start, self.start + max(start, stop))
        return _mapped(self.path)[np.asarray(index) + self.start]


@cache
def _mapped(path: str) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    except OSError as error:
        raise ValueError(
            f"The array {path} cannot be read ({error.strerror or error}). "
            f"All nodes must share the folder that {CACHE} names."
        ) from None


Rows = NDArray[Any] | Mapped


def digest_of(data: Data) -> str:
    """Return the SHA-256 of the arrays of both splits, and of the `contents` of other objects.

    Covers the targets of a user's own data set if they are read once, not its inputs, which may be augmented at random.
    """
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        digest.update(f"{len(split)};".encode())
        for part in _contents(split):
            digest.update(part)
    return digest.hexdigest()


def _contents(value: object) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str}{value.shape};".encode()
        yield np.ascontiguousarray(value).data.cast("B") if value.size else b""
    elif isinstance(value, Mapped):
        for start in range(0, len(value), _AT_ONCE):
            yield from _contents(value[np.arange(start, min(start + _AT_ONCE, len(value)))])
    elif hasattr(value, "contents"):
        yield from value.contents()
    elif is_dataclass(value):
        for field in fields(value):
            yield from _contents(getattr(value, field.name))


def contents_of(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the sizes of files, and their bytes if they have up to `IN_MEMORY` in all."""
    sizes = [file.stat().st_size for file in files]
    yield f"{sizes};".encode()
    if sum(sizes) <= IN_MEMORY:
        yield from (file.read_bytes() for file in files)


def cached(kind: str, files: Iterable[Path], options: object, write: Callable[[Path], None], suffix: str) -> Path:
    """Return a cache file derived from some files; `write` makes it again if the files or the options have changed."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([kind, stats, options], sort_keys=True, default=str).encode()).hexdigest()[:24]
    path = cache_folder() / f"{kind}-{key}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
        try:
            write(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


def cached_rows(kind: str, files: Iterable[Path], options: object, write: Callable[[Path], None]) -> Rows:
    """Return the array in a cached .npy file, see `cached`: in memory if small, else memory-mapped."""
    path = cached(kind, files, options, write, ".npy")
    if path.stat().st_size <= IN_MEMORY:
        return np.load(path)  # type: ignore[no-any-return]
    return Mapped(str(path), 0, len(np.load(path, mmap_mode="r")))


def write_parts(path: Path, parts: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> None:
    """Write the concatenation of flat arrays as a .npy file, with one array in memory at a time."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    total = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_2_0(file, {**header, "shape": (total,)})
        start = file.tell()
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype).tobytes())
            total += len(part)
        file.seek(0)
        np.lib.format.write_array_header_2_0(file, {**header, "shape": (total,)})
        assert file.tell() == start, "numpy pads headers, so that the number of rows may change in place"
