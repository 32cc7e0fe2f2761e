"""A recorded run: its tables as DataFrames, its status, and summaries of its links across replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.config.keys import run_keys
from raysim.network.exchanges import more_than_dense
from raysim.notation import printable
from raysim.quality import Measure, measures_of
from raysim.records.bounds import check_row, check_values, identified, most_rows, printable_rows
from raysim.records.packs import open_folder
from raysim.records.schema import FINISHED, OCCASIONAL
from raysim.records.tables import FEW_ROWS, UNREADABLE, RecordsError, read_table, read_whole, table_files
from raysim.storage.files import is_locked
from raysim.storage.places import Place, PlaceError

if TYPE_CHECKING:
    import pandas as pd

STATUSES = ("running", "finished", "diverged", "failed", "interrupted", "killed")
SILENT_S = 600.0  # a run without a lock counts as killed if nothing was written for this long


def present_status(folder: Place, written: str) -> str:
    """Return the present status of a run: `written`, or "killed" if it says "running" but no process trains it.

    A training process holds the lock of the run's folder. Without a lock file, as in a copy of the folder, the run counts as
    killed once nothing has been written for `SILENT_S` seconds. A bucket has no locks, so the written status is returned.
    """
    if written != "running" or not isinstance(folder, Path):
        return written
    locked = is_locked(folder)
    if locked is None:
        places = [folder, folder / "parts", folder / "run.parquet"]
        locked = time.time() - max(map(_written_at, places)) < SILENT_S
    return "running" if locked else "killed"


def recorded_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in a row of `run.parquet`, or its default if the key is newer than the run."""
    if key in row:
        return row[key]
    return next((known.default for known in run_keys() if known.name == key), None)


def _written_at(path: Path) -> float:
    """Return the modification time of a file or folder; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class Run:
    """A recorded run in a folder or a bucket: its tables as DataFrames, and its status.

    `row`: the row of `run.parquet` of a finished run, if already read.

    >>> run = Run("results/none")
    Traceback (most recent call last):
    raysim.records.tables.RecordsError: There is no run in results/none: it has no run.parquet.
    """

    def __init__(self, folder: str | Place, row: Mapping[str, Any] | None = None) -> None:
        self._row = row
        try:
            self.folder = open_folder(folder)
        except PlaceError as error:
            raise RecordsError(str(error)) from None
        if not (self.folder / "run.parquet").is_file():
            raise RecordsError(f"There is no run in {self.folder}: it has no run.parquet.")

    def __repr__(self) -> str:
        row = self.row
        shown = ("loss", *(name for name in self.measures if name != "loss"))
        quality = [
            f"{name} {row[f'final_{name}_on']:.4f}" for name in shown[:2] if row.get(f"final_{name}_on") is not None
        ]
        words = [row["setting"], f"{len(self.steps)} steps", self.status, *quality]
        return f"Run({str(self.folder)!r}: {', '.join(words)})"

    @property
    def row(self) -> dict[str, Any]:
        """The row of `run.parquet`: configuration, versions, final metrics, status."""
        if self._row is not None:
            return dict(self._row)
        try:
            table = read_whole(self.folder / "run.parquet", FEW_ROWS)
            if len(table) == 1:
                check_row(table)
        except UNREADABLE as error:
            raise RecordsError(printable(f"{self.folder / 'run.parquet'} cannot be read: {error}.")) from None
        if len(table) != 1 or "status" not in table.column_names:
            raise RecordsError(f"{self.folder / 'run.parquet'} must have one row, of a run, but has {len(table)}.")
        row: dict[str, Any] = identified(printable_rows(table)).to_pylist()[0]
        if row["status"] in FINISHED:  # it stays as it is
            self._row = dict(row)
        return row

    @property
    def measures(self) -> dict[str, Measure]:
        """The measures of its evaluations, starting with the one that judges settings; see `measures_of`."""
        return measures_of(self.row)

    @property
    def status(self) -> str:
        """The present status, one of `STATUSES`; see `present_status`."""
        return present_status(self.folder, str(self.row["status"]))

    @property
    def steps(self) -> pd.DataFrame:
        """One row per step: loss, learning rate, seconds, wire and dense bytes."""
        return self._table("steps")

    @property
    def evals(self) -> pd.DataFrame:
        """One row per evaluation: the loss and all metrics, with compression on and off."""
        return self._table("evals")

    @property
    def links(self) -> pd.DataFrame:
        """One row per step, boundary and direction: packets, bytes, codec seconds, fidelity."""
        return self._table("links")

    @property
    def decisions(self) -> pd.DataFrame:
        """One row per decision of an adaptive method: the branch taken, the gains, and the reason."""
        return self._table("decisions")

    @property
    def collectives(self) -> pd.DataFrame:
        """One row per transfer between replicas, or between owners of a tied parameter, at the end of profiled steps."""
        return self._table("collectives")

    @property
    def actions(self) -> pd.DataFrame:
        """One row per action of profiled steps: its time, and its codec and compute seconds."""
        return self._table("actions")

    def _table(self, name: str) -> pd.DataFrame:
        files = table_files(self.folder, name)
        try:
            if not files and name not in OCCASIONAL and self.status in FINISHED:
                raise FileNotFoundError(f"there is no {name}.parquet")
            row = self.row
            table = read_table(files, name, measures_of(row) if name == "evals" else (), most_rows(name, row))
            check_values(table)
        except UNREADABLE as error:
            if table_files(self.folder, name) != files:  # changed by the run's process in the meantime
                return self._table(name)
            raise RecordsError(printable(f"The table {name!r} of {self.folder} cannot be read: {error}.")) from None
        frame: pd.DataFrame = printable_rows(table).to_pandas()
        return frame


def with_replicas(links: pd.DataFrame) -> pd.DataFrame:
    """Add a column `replicas` to rows of `links` of one setting: the replicas with the row's codec, or "" if all share it.

    Null tensor names become "".

    >>> import pandas as pd
    >>> links = pd.DataFrame({"direction": "forward", "boundary": 0, "replica": [0, 1, 2], "codec": ["A", "B", "A"]})
    >>> with_replicas(links)["replicas"].tolist()
    ['replicas 0, 2', 'replica 1', 'replicas 0, 2']
    """
    links = links.assign(tensor=links["tensor"].astype(object).fillna("") if "tensor" in links else "")
    link, codec = ["direction", "boundary", "tensor"], ["direction", "boundary", "tensor", "codec"]
    known = links.dropna(subset=["boundary", "replica"])[[*codec, "replica"]].drop_duplicates()
    with_codec, of_link = (known.groupby(keys, observed=True)["replica"].transform("size") for keys in (codec, link))
    differing = known[with_codec < of_link].groupby(codec, observed=True)["replica"]
    return links.join(differing.agg(_named).astype(object).rename("replicas"), on=codec).fillna({"replicas": ""})


def _named(replicas: pd.Series[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, sorted(replicas)))}"


def exceeds_dense(links: pd.DataFrame, num_replicas: int) -> str | None:
    """Return a sentence if replicas send more than in an uncompressed all-reduce of their gradients, else None."""
    averages = links[(links["direction"] == "replica_gradient") & (links["dense_bytes"] > 0)]
    if averages.empty:
        return None
    most = averages.iloc[int((averages["wire_bytes"] / averages["dense_bytes"]).to_numpy().argmax())]
    return more_than_dense(str(most["codec"]), float(most["wire_bytes"]), float(most["dense_bytes"]), num_replicas)
