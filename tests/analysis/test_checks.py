"""Loading runs names every damaged table in a sentence, and is silent about sound ones."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from records_made import write_run

from raysim.analysis import load
from raysim.records import write_table


def rewritten(change):
    """Return a damage that writes a table anew as `change` has it."""

    def damage(file):
        write_table(change(pq.read_table(file)), file)

    return damage


def dangling(file):
    file.rename(file.with_name("moved"))
    file.symlink_to("gone.parquet")


def of_another_version(file):
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({b"raysim_schema_version": b"1"}), file)


def without(column):
    return rewritten(
        lambda table: table.set_column(
            table.schema.get_field_index(column),
            table.schema.field(column),
            pa.nulls(len(table), table.schema.field(column).type),
        )
    )


DAMAGES = {
    "missing": (
        lambda file: file.unlink(),
        "The run in {folder} has done 4 steps, but has no table {table}: copy it again.",
    ),
    "dangling": (dangling, "{file} is a link to gone.parquet, which is not there."),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:99]), "{file} cannot be read and is left out: "),
    "empty": (rewritten(lambda table: table[:0]), "{file} is empty, but the run has done 4 steps."),
    "version": (of_another_version, "{file} is of version 1 of the records, where its run is of 2"),
}
SHORT = {
    "steps": (
        rewritten(lambda table: table[:3]),
        "{file} has the steps 0 to 2, but the run has 0 to 3: copy it again.",
    ),
    "links": (
        rewritten(lambda table: table[4:]),
        "{file} has the steps 1 to 3, but the run has 0 to 3: copy it again.",
    ),
    "gap": (
        rewritten(lambda table: pa.concat_tables([table[:1], table[2:]])),
        "{file} has 3 rows, but the run has done 4 steps",
    ),
}


@pytest.fixture
def run(tmp_path):
    return write_run(
        tmp_path / "run", finals={"loss_on": 1.0, "accuracy_on": 0.5, "loss_off": 1.0, "accuracy_off": 0.5}
    )


def check(run, table, damage, sentence):
    assert load(run).problems == []
    file = run / f"{table}.parquet"
    damage(file)
    results = load(run)
    assert len(results.problems) == 1
    assert results.problems[0].startswith(sentence.format(folder=run, table=table, file=file))
    assert len(results.steps) <= 4
    assert len(results.problems) == 1  # said once


@pytest.mark.parametrize("table", ["steps", "evals", "links"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_named(run, table, damage):
    check(run, table, *DAMAGES[damage])


@pytest.mark.parametrize("place", SHORT)
def test_a_short_table_is_named(run, place):
    check(run, "steps" if place == "gap" else place, *SHORT[place])


@pytest.mark.parametrize(("table", "column"), [("steps", "loss"), ("evals", "loss"), ("links", "wire_bytes")])
def test_empty_column_is_named(run, table, column):
    check(run, table, without(column), f"{{file}} has no value in {column}.")


def test_run_without_exactly_one_row_is_reported_and_left_out(run):
    file = run / "run.parquet"
    table = pq.read_table(file)
    for rows, count in ((pa.concat_tables([table, table]), 2), (table[:0], 0)):
        write_table(rows, file)
        results = load(run)
        assert len(results) == 0
        assert results.problems[0] == f"{file} is left out: it must have one row, of a run, but has {count}."


def test_run_with_dangling_link_is_reported_and_left_out(run):
    (run / "run.parquet").unlink()
    (run / "run.parquet").symlink_to("gone")
    assert load(run).problems[0].startswith(f"{run}/run.parquet cannot be read and is left out: ")


@pytest.mark.parametrize("keys", [{"num_stages": 1}, {"steps": 1}, {"forward": "TopK(0.3)", "profile_every_steps": 3}])
def test_completed_run_loads_without_problems(small, tmp_path, keys):
    from raysim import train

    train(small(**keys), engine="inline", out=tmp_path / "run")
    assert load(tmp_path).problems == []
