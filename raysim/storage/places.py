"""Places of runs and studies: a local folder by its path, or one in a bucket by its URI, with the same interface."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from raysim.notation import InputError
from raysim.storage.files import expanded, read_bytes

if TYPE_CHECKING:
    import pyarrow as pa

LIMIT_S = 15.0  # for a bucket's first answer; some clients would retry for minutes

# Asks for the bucket in a separate process: clients without credentials may retry for minutes, or end their process.
_PROBE = """
import sys
from pyarrow import fs
try:
    system, path = fs.FileSystem.from_uri(sys.argv[1])
    bucket = path.strip("/").split("/")[0]
    info = system.get_file_info(bucket if system.type_name in ("s3", "gcs", "abfs") else "/")
    if info.type == fs.FileType.NotFound:
        sys.exit(f"there is no bucket {bucket!r}: make it first")
except Exception as error:
    sys.exit(" ".join(str(error).split()) or type(error).__name__)
"""


class PlaceError(InputError):
    """A place cannot be opened; one sentence with its URI and the reason."""


def in_bucket(where: str | Path) -> bool:
    """Return whether `where` is a URI of a file system outside this machine.

    >>> in_bucket("s3://bucket/runs"), in_bucket("file:///tmp/runs"), in_bucket("results")
    (True, False, False)
    """
    return "://" in str(where) and not str(where).startswith("file://")


def local_path(where: str | Path) -> Path:
    """Return the local path of a text or a `file://` URI, with its leading `~` expanded.

    >>> local_path("file:///tmp/my%20runs").as_posix()
    '/tmp/my runs'
    """
    text = str(where)
    return Path(unquote(urlsplit(text).path)) if text.startswith("file://") else expanded(where) or Path(where)


def check_answers(uri: str) -> None:
    """Raise PlaceError if a URI's file system does not answer within `LIMIT_S`, or has no such bucket."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, uri], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PlaceError(
            f"{uri} cannot be opened: no answer within {LIMIT_S:g} s. Check the network and the credentials."
        ) from None
    if probe.returncode:
        lines = [line.strip() for line in probe.stderr.splitlines() if line.strip()]
        reason = lines[-1] if probe.returncode == 1 and lines else "its client failed. Check the credentials"
        raise PlaceError(f"{uri} cannot be opened: {reason[:300].rstrip('.')}.")


class Listing:
    """A folder of a bucket, listed once: the names in each folder below it, with whether each is a file."""

    def __init__(self, home: str, root: str, files: Iterable[str], system: fs.FileSystem) -> None:
        """`home`: the text before each key, such as `s3://`; `root`: the key of the folder; `system`: None for packs."""
        self.home = home
        self.system = system
        self.folders: dict[str, dict[str, bool]] = {}
        for file in files:
            folder, _, name = file.rpartition("/")
            self.folders.setdefault(folder, {})[name] = True
            while folder not in (root, ""):
                folder, _, name = folder.rpartition("/")
                self.folders.setdefault(folder, {})[name] = False

    def origin(self, key: str) -> Place:
        """Return the file with the contents of a listed file: itself, except in packs."""
        return ListedPath(self.home, key, self)

    def rows(self, key: str) -> pa.Table | None:
        """Return the rows of a listed file that shares its file with other runs, as in packs; None for other files."""
        return None


@dataclass(frozen=True)
class ListedPath:
    """A file or folder in a listing, with the `pathlib.Path` methods needed to read a run."""

    home: str
    key: str
    listing: Listing = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.home}{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> ListedPath:
        return ListedPath(self.home, f"{self.key}/{name}" if self.key else name, self.listing)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ListedPath:
        """The folder that contains it."""
        return ListedPath(self.home, self.key.rpartition("/")[0], self.listing)

    def resolve(self) -> ListedPath:
        """Return itself: keys have no links and no dots."""
        return self

    def is_dir(self) -> bool:
        """Return whether it is a folder with a file at any depth."""
        return self.key in self.listing.folders

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return self.listing.folders.get(self.parent.key, {}).get(self.name, False)

    def iterdir(self) -> Iterator[ListedPath]:
        """Yield the files and folders directly in this folder, by name."""
        return (self / name for name in sorted(self.listing.folders.get(self.key, ())))

    def read_bytes(self, largest_bytes: int | None = None) -> bytes:
        """Return the contents of the file; raises OSError if it is larger than `largest_bytes`."""
        with self.listing.system.open_input_stream(self.key) as stream:
            content = bytes(stream.read(None if largest_bytes is None else largest_bytes + 1))
        if largest_bytes is not None and len(content) > largest_bytes:
            raise OSError(errno.EFBIG, f"it has more than {largest_bytes:,} bytes", str(self))
        return content


Place: TypeAlias = Path | ListedPath


def list_bucket(home: str, system: fs.FileSystem, root: str) -> ListedPath:
    """List the folder `root` of a file system; `home` as in `Listing`. Raises PlaceError if that fails.

    Keys ending in a slash, which some clients leave behind for folders, are ignored.
    """
    try:
        infos = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    except OSError as error:
        raise PlaceError(f"{home}{root} cannot be listed: {' '.join(str(error).split())}.") from None
    files = [info.path for info in infos if info.type == fs.FileType.File]
    return ListedPath(home, root, Listing(home, root, files, system))


def open_place(where: str | Place) -> Place:
    """Open the folder at a path or URI; raises PlaceError if a bucket does not answer."""
    if isinstance(where, ListedPath):
        return where
    if not in_bucket(where):
        return local_path(where)
    check_answers(str(where))
    system, root = fs.FileSystem.from_uri(str(where))
    return list_bucket(f"{str(where).partition('://')[0]}://", system, root.rstrip("/"))


def folders_above(folder: Place, file: str) -> Iterator[Place]:
    """Yield the folders around a folder that may hold a file of this name, bottom-up; a bucket's folders are listed again."""
    if isinstance(folder, Path):
        yield from folder.resolve().parents
        return
    system, root = folder.listing.system, folder.key
    while root := root.rpartition("/")[0]:
        try:
            if system.get_file_info(f"{root}/{file}").type == fs.FileType.File:
                yield list_bucket(folder.home, system, root)
        except OSError:  # above the bucket, or beyond these credentials
            return


def origin_of(file: Place) -> Place:
    """Return the file that holds a run's rows: its own, or the pack's file for a run in a pack."""
    return file if isinstance(file, Path) else file.listing.origin(file.key)


def read_place(file: Place, largest_bytes: int | None = None) -> bytes:
    """Return the contents of a file; raises OSError as `storage.files.read_bytes`, also for one in a bucket or a pack."""
    origin = origin_of(file)
    return read_bytes(origin, largest_bytes) if isinstance(origin, Path) else origin.read_bytes(largest_bytes)


def inside(place: Place, folder: Place) -> str:
    """Return the path of a place relative to a folder around it; empty for the folder itself."""
    return str(place.resolve()).removeprefix(str(folder.resolve())).strip("/")


def walk(folder: Place) -> Iterator[tuple[Place, list[str], list[str]]]:
    """Yield a folder and all folders below it with the names in each, like `os.walk`."""
    if isinstance(folder, Path):
        yield from ((Path(path), folders, files) for path, folders, files in os.walk(folder))
        return
    names = sorted(folder.listing.folders.get(folder.key, {}).items())
    folders = [name for name, is_file in names if not is_file]
    yield folder, folders, [name for name, is_file in names if is_file]
    for name in folders:
        yield from walk(folder / name)
