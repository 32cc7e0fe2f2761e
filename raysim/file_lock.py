"""The lock of a folder: one process at a time writes in it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from raysim.files import make_folder

NAME = ".lock"


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
            file = (self.folder / NAME).open("w")
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
                    (self.folder / NAME).unlink()
            self._file.close()
            self._file = None


def is_locked(folder: Path) -> bool | None:
    """Return whether a process writes in a folder; None without a lock file, or on a system without such locks."""
    try:
        with (folder / NAME).open() as file:
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
