"""Runs and studies in pandas: all of them, by columns and rows, and what is broken said in a sentence."""

import os
import shutil
import subprocess
import sys

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from records_made import write_run, write_study

from raysim import Run, train
from raysim.analysis import AnalysisError, load
from raysim.records import SCHEMAS


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with two real runs, and a study of two trials with a run each."""
    from configurations import SMALL

    from raysim.config import make_config

    folder = tmp_path_factory.mktemp("made")
    for seed in (0, 1):
        config = make_config({**SMALL, "seed": seed, "forward": "TopK(0.1)", "steps": 3})
        train(config, engine="inline", out=folder / "real" / f"s{seed}")
    runs = [f"trials/{trial}-s0" for trial in range(2)]
    objectives = {"objective.loss_on": 0.5, "objective.accuracy_on": 0.9}
    trials = [
        {"runs": [run], "param.forward.density": 0.1, "param.forward.codec": "TopK", **objectives} for run in runs
    ]
    study = write_study(folder / "study", trials, objectives={"loss_on": "maximize"})
    for run in runs:
        write_run(study / run, forward="TopK(0.5)")
    write_run(study / "tune" / "scratch")
    return folder


def plain(frame):
    """Return the frame as Python's own values, None where one is missing."""
    values = frame.astype(object)
    return values.where(values.notna(), None)


def test_every_run_is_there_once_with_its_study_and_its_trial(made):
    results = load(made)
    assert results.runs["run"].tolist() == ["real/s0", "real/s1", "study/trials/0-s0", "study/trials/1-s0"]
    assert results.runs["study"].tolist()[2:] == ["study", "study"]
    assert results.runs["trial"].tolist()[2:] == [0, 1]
    assert results.runs[["study", "trial"]].isna().any(axis=1).tolist() == [True, True, False, False]
    assert load(made, made / "real").runs["run_id"].tolist() == results.runs["run_id"].tolist()
    assert load(made / "real" / "s0").runs["run"].tolist() == ["s0"]
    assert load(made / "study").runs["run"].tolist() == ["trials/0-s0", "trials/1-s0"]
    assert not results.problems
    assert len(results) == 4
    assert repr(results) == f"Results({str(made)!r}: 4 runs (4 finished), 1 studies)"


def test_table_joins_recorded_rows_of_runs(made):
    results = load(made)
    for name in SCHEMAS:
        table = getattr(results, name)
        for run in ("real/s0", "study/trials/1-s0"):
            mine = table[table["run"] == run].drop(columns="run").reset_index(drop=True)
            alone = getattr(Run(results.path(run)), name)
            pd.testing.assert_frame_equal(plain(mine), plain(alone))
    row = results.runs.set_index("run").loc["real/s0"]
    assert row["compression_factor"] == row["dense_bytes"] / row["wire_bytes"]
    assert {name: row[name] for name in ("seed", "forward", "batch_size")} == {
        "seed": 0,
        "forward": "TopK(0.1)",
        "batch_size": 16,
    }


def test_missing_values_keep_column_types(made):
    results = load(made)
    assert str(results.links["boundary"].dtype) == "Int16"
    assert str(results.links["wire_bytes"].dtype) == "Int64"
    assert str(results.runs["seed"].dtype) == "Int64"
    assert str(results.runs["optimizer.momentum"].dtype) == "float64"
    assert str(results.trials["same_as"].dtype) == "Int64"
    assert str(results.trials["baseline"].dtype) == "boolean"


def test_filters_and_columns_reach_the_files(made, tmp_path):
    results = load(made)
    forward = results.table("links", ["wire_bytes"], [("direction", "==", "forward"), ("step", "<", 1)])
    assert forward.columns.tolist() == ["run", "wire_bytes"]
    expected = results.links[(results.links["direction"] == "forward") & (results.links["step"] < 1)]
    assert forward["wire_bytes"].tolist() == expected["wire_bytes"].tolist()
    expression = results.table("links", ["wire_bytes"], (pc.field("direction") == "forward") & (pc.field("step") < 1))
    pd.testing.assert_frame_equal(forward, expression)

    shutil.copytree(made / "real", tmp_path / "real")
    results = load(tmp_path)
    (tmp_path / "real" / "s1" / "links.parquet").write_bytes(b"PAR1 no more")  # whoever opens it fails
    assert set(results.select(results.runs["seed"] == 0).links["run"]) == {"real/s0"}
    assert results.select(["real/s0"]).links.shape == results.select(results.runs.query("seed == 0")).links.shape
    assert not results.problems


def test_rows_are_filtered_before_they_are_decoded(made, tmp_path):
    """The statistics of a file that no row can come from are enough: its pages may be rotten."""
    shutil.copytree(made / "real" / "s0", tmp_path / "run")
    file = tmp_path / "run" / "steps.parquet"
    with pq.ParquetFile(file) as parquet:
        start = parquet.metadata.row_group(0).column(0).dictionary_page_offset or 4
    rotten = bytearray(file.read_bytes())
    rotten[start : start + 40] = bytes(40)
    file.write_bytes(rotten)
    results = load(tmp_path)
    assert results.table("steps", where=[("step", ">", 1_000_000)]).empty
    assert not results.problems
    assert results.steps.empty
    assert len(results.problems) == 1


def test_runs_carry_their_setting_and_their_job(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed, forward="TopK(0.1)", name="first")
        write_run(tmp_path / f"b{seed}", seed=seed, backward="Quantize(8)", name="second", timeout_s=9)
    write_run(tmp_path / "c", batch_size=64)
    results = load(tmp_path)
    sparse, coarse = "forward=TopK(0.1)", "backward=Quantize(8)"
    assert results.runs["setting"].tolist() == [sparse, sparse, coarse, coarse, "dense"]
    first, *others, other = results.runs["job"]
    assert set(others) == {first} != {other}
    for file in tmp_path.glob("*/run.parquet"):  # as earlier versions wrote it
        pq.write_table(pq.read_table(file).drop_columns(["job", "setting"]), file)
    earlier = load(tmp_path)
    assert earlier.runs[["job", "setting"]].equals(results.runs[["job", "setting"]])
    assert [Run(earlier.path(run)).row["job"] for run in earlier.runs["run"]] == earlier.runs["job"].tolist()


def test_trials_are_read_with_their_directions(made):
    results = load(made)
    assert results.trials["folder"].tolist() == ["study", "study"]
    assert results.trials["param.forward.density"].tolist() == [0.1, 0.1]
    assert results.directions("study") == {"loss_on": "maximize", "accuracy_on": "maximize"}
    (made / "study" / "study.toml").write_text("half a")
    results = load(made)
    assert results.directions("study") == {"loss_on": "minimize", "accuracy_on": "maximize"}
    assert len(results.problems) == 1
    assert "study.toml of study cannot be read" in results.problems[0]


def test_an_empty_folder_is_said_in_one_sentence(tmp_path):
    results = load(tmp_path)
    assert results.problems == [f"There is no run in {tmp_path}: no folder there has a run.parquet."]
    assert results.runs.empty
    assert results.trials.empty
    assert {"run", "study", "trial", "setting", "status"} <= set(results.runs)
    for name in SCHEMAS:
        assert results.table(name).columns.tolist() == ["run", *SCHEMAS[name].names]


def test_missing_items_are_refused():
    with pytest.raises(AnalysisError) as error:
        load("no/such/folder")
    assert str(error.value) == "There is no folder no/such/folder."
    with pytest.raises(AnalysisError) as error:
        load()
    assert str(error.value) == "`load` needs at least one folder."


def test_unknown_tables_columns_and_runs_are_refused(made):
    results = load(made)
    with pytest.raises(AnalysisError) as error:
        results.table("pixels")
    assert str(error.value).startswith("The tables of runs are steps, evals, links, actions")
    with pytest.raises(AnalysisError) as error:
        results.table("evals", ["mood"])
    assert str(error.value).startswith("`columns` of evals must be among step, mode, batchnorm,")
    assert str(error.value).endswith("but got 'mood'.")
    for where in ([("mood", "==", 1)], pc.field("step") == "three", [("step", "near", 3)], "step > 3"):
        with pytest.raises(AnalysisError) as error:
            results.table("evals", where=where)
        assert str(error.value).startswith("`where` must be a condition on step, mode, batchnorm,")
    assert not results.problems
    with pytest.raises(AnalysisError) as error:
        results.path("elsewhere")
    assert str(error.value) == "There is no run 'elsewhere' among these 4."


def test_stopped_trials_are_pruned_others_interrupted(tmp_path):
    """A sweep that stops a trial leaves a run that was interrupted on purpose."""
    for name, status in (("0-s0", "finished"), ("1-s0", "interrupted"), ("2-s0", "interrupted")):
        write_run(tmp_path / "trials" / name, status=status)
    (tmp_path / "study.toml").write_text("seeds = [0]")
    runs = [[f"trials/{number}-s0"] for number in range(3)]
    trials = {"trial": [0, 1, 2], "status": ["finished", "pruned", "failed"], "runs": runs}
    pq.write_table(pa.table(trials), tmp_path / "trials.parquet")
    results = load(tmp_path)
    assert results.runs["status"].tolist() == ["finished", "pruned", "interrupted"]
    assert results.runs["trial"].tolist() == [0, 1, 2]
    assert results.problems == ["1 of 3 runs are not finished (1 interrupted): they are shown, but not compared."]
    (tmp_path / "trials.parquet").unlink()
    assert load(tmp_path).runs["status"].tolist() == ["finished", "interrupted", "interrupted"]


def test_run_matches_its_trial_despite_other_columns(tmp_path):
    """Rows with the same columns are read together, out of the order of names."""
    study = write_study(tmp_path / "study", [{"runs": [f"trials/{name}"]} for name in "dbca"])
    for number, name in enumerate("dbca"):
        file = write_run(study / "trials" / name) / "run.parquet"
        if number % 2:
            pq.write_table(pq.read_table(file).append_column("peculiar", pa.array([number])), file)
    runs = load(study).runs
    assert {run.removeprefix("trials/"): trial for run, trial in zip(runs["run"], runs["trial"], strict=True)} == {
        name: number for number, name in enumerate("dbca")
    }


def test_running_runs_are_shown_and_counted(tmp_path):
    write_run(tmp_path / "killed", status="running")
    results = load(tmp_path)
    assert results.problems == ["None of the 1 runs is finished (1 running): their records so far are shown."]
    assert len(results.steps) == 4
    write_run(tmp_path / "whole")
    (tmp_path / "killed" / "parts" / f".steps-00001.parquet.{os.getpid()}").write_bytes(b"half")
    results = load(tmp_path)
    assert results.problems == ["1 of 2 runs are not finished (1 running): they are shown, but not compared."]
    assert results.steps["run"].value_counts().to_dict() == {"killed": 4, "whole": 4}
    assert not any("part" in problem for problem in results.problems)


def test_killed_and_running_runs_are_distinguished(tmp_path):
    write_run(tmp_path / "killed", status="running")
    (tmp_path / "killed" / ".lock").touch()  # which its process held
    results = load(tmp_path)
    assert results.runs["status"].tolist() == ["killed"]
    assert "(1 killed)" in results.problems[0]


def test_one_corrupt_file_is_named_and_the_rest_is_shown(tmp_path):
    for name in ("a", "b", "c"):
        write_run(tmp_path / name)
    whole = (tmp_path / "b" / "links.parquet").read_bytes()
    (tmp_path / "b" / "links.parquet").write_bytes(whole[: len(whole) // 2])
    results = load(tmp_path)
    assert sorted(set(results.links["run"])) == ["a", "c"]
    assert len(results.links) == 2 * 16
    assert len(results.problems) == 1
    assert results.problems[0].startswith(f"{tmp_path}/b/links.parquet cannot be read and is left out: ")
    assert sorted(set(results.steps["run"])) == ["a", "b", "c"]

    (tmp_path / "b" / "run.parquet").write_bytes(whole[: len(whole) // 2])
    results = load(tmp_path)
    assert results.runs["run"].tolist() == ["a", "c"]
    assert sorted(set(results.steps["run"])) == ["a", "c"]
    assert len(results.problems) == 1
    assert results.problems[0].startswith(f"{tmp_path}/b/run.parquet cannot be read and is left out: ")
    assert "\n" not in results.problems[0]


def test_schemas_of_several_versions_go_together(tmp_path):
    write_run(tmp_path / "old", version=0)
    write_run(tmp_path / "new", extra={"mood": "good", "error": "none"})
    table = pq.read_table(tmp_path / "old" / "evals.parquet").drop_columns(["predictions"])
    pq.write_table(table, tmp_path / "old" / "evals.parquet")
    results = load(tmp_path)
    assert results.problems == [
        "1 of 2 runs have records of version 0, where this raysim writes 2: unknown columns are left out, "
        "and missing columns are empty, or have the default of their key."
    ]
    assert results.runs["mood"].tolist()[0] == "good"
    assert results.runs["mood"].isna().tolist() == [False, True]
    assert results.runs["error"].isna().tolist() == [False, True]
    assert results.evals.columns.tolist() == ["run", *SCHEMAS["evals"].names]


def test_foreign_run_is_left_out(tmp_path):
    write_run(tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    pq.write_table(pa.table({"loss": [1.0], "status": ["done"]}), tmp_path / "theirs" / "run.parquet")
    results = load(tmp_path)
    assert results.runs["run"].tolist() == ["ours"]
    assert results.problems == [
        f"{tmp_path}/theirs/run.parquet is left out: it is not a run of raysim, since it lacks schema_version, seed."
    ]


def test_columns_of_two_types_are_written_as_text(tmp_path):
    write_run(tmp_path / "a", extra={"data.order": "sorted", "model.width": 4})
    write_run(tmp_path / "b", extra={"data.order": 3, "model.width": 4.5})
    runs = load(tmp_path).runs
    assert runs["data.order"].tolist() == ["sorted", "3"]
    assert runs["model.width"].tolist() == [4.0, 4.5]


def test_duckdb_reads_the_same_files(made):
    results = load(made)
    query = "SELECT direction, sum(wire_bytes) AS wire_bytes FROM read_parquet(?) GROUP BY direction ORDER BY direction"
    found = duckdb.execute(query, [results.files("links")]).fetchall()
    assert dict(found) == results.links.groupby("direction", observed=True)["wire_bytes"].sum().to_dict()
    joined = duckdb.execute(
        "SELECT r.seed, count(*) FROM read_parquet(?, filename = true) s JOIN read_parquet(?, filename = true) r "
        "ON parse_dirpath(s.filename) = parse_dirpath(r.filename) GROUP BY r.seed ORDER BY r.seed",
        [f"{made}/real/*/steps.parquet", f"{made}/real/*/run.parquet"],
    ).fetchall()
    assert joined == [(0, 3), (1, 3)]


@pytest.mark.slow
def test_a_thousand_runs_open_in_little_memory(tmp_path):
    """Their own time is reported by the suite; what is asserted is memory, in a process of its own."""
    first = write_run(tmp_path / "run0000", steps=100)
    for place in range(1, 1000):
        shutil.copytree(first, tmp_path / f"run{place:04d}")
    code = f"""
import re
from pathlib import Path
from raysim.analysis import load
results = load({str(tmp_path)!r})
assert len(results.runs) == 1000
assert len(results.steps) == 100_000 and len(results.links) == 400_000
peak = re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())  # ru_maxrss knows the parent's too
assert int(peak[1]) < 1024**2, "more than 1 GiB"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
