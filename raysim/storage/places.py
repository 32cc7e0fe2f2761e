"""Places of runs and studies: a local folder by its path, or one in a bucket by its URI, with the same interface.

A bucket's folder is listed once, when it is opened. Keys ending in a slash, which some clients leave behind for folders, are
ignored.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from raysim.notation import InputError
from raysim.storage.files import read_bytes

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
    """Return the local path of a text or a `file://` URI.

    >>> local_path("file:///tmp/my%20runs").as_posix()
    '/tmp/my runs'
    """
    text = str(where)
    return Path(unquote(urlsplit(text).path)) if text.startswith("file://") else Path(where)


def open_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Return a URI's file system and path; raises PlaceError if it does not answer within `LIMIT_S`."""
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
    system, path = fs.FileSystem.from_uri(uri)
    return system, path


class Pack(Protocol):
    """Many runs in one file per table, see `raysim.records.packs`."""

    def origin(self, key: str) -> Place:
        """Return the pack's file that holds the contents of a listed file."""
        ...

    def table(self, key: str) -> pa.Table:
        """Return the rows of a listed Parquet file."""
        ...


class Listing(NamedTuple):
    """Files as listed once: for each folder, the names of its folders and files."""

    home: str
    """The text before each key, such as `s3://` or the path of a folder."""
    system: fs.FileSystem | None
    folders: Mapping[str, tuple[set[str], set[str]]]
    pack: Pack | None = None
    """The pack with the contents of the files."""

    @classmethod
    def of(
        cls, home: str, system: fs.FileSystem | None, root: str, files: Iterable[str], pack: Pack | None = None
    ) -> Listing:
        """Build the listing of the folder `root` from the keys of all files below it."""
        folders: dict[str, tuple[set[str], set[str]]] = {}
        for file in files:
            folder, _, name = file.rpartition("/")
            folders.setdefault(folder, (set(), set()))[1].add(name)
            while folder not in (root, ""):
                folder, _, name = folder.rpartition("/")
                folders.setdefault(folder, (set(), set()))[0].add(name)
        return cls(home, system, folders, pack)


class ListedPath:
    """A file or folder in a listing, for example of a bucket, with the `pathlib.Path` methods needed to read a run."""

    def __init__(self, listing: Listing, key: str) -> None:
        self._listing = listing
        self.key = key

    @classmethod
    def open(cls, uri: str) -> ListedPath:
        """List a folder in a bucket; raises PlaceError if that fails."""
        system, root = open_system(uri)
        return cls.listed(f"{uri.partition('://')[0]}://", system, root.rstrip("/"))

    @classmethod
    def listed(cls, home: str, system: fs.FileSystem, root: str) -> ListedPath:
        """List the folder `root` of a file system; `home` as in `Listing`. Raises PlaceError if that fails."""
        try:
            infos = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        except OSError as error:
            raise PlaceError(f"{home}{root} cannot be listed: {' '.join(str(error).split())}.") from None
        files = [info.path for info in infos if info.type == fs.FileType.File]
        return cls(Listing.of(home, system, root, files), root)

    def above(self, file: str) -> Iterator[ListedPath]:
        """Yield the parent folders with a file of this name, bottom-up; each is listed again."""
        root = self.key
        while root := root.rpartition("/")[0]:
            try:
                info = self.system.get_file_info(f"{root}/{file}")
            except OSError:  # above the bucket, or beyond these credentials
                return
            if info.type == fs.FileType.File:
                yield self.listed(self._listing.home, self.system, root)

    def __str__(self) -> str:
        return f"{self._listing.home}{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"ListedPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListedPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> ListedPath:
        return ListedPath(self._listing, f"{self.key}/{name}" if self.key else name)

    @property
    def system(self) -> fs.FileSystem:
        """The file system of the key."""
        return self._listing.system

    @property
    def pack(self) -> Pack | None:
        """Its pack, or None."""
        return self._listing.pack

    @property
    def origin(self) -> Place:
        """The file with its contents: a file of the pack, or itself."""
        return self if self.pack is None else self.pack.origin(self.key)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ListedPath:
        """The folder that contains it."""
        return ListedPath(self._listing, self.key.rpartition("/")[0])

    def resolve(self) -> ListedPath:
        """Return itself: keys have no links and no dots."""
        return self

    def relative_to(self, root: Place | str) -> str:
        """Return the path relative to `root`."""
        return str(self).removeprefix(str(root)).lstrip("/")

    def is_dir(self) -> bool:
        """Return whether it is a folder with a file at any depth."""
        return self.key in self._listing.folders

    def is_file(self) -> bool:
        """Return whether it is a file."""
        parent, _, name = self.key.rpartition("/")
        return name in self._listing.folders.get(parent, ((), ()))[1]

    def glob(self, pattern: str) -> Iterator[ListedPath]:
        """Yield the matching files directly in this folder."""
        for name in sorted(self._listing.folders.get(self.key, ((), ()))[1]):
            if fnmatchcase(name, pattern):
                yield self / name

    def walk(self) -> Iterator[tuple[ListedPath, list[str], list[str]]]:
        """Yield this folder and all folders below it, like `os.walk`; a folder removed from the list is skipped."""
        folders, files = (sorted(names) for names in self._listing.folders.get(self.key, ((), ())))
        yield self, folders, files
        for name in folders:
            yield from (self / name).walk()

    def read_bytes(self, largest_bytes: int | None = None) -> bytes:
        """Return the contents of the file; raises OSError if it is larger than `largest_bytes`."""
        if self.pack is not None:
            return read_place(self.origin, largest_bytes)
        with self.system.open_input_stream(self.key) as stream:
            content = bytes(stream.read(None if largest_bytes is None else largest_bytes + 1))
        if largest_bytes is not None and len(content) > largest_bytes:
            raise OSError(errno.EFBIG, f"it has more than {largest_bytes:,} bytes", str(self))
        return content


Place: TypeAlias = Path | ListedPath


def open_place(where: str | Place) -> Place:
    """Open the folder at a path or URI; raises PlaceError if a bucket does not answer."""
    if isinstance(where, ListedPath):
        return where
    return ListedPath.open(str(where)) if in_bucket(where) else local_path(where)


def read_place(file: Place, largest_bytes: int | None = None) -> bytes:
    """Return the contents of a file; raises OSError as `storage.files.read_bytes`, also for one in a bucket or a pack."""
    if isinstance(file, Path):
        return read_bytes(file, largest_bytes)
    return file.read_bytes(largest_bytes)


def walk(folder: Place) -> Iterator[tuple[Place, list[str], list[str]]]:
    """Yield a folder and all folders below it with the names in each, like `os.walk`."""
    if isinstance(folder, ListedPath):
        yield from folder.walk()
    else:
        yield from ((Path(path), folders, files) for path, folders, files in os.walk(folder))


def arrow_source(file: Place) -> tuple[str, fs.FileSystem | None]:
    """Return a file's path and file system, the arguments of pyarrow's readers."""
    return (file.key, file.system) if isinstance(file, ListedPath) else (str(file), None)
