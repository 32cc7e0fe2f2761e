"""Places of runs and studies: a folder by its path, or one in a bucket by its URI, read alike.

A bucket's folder is listed once, when it is opened: what follows reads files alone. Keys that end with a slash, which some
clients leave where a folder was, are not seen.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from pyarrow import fs

LIMIT_S = 15.0  # for the first answer of a bucket; some clients would try for minutes

# Asks for the bucket in a process of its own: clients without credentials may try for minutes, or end their process.
_PROBE = """
import sys
from pyarrow import fs
try:
    system, path = fs.FileSystem.from_uri(sys.argv[1])
    bucket = path.strip("/").split("/")[0]
    found = system.get_file_info(bucket if system.type_name in ("s3", "gcs", "abfs") else "/")
    if found.type == fs.FileType.NotFound:
        sys.exit(f"there is no bucket {bucket!r}: make it first")
except Exception as error:
    sys.exit(" ".join(str(error).split()) or type(error).__name__)
"""


class PlaceError(ValueError):
    """A place that cannot be opened: one sentence with its URI and the reason."""


def in_bucket(where: str | Path) -> bool:
    """Return whether `where` is a URI of another file system than this machine's.

    >>> in_bucket("s3://bucket/runs"), in_bucket("file:///tmp/runs"), in_bucket("results")
    (True, False, False)
    """
    return "://" in str(where) and not str(where).startswith("file://")


def local_path(where: str | Path) -> Path:
    """Return the path that a text or a `file://` URI names.

    >>> local_path("file:///tmp/my%20runs").as_posix()
    '/tmp/my runs'
    """
    text = str(where)
    return Path(unquote(urlsplit(text).path)) if text.startswith("file://") else Path(where)


def open_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a URI, and the path in it; raises PlaceError where it does not answer within `LIMIT_S`."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE, uri], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PlaceError(
            f"{uri} cannot be opened: no answer within {LIMIT_S:g} s. Check the network and the credentials."
        ) from None
    if asked.returncode:
        lines = [line.strip() for line in asked.stderr.splitlines() if line.strip()]
        reason = lines[-1] if asked.returncode == 1 and lines else "its client failed. Check the credentials"
        raise PlaceError(f"{uri} cannot be opened: {reason[:300].rstrip('.')}.")
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(uri)
    return found


class _Listing(NamedTuple):
    """A folder of a bucket as it was listed: by folder, the names of the folders and of the files in it."""

    scheme: str
    system: fs.FileSystem
    folders: Mapping[str, tuple[set[str], set[str]]]


class BucketPath:
    """A file or folder in a bucket, with the methods of `pathlib.Path` that reading a run needs."""

    def __init__(self, listing: _Listing, key: str) -> None:
        self._listing = listing
        self.key = key

    @classmethod
    def open(cls, uri: str) -> BucketPath:
        """List a folder; raises PlaceError where that cannot be done."""
        system, root = open_system(uri)
        root = root.rstrip("/")
        folders: dict[str, tuple[set[str], set[str]]] = {}
        try:
            infos = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        except OSError as error:
            raise PlaceError(f"{uri} cannot be listed: {' '.join(str(error).split())}.") from None
        for info in infos:
            if info.type == fs.FileType.File:
                _note(folders, root, info.path)
        return cls(_Listing(uri.partition("://")[0], system, folders), root)

    def __str__(self) -> str:
        return f"{self._listing.scheme}://{self.key}"

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(self._listing, f"{self.key}/{name}")

    @property
    def system(self) -> fs.FileSystem:
        """The file system that the key is of."""
        return self._listing.system

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The folder that it lies in."""
        return BucketPath(self._listing, self.key.rpartition("/")[0])

    def resolve(self) -> BucketPath:
        """Return itself: keys have no links and no dots."""
        return self

    def relative_to(self, root: Place) -> str:
        """Return the part of the URI that follows the URI of `root`."""
        return str(self).removeprefix(str(root)).lstrip("/")

    def is_dir(self) -> bool:
        """Return whether a file lies in it, at any depth."""
        return self.key in self._listing.folders

    def is_file(self) -> bool:
        """Return whether it is a file."""
        parent, _, name = self.key.rpartition("/")
        return name in self._listing.folders.get(parent, ((), ()))[1]

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Yield the files in this folder itself whose names match."""
        for name in sorted(self._listing.folders.get(self.key, ((), ()))[1]):
            if fnmatchcase(name, pattern):
                yield self / name

    def walk(self) -> Iterator[tuple[BucketPath, list[str], list[str]]]:
        """Yield this folder and all folders in it, as `os.walk` does: a folder that the caller removes from the list is skipped."""
        folders, files = (sorted(names) for names in self._listing.folders.get(self.key, ((), ())))
        yield self, folders, files
        for name in folders:
            yield from (self / name).walk()

    def read_bytes(self) -> bytes:
        """Return the contents of the file."""
        with self.system.open_input_stream(self.key) as stream:
            content: bytes = stream.read()
        return content

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the contents of the file as text."""
        return self.read_bytes().decode(encoding)


Place: TypeAlias = Path | BucketPath


def open_place(where: str | Place) -> Place:
    """Return the folder that a path or a URI names; raises PlaceError where a bucket does not answer."""
    if isinstance(where, BucketPath):
        return where
    return BucketPath.open(str(where)) if in_bucket(where) else local_path(where)


def arrow_source(file: Place) -> tuple[str, fs.FileSystem | None]:
    """Return a file as pyarrow's readers take it: its path, and its file system."""
    return (file.key, file.system) if isinstance(file, BucketPath) else (str(file), None)


def _note(folders: dict[str, tuple[set[str], set[str]]], root: str, key: str) -> None:
    """Add a file to the folders between it and the root."""
    folder, _, name = key.rpartition("/")
    folders.setdefault(folder, (set(), set()))[1].add(name)
    while folder not in (root, ""):
        parent, _, name = folder.rpartition("/")
        above = folders.setdefault(parent, (set(), set()))[0]
        if name in above:
            return
        above.add(name)
        folder = parent
