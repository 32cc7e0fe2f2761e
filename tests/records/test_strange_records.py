"""Columns of every table of a run, changed in every way: no reader runs code, fails, or writes beside its output."""

import json
import random
from contextlib import suppress

import pytest
from raysim_findings.verdicts import findings
from record_mutations import EVIL, copy_run, mutate, mutations, train_runs
from typer.testing import CliRunner

from raysim import Run, analysis, save_pretrained
from raysim.analysis.report import compose, write_report
from raysim.cli import app
from raysim.config import ConfigError
from raysim.records import RecordsError

AT_ONCE = 50
SOUND = ("dense-s0", "dense-s1", "topk-s0", "topk-s1")
PARTS = 4
SHARE = 4  # of how many changes one is made: all take an hour


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_runs(tmp_path_factory.mktemp("strange") / "runs")


def read_together(home, out):
    """Read a folder in all ways; return what went wrong."""
    results = analysis.load(home)
    priced = analysis.replay(results, ["100mbps"], against="dense")
    wrong = [f"{run} is not priced" for run in SOUND if run not in set(priced["run"])]
    for table in ("steps", "evals", "links", "actions", "decisions"):
        results.table(table)
    findings(results)
    write_report(compose(home, ["100mbps"]), out / "report.html")
    with suppress(analysis.AnalysisError):  # runs that disagree on a column, or a table that cannot be read
        analysis.pack(home, out / "pack")
    return wrong + [f"an unprintable problem: {one!r}" for one in results.problems if not one.isprintable()]


def read_alone(run, out):
    """Read a run in all ways in which one is read."""
    try:
        shown = repr(Run(run))
    except RecordsError as error:
        shown = str(error)
    with suppress(ConfigError, RecordsError):
        save_pretrained(run, out / "model")
    replayed = CliRunner().invoke(app, ["replay", str(run), "--network", "100mbps"])
    if replayed.exit_code not in (0, 2):
        raise AssertionError(repr(replayed.exception))
    return [f"signs for a terminal: {text!r}" for text in (shown, replayed.output) if "\x1b" in text or "\x07" in text]


def wrongs(read, *places):
    try:
        return read(*places)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:200]}"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers near the largest float
@pytest.mark.parametrize("part", range(PARTS))
def test_no_changed_record_does_harm(trained, tmp_path, monkeypatch, part):
    changes = mutations(trained / "replicas")
    random.Random(0).shuffle(changes)
    changes = changes[::SHARE][part::PARTS]
    out, harm = tmp_path / "out", []
    out.mkdir()
    for first in range(0, len(changes), AT_ONCE):
        some = changes[first : first + AT_ONCE]
        home = tmp_path / f"from-{first}"
        for name in SOUND:
            copy_run(trained / name, home / name)
        (home / "evil.py").write_text(EVIL)
        for place, (table, column, change) in enumerate(some):
            source = (
                "replicas" if table in ("collectives", "decisions") else ("replicas", "topk-s0", "dense-s1")[place % 3]
            )
            mutate(copy_run(trained / source, home / f"changed-{place}"), table, column, change)
        monkeypatch.chdir(home)
        before = {path for path in home.parent.rglob("*") if out not in path.parents}
        harm += [f"{first}: {wrong}" for wrong in wrongs(read_together, home, out)]
        for place, change in enumerate(some):
            harm += [f"{change}: {wrong}" for wrong in wrongs(read_alone, home / f"changed-{place}", out)]
        new = {path for path in home.parent.rglob("*") if out not in path.parents} - before
        harm += [f"{first}: {path.relative_to(home.parent)} was written" for path in sorted(new)]
        for path in (out / "pack").glob("*"):
            path.unlink()
    assert harm == [], json.dumps(harm, indent=1)
