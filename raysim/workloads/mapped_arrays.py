"""Arrays that may be larger than memory: written once to a cache folder, mapped from there, and read by row.

Small arrays are held in memory and sent to workers whole. Large arrays are sent as a path, so on a cluster the cache
folder must be one that all nodes share.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.storage.files import CACHE, cache_folder

IN_MEMORY = 2**28  # bytes up to which an array is read into memory


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
        return self._array[np.asarray(index) + self.start]

    @property
    def _array(self) -> NDArray[Any]:
        found = _OPEN.get(self.path)
        if found is None:
            try:
                found = np.load(self.path, mmap_mode="r")
            except OSError as error:
                raise ValueError(
                    f"The array {self.path} cannot be read ({error.strerror or error}). "
                    f"All nodes must share the folder that {CACHE} names."
                ) from None
            _OPEN[self.path] = found
        return found


_OPEN: dict[str, NDArray[Any]] = {}
Rows = NDArray[Any] | Mapped


def cached(kind: str, files: Iterable[Path], options: object, write: Callable[[Path], None], suffix: str) -> Path:
    """Return the cache file that `write` makes from some files, rewritten if the files or the options have changed."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([kind, stats, options], sort_keys=True, default=str).encode()).hexdigest()[:24]
    path = cache_folder() / f"{kind}-{key}{suffix}"
    if not path.exists():
        with _draft(path) as draft:
            write(draft)
    return path


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`: renamed to it on success, removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def open_rows(path: Path) -> Rows:
    """Return the array of a .npy file: in memory if small, else mapped."""
    if path.stat().st_size <= IN_MEMORY:
        return np.load(path)  # type: ignore[no-any-return]
    return Mapped(str(path), 0, len(np.load(path, mmap_mode="r")))


def write_parts(path: Path, parts: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> None:
    """Write flat arrays after each other as one .npy file, one in memory at a time."""
    raw = path.with_name(f"{path.name}.raw")
    total = 0
    try:
        with raw.open("wb") as file:
            for part in parts:
                file.write(np.ascontiguousarray(part, dtype).tobytes())
                total += len(part)
        with path.open("wb") as file:
            np.lib.format.write_array_header_2_0(
                file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (total,)}
            )
            with raw.open("rb") as source:
                while block := source.read(2**24):
                    file.write(block)
    finally:
        raw.unlink(missing_ok=True)


def new_rows(path: Path, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Return an array of a new .npy file, to be filled."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=tuple(shape))
