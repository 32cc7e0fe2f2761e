"""Rows of a study and a race as a stranger may have written them: a resume reads them, or says in a sentence why not."""

import pyarrow.parquet as pq
import pytest
from record_mutations import GONE, OF_ONE_ROW, VALUES, mutate

from raysim.config import ConfigError
from raysim.sweeps.objectives import Figure
from raysim.sweeps.race_rounds import COLUMNS, RoundEntry, read_entries, write_entries
from raysim.sweeps.trial_rows import Rows, TrialRow

CHANGES = [*VALUES, GONE, *(f"{change} in one row" for change in OF_ONE_ROW)]
NAMES = ("study", "trial", "name", "status", "same_as", "seeds", "started_at", "seconds", "runs", "param.forward")


def refused(read):
    """Return the sentence by which a reader refuses what it reads, None if it reads it."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("column", [*NAMES, "objective.accuracy_on", "settled", "compute"])
def test_changed_rows_of_a_study_are_read_or_refused(tmp_path, column):
    for change in CHANGES:
        check_rows(tmp_path / change, column, change)


def check_rows(tmp_path, column, change):
    tmp_path.mkdir()
    rows = Rows(tmp_path, "small")
    for trial in range(2):
        figures = {"accuracy_on": Figure(0.9)}
        rows.put(
            TrialRow(trial, [0, 1], status="finished", notation="TopK(0.1)", params={"forward": 1}, figures=figures)
        )
    mutate(tmp_path, "trials", column, change)
    again = Rows(tmp_path, "small")
    refusal = refused(again.read)
    assert refusal is None or ("trials.parquet" in refusal and len(refusal.splitlines()) == 1), change
    kinds = [(type(row.trial), type(row.seeds), type(row.ended)) for row in again]
    assert kinds == [(int, list, bool)] * len(again)


@pytest.mark.parametrize("column", COLUMNS.names)
def test_changed_rounds_of_a_race_are_read_or_refused(tmp_path, column):
    file = tmp_path / "race.parquet"
    entries = [RoundEntry(0, 1, "train", [0], 0.1, 1.0), RoundEntry(0, 1, "slower", [0], 0.1, 1.0, 0.1, 0.2, True, 3.0)]
    for change in CHANGES:
        write_entries(file, entries)
        assert read_entries(file) == entries
        mutate(tmp_path, "race", column, change)
        assert pq.read_metadata(file).num_rows == 2
        refusal = refused(lambda: [entry.exit for entry in read_entries(file) if entry.decision != "train"])
        assert refusal is None or "race.parquet" in refusal, change
