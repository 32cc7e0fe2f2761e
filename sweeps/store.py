"""Where a study's folder lies: on a path that all its machines see, or in a bucket that each copies to and from."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from raysim.config import ConfigError
from raysim.pipeline.checkpoint import checkpoints


class Store:
    """A study's folder by path or URI (`s3://`, `gs://`, `file://`): `local` is where to write.

    Of a URI, `local` is a scratch folder of this machine, and what is sent lies in the bucket as well.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = str(out)
        self.remote = "://" in self.out
        self._sent: dict[str, list[int]] = {}  # the step of the last checkpoint in the bucket, by run
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
        """Return the local folder of a run, as the bucket has it: another machine may have gone on with it since."""
        folder = self.local / name
        if self.remote and self._type(name) == fs.FileType.Directory:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            fs.copy_files(f"{self._root}/{name}", str(folder), source_filesystem=self._system)
            for step in folder.glob("checkpoints/step-*"):
                if not (
                    step / "manifest.json"
                ).is_file():  # sent last: of a copy that was broken off, or a folder left over
                    shutil.rmtree(step)
        return folder

    def send_run(self, name: str) -> None:
        """Copy a run that goes on, where it has a checkpoint that the bucket lacks."""
        if self.remote:
            newest = [one.step for one in checkpoints(self.local / name / "checkpoints")][-1:]
            if newest != self._sent.get(name, []):
                self.send(name)
                self._sent[name] = newest

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
