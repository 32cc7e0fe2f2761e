"""Records: fixed schemas, whole parts, nothing lost wherever a run is killed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.config import as_row, make_config, run_keys
from raysim.config.identity import identity
from raysim.records import (
    OCCASIONAL,
    SCHEMA_VERSION,
    SCHEMAS,
    SILENT_S,
    STATUSES,
    Recorder,
    RecordsError,
    Run,
    tables,
)
from raysim.records.schema import run_schema
from raysim.records.tables import part_files
from raysim.training.start import is_unbegun

# Golden: a change here is a new version of the schema, unless it adds a column that may be null.
COLUMNS = {
    "steps": (
        "step:int32 epoch:int32 loss:double learning_rate:double gradient_norm:double seconds:double "
        "update_s:double wire_bytes:int64 dense_bytes:int64"
    ),
    "evals": (
        "step:int32 mode:string batchnorm:string loss:double accuracy:double perplexity:double predictions:int64 "
        "samples:int64 seconds:double"
    ),
    "links": (
        "step:int32 replica:int16 stage:int16 boundary:int16 direction:string tensor:string codec:string "
        "rounds:int16 packets:int32 wire_bytes:int64 dense_bytes:int64 gain:double fidelity:double peak:double "
        "residual_norm:double encode_s:double decode_s:double"
    ),
    "actions": (
        "step:int32 replica:int16 stage:int16 op:string microbatch:int32 start_s:double end_s:double "
        "decode_s:double compute_wall_s:double compute_cpu_s:double encode_s:double wire_bytes:int64 "
        "dense_bytes:int64 work:string"
    ),
    "collectives": (
        "step:int32 direction:string stage:int16 round:int16 source_replica:int16 source_stage:int16 "
        "target_replica:int16 target_stage:int16 wire_bytes:int64"
    ),
    "decisions": (
        "step:int32 replica:int16 where:string stage:int16 boundary:int16 tensor:string layer:string "
        "method:string branch:string factor:double minimum:double candidate:double gain_minimum:double "
        "gain_candidate:double gain:double throughput:double event:string reason:string"
    ),
}
GOLDEN = {table: dict(column.split(":") for column in text.split()) for table, text in COLUMNS.items()}

ROW = {"run_id": "1", "status": "running", "schema_version": SCHEMA_VERSION, "steps": 9}


class Killed(BaseException):
    """What a test raises where a process would have been killed."""


def open_recorder(folder: Path) -> Recorder:
    recorder = Recorder(folder)
    recorder.open()
    return recorder


def abandon(recorder: Recorder) -> None:
    """Drop a recorder as a killed process does: the lock goes, all files stay."""
    assert recorder._lock._file is not None
    recorder._lock._file.close()


def add(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last):
        recorder.add("steps", {"step": step, "epoch": 0, "loss": step / 3, "wire_bytes": step})
        for boundary in range(2):
            recorder.add("links", {"step": step, "replica": 0, "boundary": boundary, "direction": "forward"})
    recorder.add("evals", {"step": last, "mode": "on", "loss": 1.0})


def steps_of(folder: Path) -> list[int]:
    return Run(folder).steps["step"].tolist()


def test_schemas_have_columns_used_by_analysis(tmp_path: Path) -> None:
    assert SCHEMA_VERSION == 2
    assert {name: {f.name: str(f.type) for f in schema} for name, schema in SCHEMAS.items()} == GOLDEN
    assert STATUSES == ("running", "finished", "diverged", "failed", "interrupted", "killed")
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    add(recorder, 0, 2)
    recorder.flush()
    for part in (tmp_path / "parts").glob("*.parquet"):
        assert pq.read_schema(part).metadata[b"raysim_schema_version"] == b"2"
    recorder.compact()
    recorder.drop_parts()
    recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "actions.parquet",
        "evals.parquet",
        "links.parquet",
        "run.parquet",
        "steps.parquet",
    ]
    for name, columns in GOLDEN.items():
        if name in OCCASIONAL:
            continue
        schema = pq.read_schema(tmp_path / f"{name}.parquet")
        assert {field.name: str(field.type) for field in schema} == columns
        assert schema.metadata[b"raysim_schema_version"] == b"2"
        assert pd.read_parquet(tmp_path / f"{name}.parquet").columns.tolist() == list(columns)  # without raysim
    assert pq.read_schema(tmp_path / "run.parquet").metadata[b"raysim_schema_version"] == b"2"


def test_a_run_reads_the_same_from_parts_and_from_files(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    for start in range(0, 30, 3):  # more than nine parts: their order is that of numbers
        add(recorder, start, start + 3)
        recorder.flush()
    recorder.flush()  # nothing new, no part
    assert len(list((tmp_path / "parts").glob("steps-*"))) == 10
    run = Run(tmp_path)
    frames = {name: getattr(run, name) for name in SCHEMAS}
    assert frames["steps"]["step"].tolist() == list(range(30))
    assert frames["links"]["boundary"].tolist() == [0, 1] * 30
    assert frames["actions"].empty
    recorder.compact()
    recorder.close()
    for name, table in frames.items():
        pd.testing.assert_frame_equal(getattr(run, name), table)
        if name not in OCCASIONAL:
            pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / f"{name}.parquet"), table)


def test_parts_beyond_the_digits_of_their_names_stay_in_order(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    add(recorder, 0, 1)
    recorder.flush()
    recorder.close()
    (tmp_path / "parts" / "steps-00000.parquet").rename(tmp_path / "parts" / "steps-99999.parquet")
    recorder = open_recorder(tmp_path)
    add(recorder, 1, 2)
    recorder.flush()
    assert steps_of(tmp_path) == [0, 1]
    recorder.close()


def test_killed_write_leaves_no_partial_part(tmp_path: Path, monkeypatch) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    add(recorder, 0, 2)
    recorder.flush()

    def half(descriptor: int) -> None:
        raise Killed

    add(recorder, 2, 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", half)
        with pytest.raises(Killed):
            recorder.flush()
    abandon(recorder)
    assert list((tmp_path / "parts").glob(".steps-*"))  # the draft
    assert steps_of(tmp_path) == [0, 1]
    again = open_recorder(tmp_path)
    assert not list((tmp_path / "parts").glob(".*"))
    again.forget(2)
    add(again, 2, 4)
    again.compact()
    again.drop_parts()
    again.close()
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    assert not (tmp_path / "parts").exists()


def test_run_counts_as_running_while_locked(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    assert Run(tmp_path).status == "running"
    abandon(recorder)
    assert Run(tmp_path).status == "killed"
    again = open_recorder(tmp_path)  # a process that goes on with it
    assert Run(tmp_path).status == "running"
    again.write_run(ROW | {"status": "finished"})
    assert Run(tmp_path).status == "finished"
    again.close()


def test_copied_run_counts_as_running_while_written(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    recorder.close()
    assert Run(tmp_path).status == "running"
    before = time.time() - SILENT_S - 1
    for path in (tmp_path / "run.parquet", tmp_path / "parts", tmp_path):
        os.utime(path, (before, before))
    assert Run(tmp_path).status == "killed"


def test_forget_drops_repeated_steps_and_is_idempotent(tmp_path: Path, monkeypatch) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    for start in (0, 3, 6):
        add(recorder, start, start + 3)
        recorder.flush()
    add(recorder, 9, 12)  # not flushed, and done again too

    calls = 0
    original = tables.write_table

    def killed_at_second(table: pa.Table, path: Path) -> str:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Killed
        return original(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(tables, "write_table", killed_at_second)
        with pytest.raises(Killed):
            recorder.forget(4)
    for _ in range(2):
        recorder.forget(4)
        run = Run(tmp_path)
        assert run.steps["step"].tolist() == [0, 1, 2, 3]
        assert run.links["step"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert run.evals["step"].tolist() == [3]  # of step 3: after three steps; that after six is done again
    recorder.forget(3)
    assert (
        Run(tmp_path).evals["step"].tolist() == []
    )  # evaluated after the checkpoint in which step 3 begins: done again
    add(recorder, 3, 5)
    recorder.flush()
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    recorder.forget(0)
    assert steps_of(tmp_path) == []
    recorder.close()


def crash_in_write(number: int) -> Callable:
    def arrange(patch: pytest.MonkeyPatch) -> None:
        original, calls = tables.write_table, 0

        def write(table: pa.Table, path: Path) -> str:
            nonlocal calls
            calls += 1
            if calls > number:
                raise Killed
            return original(table, path)

        patch.setattr(tables, "write_table", write)

    return arrange


def crash_in_removal(after: int) -> Callable:
    def arrange(patch: pytest.MonkeyPatch) -> None:
        def rmtree(path: Path, **options: object) -> None:
            for part in sorted(Path(path).iterdir())[:after]:
                part.unlink()
            raise Killed

        patch.setattr(shutil, "rmtree", rmtree)

    return arrange


CRASHES = {
    **{f"after {number} files": crash_in_write(number) for number in range(4)},
    "before the parts go": crash_in_removal(0),
    "while the parts go": crash_in_removal(1),
    "when some parts are gone": crash_in_removal(2),
    "after the parts went": lambda patch: None,
}


@pytest.mark.parametrize("crash", CRASHES)
def test_killed_compaction_loses_nothing(tmp_path: Path, crash: str, monkeypatch) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    for start in (0, 3, 6):
        add(recorder, start, start + 3)
        recorder.flush()
    with monkeypatch.context() as patch:
        CRASHES[crash](patch)
        if crash == "after the parts went":
            recorder.compact()
            recorder.drop_parts()
        elif "parts" in crash:
            recorder.compact()
            with pytest.raises(Killed):
                recorder.drop_parts()
        else:
            with pytest.raises(Killed):
                recorder.compact()
    abandon(recorder)
    assert steps_of(tmp_path) == list(range(9))
    if "parts" in crash:  # they go when the run is over, and nothing is resumed
        return
    # the run that resumes it finds its steps, whether or not it has any left to do
    again = open_recorder(tmp_path)
    assert steps_of(tmp_path) == list(range(9))
    again.forget(9)
    assert steps_of(tmp_path) == list(range(9))
    again.forget(7)
    add(again, 7, 10)
    again.compact()
    again.drop_parts()
    again.close()
    assert steps_of(tmp_path) == list(range(10))
    assert Run(tmp_path).evals["step"].tolist() == [3, 6, 10]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "parts"))]


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    first, second = open_recorder(tmp_path / "run"), Recorder(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(RecordsError) as error:
            second.open()
        assert str(error.value) == f"Another process is writing the run in {tmp_path / 'run'}."
        second.close()  # of one that never had it: the lock stays the first's
    first.close()
    second.open()
    third = Recorder(tmp_path / "run")
    with pytest.raises(RecordsError):
        third.open()
    second.close()
    third.open()
    third.close()


def test_run_that_did_not_start_leaves_no_files(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path / "run")
    recorder.discard()
    assert list(tmp_path.iterdir()) == []
    recorder = open_recorder(tmp_path / "run")
    recorder.write_run(ROW)  # as a start does, before the stages turn out to have no room
    (tmp_path / "run" / "mine.txt").write_text("precious")
    recorder.discard()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_read_and_write_errors_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordsError) as error:
        Run(tmp_path)
    assert str(error.value) == f"There is no run in {tmp_path}: it has no run.parquet."
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError) as error:
        Recorder(tmp_path / "file" / "run").open()
    assert str(error.value) == f"The run's folder {tmp_path / 'file' / 'run'} cannot be written: Not a directory."
    (tmp_path / "run.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(RecordsError, match=r"run\.parquet cannot be read: "):
        _ = Run(tmp_path).status
    recorder = open_recorder(tmp_path / "run")
    recorder.write_run(ROW | {"status": "finished"})
    recorder.compact()
    recorder.close()
    (tmp_path / "run" / "steps.parquet").unlink()
    with pytest.raises(RecordsError, match=r"^The table 'steps' of .* cannot be read: "):
        _ = Run(tmp_path / "run").steps


def test_run_row_has_all_columns(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    row = {
        **ROW,
        "cuts": None,
        "epochs": None,
        "seed": 2**63 - 1,
        "recompute": True,
        "optimizer.betas": [0.9, 0.99],
        "optimizer.momentum": None,
        "model": "cnn",
        "model.width": 4,
        "model.widths": [4, 8],  # options of one's own model may be anything that TOML can write
        "model.table": {"a": 1},
        "final_loss_on": 1,
        "error": None,
    }
    recorder.write_run(row)
    types = {field.name: str(field.type) for field in pq.read_schema(tmp_path / "run.parquet")}
    assert Run(tmp_path).row == {**row, **identity(row), "final_loss_on": 1.0}
    assert types["cuts"].startswith("list<")
    assert (types["epochs"], types["optimizer.momentum"]) == ("int64", "double")
    assert (types["recompute"], types["error"], types["final_loss_on"]) == ("bool", "string", "double")
    recorder.write_run(
        {**row, "status": "finished", "cuts": ["a"], "epochs": 3, "optimizer.momentum": 0.5, "error": "x"}
    )
    assert {field.name: str(field.type) for field in pq.read_schema(tmp_path / "run.parquet")} == types
    assert Run(tmp_path).status == "finished"
    assert len(pd.read_parquet(tmp_path / "run.parquet")) == 1
    recorder.close()


def test_folders_named_like_partitions_are_only_folders(tmp_path: Path) -> None:
    folder = tmp_path / "step=3" / "density=0.1"
    recorder = open_recorder(folder)
    recorder.write_run(ROW)
    add(recorder, 0, 2)
    recorder.flush()
    recorder.forget(1)
    assert steps_of(folder) == [0]
    recorder.compact()
    recorder.drop_parts()
    recorder.close()
    assert steps_of(folder) == [0]
    assert Run(folder).steps.columns.tolist() == list(GOLDEN["steps"])
    assert Run(folder).row == {**ROW, **identity(ROW)}


def test_every_key_of_a_run_is_described_and_has_a_column() -> None:
    """`forward` as one text or as a list, and keys that are not given, have the same column."""
    one = as_row(make_config({"steps": 1}))
    lists = as_row(make_config({"steps": 1, "num_stages": 3, "forward": ["TopK(0.1)", "Identity"], "bottleneck": 8}))
    assert lists["forward"] == '["TopK(0.1)", "Identity"]'
    assert lists["bottleneck"] == "8"
    assert run_schema(one) == run_schema(lists)
    assert {key.name for key in run_keys()} == set(one)
    assert all(key.meaning for key in run_keys())


def test_a_checkpoint_s_parts_are_checked_by_their_hashes(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    add(recorder, 0, 3)
    recorder.flush()
    listed = recorder.parts()
    assert sorted(listed) == sorted(path.name for path in (tmp_path / "parts").iterdir())
    add(recorder, 3, 6)
    recorder.flush()
    recorder.check_parts(listed)  # later parts do not matter
    abandon(recorder)
    again = open_recorder(tmp_path)
    assert again.parts().items() >= listed.items()  # of files that it has not written itself
    for damage in ("cut", "flip", "empty", "gone"):
        name = next(iter(listed))
        path = tmp_path / "parts" / name
        content = path.read_bytes()
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        path.write_bytes({"cut": content[:half], "flip": flipped, "empty": b"", "gone": b""}[damage])
        if damage == "gone":
            path.unlink()
        with pytest.raises(
            RecordsError, match="cannot be read" if damage == "gone" else "has changed since it was written"
        ):
            again.check_parts(listed)
        path.write_bytes(content)
    again.check_parts(listed)
    again.close()


def test_unreadable_part_needed_by_checkpoint_is_kept(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    for first in (0, 3):
        add(recorder, first, first + 3)
        recorder.flush()
    abandon(recorder)
    again = open_recorder(tmp_path)
    listed = {name: digest for name, digest in again.parts().items() if name.endswith("-00000.parquet")}
    again.close()
    resumed = open_recorder(tmp_path)
    resumed.check_parts(listed)
    for name in ("steps-00000.parquet", "steps-00001.parquet"):
        (tmp_path / "parts" / name).write_bytes(b"")
    with pytest.raises(OSError, match="it was whole, and can no longer be read"):
        resumed.forget(3)
    assert (tmp_path / "parts" / "steps-00000.parquet").exists()
    assert not (tmp_path / "parts" / "steps-00001.parquet").exists()  # no checkpoint needs it
    resumed.close()


def test_damage_to_a_table_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    add(recorder, 0, 50)
    recorder.compact()
    recorder.drop_parts()
    recorder.close()
    path = tmp_path / "steps.parquet"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        try:
            found = Run(tmp_path).steps["step"].tolist()
        except RecordsError:
            continue
        assert found == list(range(50)), place


def test_full_disk_keeps_old_file_without_draft(tmp_path: Path, monkeypatch) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device") as error:
            recorder.write_run(ROW | {"status": "finished"})
    assert error.value.filename == str(tmp_path / "run.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "parts", "run.parquet"]
    assert Run(tmp_path).status == "running"
    recorder.close()


@pytest.mark.parametrize("rows", [0, 2])
def test_a_run_has_one_row(tmp_path: Path, rows: int) -> None:
    recorder = open_recorder(tmp_path)
    recorder.write_run(ROW)
    recorder.close()
    row = pq.read_table(tmp_path / "run.parquet")
    pq.write_table(pa.concat_tables([row] * rows) if rows else row.slice(0, 0), tmp_path / "run.parquet")
    with pytest.raises(RecordsError, match=f"must have one row, of a run, but has {rows}"):
        _ = Run(tmp_path).status


def test_parts_removed_during_listing_are_ignored(tmp_path, monkeypatch):
    """A reader looks whether there are parts, and the run removes them before they are listed."""
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert part_files(tmp_path, "steps") == []
    assert not is_unbegun(tmp_path / "gone")
