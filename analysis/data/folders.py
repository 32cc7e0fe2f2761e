"""Folders of runs and studies, at any depth, on this machine or in buckets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from analysis.data.errors import AnalysisError
from raysim.places import BucketPath, Place

CONFIRMATION = "confirm"
"""Name of the folder with runs that confirm a choice of other runs, in a study or any folder of runs."""


class Found(NamedTuple):
    """Contents of the folders: names relative to the folder asked for, and the place of each."""

    runs: dict[str, Place]
    studies: dict[str, Place]
    study_of: dict[str, str]
    """The study that a run belongs to, by name."""


def find(folders: Iterable[Place]) -> Found:
    """Return the runs and studies in folders, each once, in the order of their names.

    A folder with a `run.parquet` is a run, one with a `study.toml` is a study: its runs lie in its folder `trials`, and the
    study that confirms its choice in its folder `confirm`. Hidden folders are passed over. Raises AnalysisError where a folder
    does not exist.
    """
    roots = list(folders)
    runs: dict[Place, str] = {}
    studies: dict[Place, str] = {}
    study_of: dict[str, str] = {}
    for root in roots:
        if not root.is_dir():
            raise AnalysisError(f"There is no folder {root}.")
        for folder, study, is_run in _walk(root):
            name = _name(folder, root, alone=len(roots) == 1)
            place = folder.resolve()
            if place in runs or place in studies:
                continue
            if is_run:
                runs[place] = name
                if study is not None:
                    study_of[name] = _name(study, root, alone=len(roots) == 1)
            else:
                studies[place] = name
    return Found(_by_name(runs), _by_name(studies), study_of)


def is_confirmation(run: Place) -> bool:
    """Return whether a run's folder says that it confirms a choice.

    >>> is_confirmation(Path("study/confirm/trials/1-s5")), is_confirmation(Path("study/trials/1-s5"))
    (True, False)
    """
    parents = str(run.resolve()).split("/")[-3:-1]
    return parents[-1:] == [CONFIRMATION] or parents == [CONFIRMATION, "trials"]


def _walk(root: Place) -> Iterator[tuple[Place, Place | None, bool]]:
    """Yield the folders of runs and studies, each with the study that it lies in, and whether it is a run's."""
    inside: dict[Place, Place] = {}
    for folder, folders, files in _folders(root):
        study = inside.get(folder)
        if "run.parquet" in files:
            yield folder, study, True
            folders.clear()
            continue
        if "study.toml" in files:
            yield folder, None, False
            study = folder
            folders[:] = [name for name in folders if name in ("trials", CONFIRMATION)]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if study is not None:
            inside |= dict.fromkeys((folder / name for name in folders), study)


def _folders(root: Place) -> Iterator[tuple[Place, list[str], list[str]]]:
    if isinstance(root, BucketPath):
        yield from root.walk()
    else:
        yield from ((Path(path), folders, files) for path, folders, files in os.walk(root))


def _name(folder: Place, root: Place, *, alone: bool) -> str:
    """Return how a folder is called: by its way from the root, or by its own name where it is the root."""
    if not alone:
        return str(folder)
    if folder == root:
        return folder.resolve().name or str(folder)
    return folder.relative_to(root) if isinstance(folder, BucketPath) else str(folder.relative_to(str(root)))


def _by_name(folders: dict[Place, str]) -> dict[str, Place]:
    return dict(sorted((name, folder) for folder, name in folders.items()))
