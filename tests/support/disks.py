"""Small disks of memory (Linux, root), which fill up or become read-only while they are written."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoDiskError(Exception):
    """No disk can be mounted here."""


class SmallDisk:
    """A disk of `kibibytes`, mounted at a folder until the block ends; raises NoDiskError where that is not allowed."""

    def __init__(self, folder: Path, kibibytes: int) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
        if subprocess.run(words, check=False, capture_output=True).returncode:
            raise NoDiskError(f"no disk can be mounted at {folder}")

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def resize(self, size: str) -> None:
        """Give the disk another size, such as "64m"."""
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Let nothing be written until the block ends, but into files that are open already."""
        subprocess.run(["mount", "--bind", str(self.folder), str(self.folder)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(self.folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
