"""Read files completely, and refuse devices and pipes, which may never end; write them completely or not at all; lock folders."""

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

CACHE = "RAYSIM_CACHE"  # the environment variable that names another cache folder
LOCK = ".lock"  # the file by which one process at a time writes in a folder
LARGEST_BYTES = 64 * 2**20  # of a text: the profile of a run with thousands of actions has a hundredth of it


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
    """Return the folder of the cache: the value of the variable RAYSIM_CACHE, or ~/.cache/raysim."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "raysim")


def give_kernels_a_cache(package: Path) -> None:
    """Have numba cache compiled kernels in a temporary folder of this process if it can write neither to `package` nor to ~/.cache.

    It would refuse to import them: in a container whose root is read-only, for example. The processes that this one starts use
    the folder too. An existing NUMBA_CACHE_DIR is kept.
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
    """Return whether a path names a regular file. A malformed path, or one that is too long, names none.

    >>> is_file("x" * 100_000)
    False
    """
    try:
        return Path(path).is_file()
    except OSError:
        return False


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file beside its place, wait until it is on disk, and rename it into place: it is there whole or not at all.

    On return the file and its name survive a loss of power. Raises OSError with the file's name; the draft is removed, so that a
    full disk is no fuller than before.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # of no other process, and no link laid in its way
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
    """Wait until the names in a folder are on disk, or no longer there; raises OSError with the folder's name.

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
    """Make a folder with its parents, unless it exists, and wait until their names are on disk; raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


class FolderLock:
    """The file `.lock` in a folder, locked while a process writes there and removed when it is released.

    The system releases the lock of a killed process. `fcntl` is imported on use, so that runs can be read on systems without it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Make the folder and lock it, unless this lock is held already; never waits for another writer.

        Raises BlockingIOError if another process holds the lock, and OSError if the folder cannot be written.
        """
        while self._file is None:
            make_folder(self.folder)
            file = (self.folder / LOCK).open("w")
            try:
                _lock(file)
                if os.fstat(file.fileno()).st_nlink:  # else its last owner has removed it in the meantime
                    self._file = file
            finally:
                if self._file is None:
                    file.close()

    def release(self) -> None:
        """Remove the file and release the lock; does nothing if the lock is not held."""
        if self._file is not None:
            with suppress(OSError):  # a file that stays is locked by nobody
                if os.fstat(self._file.fileno()).st_nlink:  # else the file in its place is another's
                    (self.folder / LOCK).unlink()
            self._file.close()
            self._file = None


def is_locked(folder: Path) -> bool | None:
    """Return whether a process writes in a folder; None without a lock file, or on a system without such locks."""
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
    """Lock a file, after readers who look at it for a moment in `is_locked`; raises BlockingIOError if a writer holds it."""
    import fcntl

    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # possible beside readers, not beside a writer
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.01)


def os_sentence(error: OSError) -> str:
    """Return an error of the system in one sentence.

    >>> os_sentence(OSError(28, "No space left on device", "results/run.parquet"))
    "'results/run.parquet': No space left on device."
    """
    where = f"{shown(str(error.filename))}: " if error.filename else ""
    return f"{where}{(error.strerror or str(error)).rstrip('.')}."
