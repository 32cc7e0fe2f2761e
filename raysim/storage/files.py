"""Read regular files only, since devices and pipes may never end; write files atomically and never through links; lock folders."""

from __future__ import annotations

import atexit
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from raysim.notation import shown

CACHE = "RAYSIM_CACHE"  # environment variable with the cache folder
LOCK = ".lock"  # file locked by the process that writes in a folder
LARGEST_BYTES = 64 * 2**20  # of a text: 100 times the profile of a run with thousands of actions
_AT_ONCE = sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)  # never waits for a pipe's other end
_LINK = "it is a link, and nothing is written through links: remove it, or name the file or folder itself"


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading; never waits for a pipe.

    Raises OSError, with the reason in `strerror`, if there is no such file, the path is malformed or names anything else.
    """
    try:
        _check_regular(Path(path).stat(), path)  # opening a device may already act on it
        descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    except ValueError as error:  # a zero byte in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        _check_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_bytes(path: str | Path, largest_bytes: int | None = None) -> bytes:
    """Return the contents of a regular file; raises OSError as `open_regular`, and if it is larger than `largest_bytes`."""
    with open_regular(path) as file:
        content = file.read(-1 if largest_bytes is None else largest_bytes + 1)
    if largest_bytes is not None and len(content) > largest_bytes:
        raise OSError(errno.EFBIG, f"it has more than {largest_bytes:,} bytes", str(path))
    return content


def read_text(path: str | Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the UTF-8 text of a regular file; raises OSError as `read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(path, largest_bytes).decode()
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "it holds no UTF-8 text", str(path)) from None


def cache_folder() -> Path:
    """Return the cache folder: the environment variable RAYSIM_CACHE, or ~/.cache/raysim.

    For a user without a home, such as a container's numeric one, it is a private folder for temporary files.
    """
    own = os.environ.get(CACHE)
    if own:
        return Path(own)
    home = expanded("~")
    return home / ".cache" / "raysim" if home is not None else private_folder("cache")


def expanded(path: str | Path) -> Path | None:
    """Return a path with its leading `~` or `~user` expanded; None for a user without a home.

    >>> expanded("~no-such-user/x") is None, expanded("a/b").as_posix()
    (True, 'a/b')
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return None


def private_folder(name: str) -> Path:
    """Return a folder for temporary files that only this user can enter, shared by the user's processes on this machine.

    Raises OSError if somebody else has made the folder around it.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    top = Path(tempfile.gettempdir()) / f"raysim-{user}"
    with suppress(FileExistsError):
        top.mkdir(mode=0o700, parents=True)
    status = top.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "it is not this user's own private folder: set TMPDIR to another one", str(top))
    return top / name


def give_kernels_a_cache(package: Path) -> None:
    """Let numba cache compiled kernels in a temporary folder if neither `package` nor ~/.cache is writable.

    Otherwise numba refuses to import them, for example in a container with a read-only root. Child processes use the folder
    too. An existing NUMBA_CACHE_DIR is kept.
    """
    user = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folders = () if user is None else (user, *user.parents)
    existing = next((folder for folder in folders if folder.exists()), package)
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
    """Write a file atomically: under a temporary name, synced to disk, then renamed; a link at `path` is replaced.

    On return the file and its name survive a power loss. Raises OSError with the file's name; the draft is removed, so that a
    full disk is no fuller than before.
    """
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is written as by `write_whole`, piece by piece; nothing is left if the block raises."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # no other process can guess it
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except Exception as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that the user has named for output: a device or a pipe as it is, any other file as `whole_file`.

    Raises OSError for a link to a file, and for a pipe that nobody reads.
    """
    if is_stream(path):
        descriptor = os.open(path, os.O_WRONLY | _AT_ONCE)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        return
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))
    with whole_file(path) as file:
        yield file


def is_stream(path: Path) -> bool:
    """Return whether a path names a device or a pipe, such as /dev/stdout in a pipeline."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def write_through(path: Path, data: bytes | memoryview) -> None:
    """Write a new file, and wait until it is on disk; raises OSError with the file's name, also if it exists."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_inside(path: Path, folder: Path) -> None:
    """Raise OSError if `path`, or a folder between it and `folder`, is a link, through which writing would leave `folder`."""
    for part in (path, *path.parents):
        if part == folder:
            return
        if part.is_symlink():
            raise OSError(errno.ELOOP, _LINK, str(part))


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
        self._file: IO[bytes] | None = None

    def acquire(self) -> None:
        """Make the folder and lock it, unless this lock is already held; never waits for another writer.

        Raises BlockingIOError if another process holds the lock, and OSError if the folder cannot be written.
        """
        while self._file is None:
            make_folder(self.folder)
            file = _open_lock(self.folder / LOCK)
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
        with open_regular(folder / LOCK) as file:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False if os.fstat(file.fileno()).st_nlink else None  # its owner has just removed it
    except BlockingIOError:
        return True
    except (OSError, ImportError):
        return None


def _open_lock(path: Path) -> IO[bytes]:
    """Open the file of a lock, made if missing: its contents are left alone, since a link may have been planted there."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | _AT_ONCE, 0o666)
    except OSError as error:
        reason = _LINK if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, reason, str(path)) from None
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        file.close()
        raise
    return file


def _lock(file: IO[bytes]) -> None:
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
