"""The pages of docs/findings say what the runs beside them say, and `raysim findings` prints the same verdicts."""

import json

import keep_findings
import make_findings
import pytest
from configurations import SMALL
from findings_index import coverage, deviations
from make_findings import DATA, PAGES, decided
from numpy.testing import assert_allclose
from pandas.testing import assert_frame_equal
from raysim_findings.finding import findings_frame
from typer.testing import CliRunner

from raysim import train
from raysim.analysis import load
from raysim.cli import app
from raysim.config import make_config

STUDIES = sorted(folder.name for folder in DATA.iterdir())

pytestmark = pytest.mark.slow


def test_kept_studies_exist():
    assert STUDIES


@pytest.mark.timeout(900)
def test_findings_pages_match_kept_runs():
    for page, text in make_findings.written(make_findings.pages()).items():
        assert page.read_text(encoding="utf-8") == text, f"{page} is not what its runs say: run `make findings`."


@pytest.mark.parametrize("study", STUDIES)
def test_findings_command_prints_verdicts_of_page(study, tmp_path):
    command = ["findings", str(DATA / study), "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    page = (PAGES / f"{study}.md").read_text(encoding="utf-8")
    verdicts = decided(load(DATA / study))
    assert bool(verdicts) == ("<!-- verdicts -->" in page)
    for one in verdicts:
        assert f"| {one.claim.text} | **{one.verdict}** |" in page
        assert f"{one.verdict:<12} {one.claim.text}" in done.output
    assert json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize("study", STUDIES)
def test_kept_runs_are_finished_and_of_planned_seeds(study):
    results = load(DATA / study)
    assert results.problems == []
    assert set(results.runs["status"]) == {"finished"}
    assert set(results.runs["seed"]) <= set(results.planned_seeds(results.runs["study"].iloc[0]))
    assert set(results.runs["host"].fillna("")) == {""}


def test_kept_runs_total_under_14_mb():
    assert sum(file.stat().st_size for file in DATA.rglob("*.parquet")) < 14_000_000


def test_bounds_have_stated_coverage_on_recorded_spreads():
    """Five seeds are drawn from the deviations of the recorded harms, scaled alike; each bound holds the mean in 95 % of draws."""
    spread = [value for study in STUDIES for value in deviations(load(DATA / study))]
    for share in coverage(spread):
        assert 0.93 < share < 0.97


def test_keep_findings_changes_only_size_and_rounding(monkeypatch, tmp_path):
    small_study, kept = tmp_path / "study", tmp_path / "kept"
    for place, forward in enumerate(["Identity", "TopK(0.1)", "ErrorFeedback(TopK(0.1))"]):
        for seed in (0, 1, 2):
            config = make_config(SMALL | {"forward": forward, "backward": forward, "seed": seed, "steps": 20})
            train(config, engine="inline", out=small_study / "trials" / f"{place}-s{seed}")
    (small_study / "study.toml").write_text('name = "small"\nseeds = [0, 1, 2]\n')
    monkeypatch.setattr(keep_findings, "DATA", kept)
    keep_findings.keep(small_study)
    (folder,) = kept.iterdir()
    before, after = load(small_study), load(folder)
    assert sorted(after.runs["run"]) == sorted(before.runs["run"])
    for table in ("steps", "evals", "links", "actions"):
        now, then = after.table(table), before.table(table)
        for column in set(keep_findings.DIGITS) & set(then.columns):
            assert_allclose(now.pop(column), then.pop(column), rtol=2.0 ** -keep_findings.DIGITS[column])
        assert now.astype(str).equals(then.astype(str))
    frames = [findings_frame(decided(results)) for results in (after, before)]
    assert_frame_equal(*(frame.drop(columns="commands") for frame in frames))  # commands name the folder
    size = {place: sum(file.stat().st_size for file in place.rglob("*.parquet")) for place in (small_study, folder)}
    assert size[folder] < size[small_study]
