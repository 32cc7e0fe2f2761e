"""A pack reads as the folder that was packed: every row, value, price and verdict; and what cannot be packed or read is refused."""

import shutil

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from configurations import SMALL
from raysim_findings.finding import findings_frame
from raysim_findings.verdicts import findings
from records_made import write_run, write_study
from report_runs import copy_run
from typer.testing import CliRunner

from raysim import Run, train
from raysim.analysis import AnalysisError, load, pack, replay
from raysim.analysis.report import compose
from raysim.analysis.runs import pack as pack_module
from raysim.cli import app
from raysim.config import make_config
from raysim.records import SCHEMAS, write_table

TABLES = ("runs", *(table for table in SCHEMAS if table != "collectives"), "trials")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, report_runs):
    """Return a folder with a study and its confirmation, runs of other keys, measures and tables, and runs that are not over."""
    folder = tmp_path_factory.mktemp("packs") / "results"
    runs = {0: [], 1: []}
    for trial, setting in enumerate(("dense", "topk")):
        for seed in (0, 1):
            run = f"trials/{trial}-s{seed}"
            runs[trial].append(run)
            copy_run(report_runs / f"{setting}-s{1 + seed}", folder / "study" / run, seed=seed)
    trials = [
        {"runs": runs[trial], "objective.accuracy_on": 0.5, "param.forward.density": density}
        for trial, density in enumerate((None, 0.1))
    ]
    made = write_study(folder / "made", trials, objectives={"accuracy_on": "maximize"})
    for file in made.iterdir():
        shutil.move(file, folder / "study")
    confirm = write_study(
        folder / "study" / "confirm",
        [{"runs": ["trials/0-s7"], "objective.accuracy_on": 0.5}],
        objectives={"accuracy_on": "maximize"},
    )
    copy_run(report_runs / "dense-s3", confirm / "trials" / "0-s7", seed=7)
    gradients = {"num_stages": 1, "num_replicas": 2, "steps": 8, "profile_every_steps": 1}
    adaptive = "GraVAC(2, 16, epsilon=0.5, window=2)"
    train(
        make_config(SMALL | gradients | {"replica_gradient": adaptive}),
        engine="inline",
        out=folder / "adaptive" / "run",
    )
    train(make_config(SMALL | {"metrics": "top5_accuracy", "steps": 4}), engine="inline", out=folder / "measured")
    write_run(folder / "diverged", status="diverged", forward="TopK(0.5)")
    write_run(folder / "broke off", status="interrupted")
    return folder


@pytest.fixture(scope="module")
def over(folder, tmp_path_factory):
    """Return the folder without the run that is not over."""
    copy = tmp_path_factory.mktemp("over") / "results"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("broke off"))
    return copy


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "results"
    assert pack(folder, target)[:3] == (8, 2, 1)
    return target


def test_tables_read_equal_before_and_after_packing(over, packed):
    before, after = load(over), load(packed)
    assert len(before) == 8
    assert after.problems == before.problems
    for table in TABLES:
        wanted = getattr(before, table)
        assert len(wanted), table
        pd.testing.assert_frame_equal(getattr(after, table), wanted)
    pd.testing.assert_frame_equal(after.table("collectives"), before.table("collectives"))
    assert after.keys == before.keys
    assert after.measures == before.measures
    for study in ("study", "study/confirm"):
        assert after.directions(study) == before.directions(study) == {"accuracy_on": "maximize"}
        assert after.planned_seeds(study) == before.planned_seeds(study)


def test_columns_and_rows_are_read_on_request(over, packed):
    before, after = (load(place).select(["study/trials/1-s0", "adaptive/run"]) for place in (over, packed))
    for where in (None, [("direction", "==", "forward")]):
        wanted = before.table("links", ["step", "wire_bytes"], where=where)
        assert len(wanted)
        pd.testing.assert_frame_equal(after.table("links", ["step", "wire_bytes"], where=where), wanted)


@pytest.mark.slow
def test_prices_and_findings_are_those_of_the_folder(over, packed):
    pd.testing.assert_frame_equal(replay(load(packed), ["100mbps"]), replay(load(over), ["100mbps"]))
    frames = [findings_frame(findings(load(place / "study"))).drop(columns="commands") for place in (over, packed)]
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.slow
def test_the_report_is_that_of_the_folder(over, packed):
    pages = [compose(place / "study", ["100mbps"]) for place in (packed, over)]
    keys = [[section.key for section in page.sections] for page in pages]
    assert keys[0] == keys[1]
    assert "frontier" in keys[0]


def test_a_run_of_a_pack_is_opened_by_its_path(over, packed):
    name = "study/trials/1-s1"
    before, after = Run(over / name), Run(packed / name)
    assert after.row == before.row
    for table in ("steps", "evals", "links", "actions", "collectives", "decisions"):
        pd.testing.assert_frame_equal(getattr(after, table), getattr(before, table))
    prices = [
        CliRunner().invoke(app, ["replay", str(place / name), "--network", "100mbps"]) for place in (over, packed)
    ]
    shown = [done.output.replace(str(place), "") for done, place in zip(prices, (over, packed), strict=True)]
    assert shown[0] == shown[1]
    assert "pooled over 4 runs" in shown[0]
    alone = CliRunner().invoke(app, ["replay", str(packed / "measured"), "--network", "100mbps"])
    assert "this run alone" in alone.output
    assert load(packed / "study" / "trials").runs["run"].tolist() == ["0-s0", "0-s1", "1-s0", "1-s1"]


def test_packing_a_pack_changes_nothing(packed, tmp_path):
    pack(packed, tmp_path / "again")
    files = sorted(file.relative_to(packed) for file in packed.rglob("*") if file.is_file())
    assert (
        sorted(file.relative_to(tmp_path / "again") for file in (tmp_path / "again").rglob("*") if file.is_file())
        == files
    )
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (packed / file).read_bytes()


def test_a_pack_is_small_and_its_tables_are_open_to_others(over, packed):
    sizes = [sum(file.stat().st_size for file in place.rglob("*.parquet")) for place in (over, packed)]
    assert sizes[1] < sizes[0] / 3
    (file,) = load(packed).files("steps")
    counts = duckdb.execute("select run, count(*) from read_parquet(?) group by run", [file]).fetchall()
    steps = load(over).steps
    assert dict(counts) == steps.groupby("run", observed=True).size().to_dict()


def test_packs_and_run_folders_mix_at_any_depth(over, packed, tmp_path):
    shutil.copytree(packed, tmp_path / "all" / "packed")
    shutil.copytree(over / "measured", tmp_path / "all" / "plain")
    (tmp_path / "all" / "notes").mkdir()
    load(over).runs.to_parquet(tmp_path / "all" / "notes" / "runs.parquet")  # which makes no pack
    runs = load(tmp_path / "all").runs
    assert sorted(runs["run"]) == sorted([*(f"packed/{run}" for run in load(packed).runs["run"]), "plain"])
    assert set(runs["study"].dropna()) == {"packed/study", "packed/study/confirm"}
    both = load(packed, over / "measured").runs["run"].tolist()
    assert len(both) == 9
    assert f"{packed}/measured" in both


def test_a_single_run_is_packed_by_its_name(over, tmp_path):
    assert pack(over / "measured", tmp_path / "one").runs == 1
    assert load(tmp_path / "one").runs["run"].tolist() == ["measured"]


def test_unpackable_runs_are_refused_before_writing(folder, over, packed, tmp_path, monkeypatch):
    def refused(source, target=tmp_path / "new"):
        done = CliRunner().invoke(app, ["pack", str(source), str(target)])
        assert done.exit_code == 2, done.output
        return done.stderr.strip().removeprefix("raysim: ")

    new = "`target` must be a new or empty folder, but "
    assert refused(over, packed) == f"{new}{packed} holds files."
    assert refused(over, over / "measured" / "run.parquet").endswith("run.parquet is not a folder.")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert refused(over, tmp_path / "link") == f"{new}{tmp_path}/link is not a folder."
    assert refused(over, "s3://bucket/packed").startswith("`target` must be a folder of this machine, but got 's3://")
    assert refused(tmp_path / "none") == f"There is no folder {tmp_path}/none."
    (tmp_path / "bare").mkdir()
    assert refused(tmp_path / "bare") == f"There is no run in {tmp_path}/bare: no folder there has a run.parquet."
    assert refused(folder / "broke off").startswith("None of the 1 runs is finished (1 interrupted)")
    shutil.copytree(over / "measured", tmp_path / "damaged")
    (tmp_path / "damaged" / "steps.parquet").write_bytes(b"PAR1 and no more")
    assert refused(tmp_path / "damaged").startswith(f"{tmp_path}/damaged/steps.parquet cannot be read: ")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["bare", "damaged", "link"]
    monkeypatch.chdir(tmp_path / "bare")
    assert CliRunner().invoke(app, ["pack", str(over), "."]).exit_code == 0
    assert len(load(tmp_path / "bare")) == 8
    assert pack(over, f"file://{tmp_path}/by%20uri").runs == 8
    assert len(load(tmp_path / "by uri")) == 8


def test_damage_is_reported_in_one_sentence(packed, tmp_path):
    cut = shutil.copytree(packed, tmp_path / "cut")
    whole = (cut / "links.parquet").read_bytes()
    (cut / "links.parquet").write_bytes(whole[:100] + bytes(byte ^ 0xFF for byte in whole[100:140]) + whole[140:])
    results = load(cut)
    assert results.links.empty
    (problem,) = results.problems
    assert problem.startswith(f"{cut}/links.parquet cannot be read and is left out: ")
    assert len(results.steps)
    whole = (cut / "runs.parquet").read_bytes()
    (cut / "runs.parquet").write_bytes(whole[: len(whole) // 2])
    results = load(cut)
    assert len(results) == 0
    assert results.problems[0].startswith(f"{cut}/runs.parquet cannot be read: ")
    done = CliRunner().invoke(app, ["findings", str(cut)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"raysim: {cut}/runs.parquet cannot be read: ")


@pytest.mark.parametrize(
    ("version", "columns", "sentence"),
    [
        ("2", {"run": ["a"]}, "is a pack of version 2, but this raysim reads 1."),
        ("1", {"run": ["a"]}, "runs.parquet cannot be read: it lacks row, tables."),
    ],
)
def test_unknown_pack_version_is_reported(version, columns, sentence, tmp_path):
    table = pa.table(columns)
    with pq.ParquetWriter(tmp_path / "runs.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"raysim_pack": version})
    assert load(tmp_path).problems[0].endswith(sentence)


def test_unreadable_file_of_that_name_does_not_block_packing(tmp_path):
    (tmp_path / "runs.parquet").write_text("run,seed\n")
    run = train(make_config(SMALL | {"steps": 2}), engine="inline", out=tmp_path / "results" / "a")
    assert run.status == "finished"
    (tmp_path / "results" / "runs.parquet").touch()
    results = load(tmp_path / "results")
    assert results.runs["run"].tolist() == ["a"]
    assert [problem.partition(" cannot")[0] for problem in results.problems] == [f"{tmp_path}/results/runs.parquet"]
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "results" / "a"), "--network", "1gbps"]).exit_code == 0
    assert Run(tmp_path / "results" / "a").steps["step"].tolist() == [0, 1]


def test_every_type_of_a_row_is_kept(tmp_path):
    values = {"a": 0, "b": 0.5, "c": None, "d": "text"}
    for name, value in values.items():
        write_run(tmp_path / "runs" / name, extra={"model.dropout": value, "shape": [1, 2]}.items())
    pack(tmp_path / "runs", tmp_path / "packed")
    for name in values:
        before, after = Run(tmp_path / "runs" / name).row, Run(tmp_path / "packed" / name).row
        assert after == before
        assert {key: type(value) for key, value in after.items()} == {key: type(value) for key, value in before.items()}
    pd.testing.assert_frame_equal(load(tmp_path / "packed").runs, load(tmp_path / "runs").runs)


def test_tables_without_rows_and_tables_that_are_not_there_stay_so(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, steps=4)
    (tmp_path / "runs" / "b" / "evals.parquet").unlink()
    packed = pack(tmp_path / "runs", tmp_path / "packed")
    before, after = load(tmp_path / "runs"), load(tmp_path / "packed")
    assert packed.problems == before.problems
    assert [problem.replace("packed", "runs") for problem in after.problems] == before.problems
    assert len(before.problems) == 1
    assert after.actions.empty
    assert len(after.links) == len(before.links) > 0


def test_runs_beside_a_pack_in_its_folder_are_read_on_one_thread_too(packed, tmp_path, request):
    mixed = shutil.copytree(packed, tmp_path / "mixed")
    for place in range(6):
        write_run(mixed / f"0-{place}")
    (mixed / "0-0" / "parts").mkdir()
    (mixed / "0-0" / "steps.parquet").rename(mixed / "0-0" / "parts" / "steps-00000.parquet")
    steps = len(load(packed).steps)
    threads = pa.cpu_count()
    request.addfinalizer(lambda: pa.set_cpu_count(threads))
    pa.set_cpu_count(1)
    results = load(mixed)
    assert [len(results), len(results.steps), len(results.files("steps"))] == [14, steps + 24, 7]


def test_runs_with_conflicting_columns_are_packed_separately(tmp_path):
    for name, value in (("a", 1), ("b", "two")):
        run = write_run(tmp_path / "runs" / name)
        rows = pq.read_table(run / "steps.parquet")
        pq.write_table(rows.append_column("note", [[value] * len(rows)]), run / "steps.parquet")
    with pytest.raises(
        AnalysisError, match=r"^The runs disagree on a column of steps\.parquet: pack them separately\. "
    ):
        pack(tmp_path / "runs", tmp_path / "packed")


def test_parts_of_a_table_are_joined(tmp_path):
    run = write_run(tmp_path / "runs" / "a")
    rows = pq.read_table(run / "steps.parquet")
    (run / "parts").mkdir()
    for place in range(2):
        write_table(rows.slice(2 * place, 2), run / "parts" / f"steps-{place:05d}.parquet")
    wanted = load(tmp_path / "runs").steps
    (run / "steps.parquet").unlink()
    pack(tmp_path / "runs", tmp_path / "packed")
    pd.testing.assert_frame_equal(load(tmp_path / "packed").steps, wanted)


def test_a_pack_that_another_process_has_written_meanwhile_is_kept(over, tmp_path, monkeypatch):
    writing, target = pack_module.stacked, tmp_path / "packed"

    def overtaken(*arguments):
        monkeypatch.setattr(pack_module, "stacked", writing)
        pack(over / "measured", target)
        return writing(*arguments)

    monkeypatch.setattr(pack_module, "stacked", overtaken)
    with pytest.raises(AnalysisError) as error:
        pack(over, target)
    assert str(error.value) == f"`target` must be a new or empty folder, but {target} holds files."
    assert load(target).runs["run"].tolist() == ["measured"]
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
