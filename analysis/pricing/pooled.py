"""Runs priced together: all runs of a job share one price for each kind of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.analysis.data import AnalysisError, ReplayError
from raysim.analysis.data.folders import find
from raysim.analysis.data.jobs import Job, job_of
from raysim.analysis.data.recording import Recording
from raysim.analysis.pricing.job_costs import Costs
from raysim.analysis.pricing.step import Replay
from raysim.network.profile import Profile
from raysim.records import FINISHED, Run
from raysim.records.packs import open_folder
from raysim.storage.places import ListedPath, Place, PlaceError


def in_company(
    runs: Iterable[Run | Place | str],
    *,
    compute: str = "auto",
    profile: Profile | Path | str | None = None,
    **options: Any,
) -> list[Replay]:
    """Return runs ready to be priced; runs of one job share one price for each kind of work.

    `options`: keyword arguments of `Replay`. Raises ReplayError if one of the runs cannot be priced.
    """
    recordings = [Recording(run, clock=compute) for run in runs]
    return _replays(recordings, recordings, profile, options)


def beside(
    runs: Sequence[Run | Place | str],
    folder: Place | str | None = None,
    *,
    most: int | None = None,
    compute: str = "auto",
    profile: Profile | Path | str | None = None,
    **options: Any,
) -> list[Replay]:
    """Return runs ready to be priced with the costs of all finished runs of their jobs in `folder`.

    `folder` defaults to the parent folder of the first run, such as a study's or a folder of results. `most` limits the
    number of other runs; the runs that ended last come first. `options` are keyword arguments of `Replay`.
    Raises ReplayError if one of `runs` cannot be priced, AnalysisError if there is no such folder.
    """
    recordings = [Recording(run, clock=compute) for run in runs]
    own = {str(recording.run.folder.resolve()) for recording in recordings}
    jobs = {recording.job for recording in recordings}
    others: list[Recording] = []
    for other in _runs_in(folder, recordings[0].run.folder):
        if str(other.resolve()) not in own and len(others) != most:
            try:
                run = Run(other)
                if run.status in FINISHED and job_of(run.row) in jobs:
                    others.append(Recording(run, clock=compute))
            except ValueError:  # a run that cannot be read or priced is skipped
                continue
    return _replays(recordings, [*recordings, *others], profile, options)


def _replays(
    recordings: Sequence[Recording],
    pooled: Sequence[Recording],
    profile: Profile | Path | str | None,
    options: Mapping[str, Any],
) -> list[Replay]:
    """Return recordings ready to be priced, with the costs of all `pooled` recordings of their jobs."""
    jobs: dict[Job, list[Recording]] = {}
    for recording in pooled:
        jobs.setdefault(recording.job, []).append(recording)
    costs = {job: Costs(members, profile) for job, members in jobs.items()}
    return [Replay(recording, costs=costs[recording.job], **options) for recording in recordings]


def _runs_in(folder: Place | str | None, run: Place) -> list[Place]:
    """Return the runs in a folder at any depth; without one, the runs beside a run, on this machine the last written first."""
    if folder is not None:
        try:
            return list(find([open_folder(folder)]).runs.values())
        except PlaceError as error:
            raise AnalysisError(str(error)) from None
    if isinstance(run, ListedPath):
        _, names, _ = next(run.parent.walk())
        siblings = [run.parent / name for name in names] if run.pack is not None else []
        return [sibling for sibling in siblings if (sibling / "run.parquet").is_file()]
    files = run.resolve().parent.glob("*/run.parquet")
    return [file.parent for file in sorted(files, key=lambda file: (-file.stat().st_mtime, file))]


class RunPool:
    """The runs of a folder, each read once, to be priced with the costs of its job.

    `folders`: the folders of finished runs, by name; `rows`: their rows of `run.parquet`. `complain` is called with a
    sentence for each run that cannot be priced.
    """

    def __init__(
        self, folders: Mapping[str, Place], rows: Mapping[str, Mapping[str, Any]], complain: Callable[[str], None]
    ) -> None:
        self._folders = folders
        self._rows = rows
        self._complain = complain
        self._recordings: dict[str, dict[str, Recording]] = {}
        self._refused: dict[str, str] = {}
        self._costs: dict[tuple[str, str | None], dict[Job, Costs]] = {}
        self._replays: dict[tuple[str, str, str | None, str], Replay] = {}

    def replay(
        self, run: str, *, compute: str = "auto", profile: Path | str | None = None, transport: str = "ray"
    ) -> Replay:
        """Return a run ready to be priced; raises ReplayError if it cannot be."""
        recordings = self._read(compute)
        if run not in recordings:
            raise ReplayError(self._refused.get(run, f"The run {run} cannot be priced: it is not over."))
        named = None if profile is None else str(profile)
        key = (run, compute, named, transport)
        if key not in self._replays:
            costs = self._costs.setdefault((compute, named), {})
            job = recordings[run].job
            if job not in costs:
                costs[job] = Costs([other for other in recordings.values() if other.job == job], profile)
            self._replays[key] = Replay(recordings[run], costs=costs[job], transport=transport)
        return self._replays[key]

    def _read(self, compute: str) -> Mapping[str, Recording]:
        if compute not in self._recordings:
            self._recordings[compute] = {}
            for name, folder in self._folders.items():
                try:
                    self._recordings[compute][name] = Recording(folder, clock=compute, row=self._rows[name])
                except ReplayError as error:
                    self._refused[name] = str(error)
                    self._complain(str(error))
        return self._recordings[compute]
