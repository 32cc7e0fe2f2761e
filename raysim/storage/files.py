"""Read files completely, refusing devices and pipes, which may never end; write files atomically; lock folders."""

from __future__ import annotations

import atexit
import errno
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from raysim.notation import shown

CACHE = "RAYSIM_CACHE"  # environment variable with the cache folder
LOCK = ".lock"  # file locked by the process that writes in a folder
LARGEST_BYTES = 64 * 2**20  # of a text: 100 times the profile of a run with thousands of actions


def read_text(path: str | Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the UTF-8 text of a regular file.

    Raises OSError, with the reason in `strerror`, if there is no such file, the path is malformed or names a device or a
    pipe, the file is larger than `largest_bytes`, or it is not UTF-8.
    """
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with file.open("rb") as stream:
            content = stream.read(largest_bytes + 1)
        if len(content) > largest_bytes:
            raise OSError(errno.EFBIG, f"it has more than {largest_bytes:,} bytes", str(path))
        return content.decode()
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "it holds no UTF-8 text", str(path)) from None
    except ValueError as error:  # a zero byte in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def cache_folder() -> Path:
    """Return the cache folder: the environment variable RAYSIM_CACHE, or ~/.cache/raysim."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "raysim")


def give_kernels_a_cache(package: Path) -> None:
    """Let numba cache compiled kernels in a temporary folder if neither `package` nor ~/.cache is writable.

    Otherwise numba refuses to import them, for example in a container with a read-only root. Child processes use the folder
    too. An existing NUMBA_CACHE_DIR is kept.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    existing = next((folder for folder in (user, *user.parents) if folder.exists()), user)
    if "NUMBA_CACHE_DIR" in os.environ or os.access(package, os.W_OK) or os.access(existing, os.W_OK):
        return
    with suppress(OSError):  # nothing can be written anywhere
        folder = tempfile.mkdtemp(prefix="raysim-kernels-")
        os.environ["NUMBA_CACHE_DIR"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def is_file(path: str | Path) -> bool:
    """Return whether a path names a regular file; False for a malformed or too long path.

    >>> is_file("x" * 100_000)
    False
    """
    try:
        return Path(path).is_file()
    except OSError:
        return False


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically: under a temporary name, synced to disk, then renamed.

    On return the file and its name survive a power loss. Raises OSError with the file's name; the draft is removed, so that a
    full disk is no fuller than before.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # no other process can guess it
    try:
        write_through(draft, data)
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_through(path: Path, data: bytes | memoryview) -> None:
    """Write a file, and wait until it is on disk; raises OSError with the file's name."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_folder(folder: Path) -> None:
    """Wait until added and removed names in a folder are on disk; raises OSError with the folder's name.

    Does nothing for folders that cannot be read, and on systems and filesystems that do not sync folders.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise OSError(error.errno, error.strerror, str(folder)) from None


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and wait until their names are on disk; raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


class FolderLock:
    """The file `.lock` in a folder: locked while a process writes there, and removed on release.

    The system releases the lock of a killed process. `fcntl` is imported on use, so that runs can be read on systems without it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Make the folder and lock it, unless this lock is already held; never waits for another writer.

        Raises BlockingIOError if another process holds the lock, and OSError if the folder cannot be written.
        """
        while self._file is None:
            make_folder(self.folder)
            file = (self.folder / LOCK).open("w")
            try:
                _lock(file)
                if os.fstat(file.fileno()).st_nlink:  # else its previous owner has just removed it
                    self._file = file
            finally:
                if self._file is None:
                    file.close()

    def release(self) -> None:
        """Remove the file and release the lock; does nothing if the lock is not held."""
        if self._file is not None:
            with suppress(OSError):  # a remaining file is not locked
                if os.fstat(self._file.fileno()).st_nlink:  # else the file there is another process's
                    (self.folder / LOCK).unlink()
            self._file.close()
            self._file = None


def is_locked(folder: Path) -> bool | None:
    """Return whether a process is writing in a folder; None without a lock file, or on a system without `fcntl`."""
    try:
        with (folder / LOCK).open() as file:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False if os.fstat(file.fileno()).st_nlink else None  # its owner has just removed it
    except BlockingIOError:
        return True
    except (OSError, ImportError):
        return None


def _lock(file: IO[str]) -> None:
    """Lock a file, waiting for brief readers in `is_locked`; raises BlockingIOError if a writer holds it."""
    import fcntl

    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # succeeds if only readers hold it
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.01)


def os_sentence(error: OSError) -> str:
    """Return a system error as one sentence.

    >>> os_sentence(OSError(28, "No space left on device", "results/run.parquet"))
    "'results/run.parquet': No space left on device."
    """
    where = f"{shown(str(error.filename))}: " if error.filename else ""
    return f"{where}{(error.strerror or str(error)).rstrip('.')}."
