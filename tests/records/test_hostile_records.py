"""Records that nobody should have written: what is written is read again, and what is hostile is named in one sentence."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from records_made import write_run, write_study

from raysim.analysis import load
from raysim.config.keys import as_row, run_keys
from raysim.notation import described, text_of
from raysim.records import Recorder, RecordsError, Run
from raysim.records.bounds import LONGEST_TEXT
from raysim.records.schema import OWN_COLUMNS
from raysim.records.tables import check_recordable
from raysim.storage.files import FolderLock, is_locked, open_regular, read_bytes, read_text
from raysim.storage.texts import DEEPEST, parse_json, parse_toml

NOTATIONS = ("forward", "backward", "replica_gradient", "schedule", "weights")
TEXTS = {
    "long": "x" * 10_000_000,
    "control": "a\x1b[31mb\x00",
    "surrogate": "a\udcffb",
    "lines": "a\nb\r\nc",
    "direction": "a\u202eb",
}
COLUMNS = {
    **{key.name: key.kind for key in run_keys()},
    **OWN_COLUMNS,
    "cpu": "str",
    "data.path": "str",
    "nodes": "list[str]",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was trained; its row is changed by the tests."""
    return write_run(tmp_path_factory.mktemp("hostile") / "run")


@pytest.mark.parametrize("kind", TEXTS)
def test_text_columns_round_trip(tmp_path, run, kind):
    row = Run(run).row
    changed: dict[str, object] = {
        name: TEXTS[kind] for name, of in COLUMNS.items() if of == "str" and name not in (*NOTATIONS, "schedule_rows")
    }
    changed |= {name: [TEXTS[kind][:1000]] for name, of in COLUMNS.items() if of == "list[str]"}
    recorder = Recorder(tmp_path / "run")
    recorder.open()
    recorder.write_run(row | changed)
    recorder.close()
    read = Run(tmp_path / "run").row
    assert all(0 < len(str(read[name])) <= LONGEST_TEXT for name in changed)


def test_tables_of_compressors_for_many_replicas_are_read_again(tmp_path, small):
    compressors = {str(replica): "TopK(0.1)" if replica % 2 else "Quantize(8)" for replica in range(100)}
    changed = as_row(small(num_replicas=100, batch_size=800, forward=compressors))
    assert len(changed["forward"]) > 1000
    row = Run(write_run(tmp_path / "run")).row | changed
    check_recordable(row)
    with pytest.raises(RecordsError, match="This run cannot be recorded: its `forward` cannot be read"):
        check_recordable(row | {"forward": "TopK(" * 30})


class UnspeakableError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_any_error_text_is_described():
    assert described(UnspeakableError()) == "UnspeakableError"
    assert text_of(ValueError("x" * 10_000_000)).startswith("xxx")
    assert len(described(ValueError("x" * 10_000_000))) < 5000


HOSTILE = {
    "deep": "a = " + "[" * 900 + "]" * 900,
    "deeper": "a = " + "[" * 200_000,
    "parts": "a." * 5000 + "a = 1",
    "quoted parts": '"a".' * 30_000 + "a = 1",
    "header": "[" + "a." * 1500 + "a]",
    "inline": "a = " + "{b = " * 200 + "1" + "}" * 200,
    "mixed": "a = " + "{a.a.a.a.a.a.a = " * 40 + "1" + "}" * 40,
    "digits": "a = " + "9" * 5000,
    "large": "#" * (5 * 2**20),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_texts_are_refused_with_one_kind_of_error(kind):
    with pytest.raises(ValueError):
        parse_toml(HOSTILE[kind])


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "[" * 100 + "]" * 100, "9" * 5000 + "x"])
def test_hostile_json_is_refused_with_one_kind_of_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_brackets_in_texts_are_not_counted():
    assert parse_toml(f"a = '{'[' * 500}'")["a"] == "[" * 500
    assert parse_json('"' + "[{" * 500 + '"') == "[{" * 500
    nested = "[" * DEEPEST + "]" * DEEPEST
    assert parse_json(nested[1:-1])
    assert parse_toml(".".join(["a"] * (DEEPEST - 1)) + " = 1")


STUDIES = [
    *HOSTILE.values(),
    "seeds = [[1]]",
    "seeds = [inf]",
    "seeds = ['a']",
    "objectives = 3",
    "\x00",
    "a = '\udcff'",
]


def test_bad_study_files_do_not_stop_the_others(tmp_path):
    write_study(tmp_path / "good", [{"objective.loss_on": 1.0}], objectives={"loss_on": "maximize"})
    for number, text in enumerate(STUDIES):
        bad = write_study(tmp_path / f"{number}", [{"objective.loss_on": 1.0}], objectives={"loss_on": "minimize"})
        (bad / "study.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    results = load(tmp_path)
    assert results.directions("good") == {"loss_on": "maximize"}
    for number, text in enumerate(STUDIES):
        assert results.directions(f"{number}") == {"loss_on": "minimize"}, text[:50]
        assert results.planned_seeds(f"{number}") == (), text[:50]


def bomb(file, rows, schema=None):
    """Write a small file with many rows."""
    names = ("step", "loss", "seconds", "wire_bytes", "dense_bytes")
    chunk = pa.table({name: pa.array(np.zeros(2**20, np.int32 if name == "step" else np.float64)) for name in names})
    with pq.ParquetWriter(file, chunk.schema, compression="zstd") as writer:
        for _ in range(rows // 2**20):
            writer.write_table(chunk, row_group_size=2**20)


def test_a_small_file_with_millions_of_rows_is_not_read(tmp_path):
    write_run(tmp_path / "bad")
    write_run(tmp_path / "good")
    bomb(tmp_path / "bad" / "steps.parquet", 4 * 2**20)
    shutil.copy(tmp_path / "bad" / "steps.parquet", tmp_path / "bad" / "links.parquet")
    shutil.copy(tmp_path / "bad" / "steps.parquet", tmp_path / "bad" / "run.parquet.bomb")
    with pytest.raises(RecordsError, match="it has 4,194,304 rows, but its run can have at most 4"):
        _ = Run(tmp_path / "bad").steps
    with pytest.raises(RecordsError, match="its run can have at most"):
        _ = Run(tmp_path / "bad").links
    results = load(tmp_path)
    assert set(results.steps["run"]) == {"good"}
    assert set(results.links["run"]) == {"good"}
    assert any("bad/steps.parquet" in problem for problem in results.problems)
    (tmp_path / "bad" / "run.parquet.bomb").replace(tmp_path / "bad" / "run.parquet")
    assert set(load(tmp_path).runs["run"]) == {"good"}
    with pytest.raises(RecordsError, match="4,194,304 rows"):
        _ = Run(tmp_path / "bad").row


NAMES = (
    "run.parquet",
    "steps.parquet",
    "links.parquet",
    "evals.parquet",
    "study.toml",
    "trials.parquet",
    "runs.parquet",
)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda odd: odd.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda odd: odd.symlink_to(odd),
}


def test_sound_runs_are_read_beside_pipes_and_devices(tmp_path):
    good = write_run(tmp_path / "good")
    for name, kind in itertools.product(NAMES, KINDS):
        odd = Path(shutil.copytree(good, tmp_path / f"{kind}-{name}")) / name
        odd.unlink(missing_ok=True)
        KINDS[kind](odd)
    results = load(tmp_path)
    assert "good" in set(results.runs["run"])
    assert "good" in set(results.steps["run"])
    assert len(results.trials) == 0


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for odd in (tmp_path / "pipe", tmp_path / "zero", tmp_path, "/dev/null"):
        for read in (open_regular, read_bytes, read_text):
            with pytest.raises(OSError, match="it is not a regular file"):
                read(odd)
    os.mkfifo(tmp_path / ".lock")
    assert is_locked(tmp_path) is None
    with pytest.raises(OSError, match="it is not a regular file"):
        FolderLock(tmp_path).acquire()


@pytest.mark.parametrize(
    "name", ["steps-copy.parquet", "steps-.parquet", "steps-²²²²².parquet", "steps-1.parquet", "links-0000x.parquet"]
)
def test_unrelated_files_are_not_parts(tmp_path, name):
    recorder = Recorder(tmp_path)
    recorder.open()
    row = {"step": 0, "epoch": 0, "loss": 1.0, "wire_bytes": 1, "dense_bytes": 1, "seconds": 0.1}
    recorder.add("steps", row)
    recorder.flush()
    shutil.copy(tmp_path / "parts" / "steps-00000.parquet", tmp_path / "parts" / name)
    recorder.close()
    recorder = Recorder(tmp_path)
    recorder.open()
    recorder.add("steps", row | {"step": 1})
    recorder.flush()
    assert sorted(recorder.parts()) == ["steps-00000.parquet", "steps-00001.parquet"]
    recorder.compact()
    recorder.close()
    assert pq.read_table(tmp_path / "steps.parquet")["step"].to_pylist() == [0, 1]
