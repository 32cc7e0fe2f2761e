"""Where a study's folder lies: on a path that all its machines see, or in a bucket that each copies to and from."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from raysim.config import ConfigError


class Store:
    """A study's folder by path or URI (`s3://`, `gs://`, `file://`): `local` is where to write.

    Of a URI, `local` is a scratch folder of this machine, and what is sent lies in the bucket as well.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = str(out)
        self.remote = "://" in self.out
        if not self.remote:
            self.local = Path(self.out)
            return
        try:
            self._system, self._root = fs.FileSystem.from_uri(self.out)
        except (pa.ArrowInvalid, OSError, ValueError) as error:
            raise ConfigError(
                f"`out` must be a folder or a URI that pyarrow knows, but {self.out!r} is none: {error}."
            ) from None
        digest = hashlib.sha256(self.out.encode()).hexdigest()[:12]
        self.local = Path(tempfile.gettempdir()) / "raysim-sweeps" / digest

    def fetch(self, name: str) -> Path:
        """Return the local folder of a run, with what the bucket has of it where nothing is here yet."""
        folder = self.local / name
        if self.remote and not folder.is_dir() and self._type(name) == fs.FileType.Directory:
            draft = folder.with_name(f".{folder.name}")  # whole or not at all: a part of a run is none
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            fs.copy_files(f"{self._root}/{name}", str(draft), source_filesystem=self._system)
            draft.rename(folder)
        return folder

    def fetch_file(self, name: str) -> bool:
        """Bring a file of the bucket here, over what is here; return whether there is one."""
        if not self.remote or self._type(name) != fs.FileType.File:
            return (self.local / name).is_file()
        self.local.mkdir(parents=True, exist_ok=True)
        fs.copy_files(f"{self._root}/{name}", str(self.local / name), source_filesystem=self._system)
        return True

    def send(self, name: str) -> None:
        """Copy a file, or what is in a folder, to the bucket; what is gone here goes there."""
        if not self.remote:
            return
        source, target = self.local / name, f"{self._root}/{name}"
        if source.is_file():
            self._system.create_dir(target.rpartition("/")[0], recursive=True)
            fs.copy_files(str(source), target, destination_filesystem=self._system)
            return
        here = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.name != ".lock"}
        self._system.create_dir(target, recursive=True)
        for file in sorted(here, key=lambda file: file.endswith(("run.parquet", "manifest.json"))):
            there = f"{target}/{file}"
            self._system.create_dir(there.rpartition("/")[0], recursive=True)
            fs.copy_files(str(source / file), there, destination_filesystem=self._system)
        for info in self._system.get_file_info(fs.FileSelector(target, recursive=True, allow_not_found=True)):
            if info.type == fs.FileType.File and info.path.removeprefix(target).lstrip("/") not in here:
                self._system.delete_file(info.path)

    def is_empty(self) -> bool:
        """Return whether nothing is there yet."""
        if self.remote:
            return not self._system.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        return not self.local.is_dir() or not any(self.local.iterdir())

    def _type(self, name: str) -> fs.FileType:
        return self._system.get_file_info(f"{self._root}/{name}").type
