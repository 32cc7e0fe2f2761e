"""What came of processes in a folder: `judge` works in it, and finishes what they left."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from configurations import SMALL
from folder_works import CONFIG, WRITERS, check_prefix, sweep, whole_run, whole_study
from runs import same_records, same_tables

from raysim import analysis
from raysim.config import make_config
from raysim.records import FINISHED, Run
from raysim.training.train import train


def judge(outcomes: list[dict[str, Any]], works: list[str | None], mode: str, *, study: bool) -> dict[str, Any]:
    """Return the harm that processes have done; in the mode `POWER`, that of a folder whose process had ended, or had not."""
    failed = [
        one["error"] + f" {one.get('at')}"
        for one in outcomes
        if "error" in one and not (one["system"] and mode[0] == "E")
    ]
    if failed:
        return {"harm": failed[0]}
    try:
        if mode == "hold":
            ends = [one for one, work in zip(outcomes, works, strict=True) if work in WRITERS]
            done = study or any("status" in one for one in ends) or Run("run").status in FINISHED
            assert not ends or done, f"all refused: {ends}"
            left = [str(path) for path in Path().rglob(".*")]
            assert not left, f"left behind: {left}"
        if Path("packed").exists():
            _judge_pack(study=study)
        if Path("report.html").exists():
            assert Path("report.html").read_text().rstrip().endswith("</html>")
        if study:
            _judge_study(confirmed="confirm" in works)
        else:
            _judge_run(outcomes, works)
    except Exception as error:
        frames = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
        return {"harm": f"{type(error).__name__}: {str(error)[:600]} ({' '.join(frames)})"}
    return {"harm": None}


def _judge_pack(*, study: bool) -> None:
    """Check that a pack has runs, and each of them is whole."""
    packed = analysis.load("packed")
    shown = [problem for problem in packed.problems if not study or "trial" not in problem]
    assert not shown, packed.problems
    assert len(packed)
    for run in packed.runs["run"]:
        if study:
            same_tables(Run(packed.path(run)), whole_run(whole_study().path(run)))
        else:
            assert check_prefix(Run(packed.path(run))) == SMALL["steps"]


def _judge_run(outcomes: list[dict[str, Any]], works: list[str | None]) -> None:
    whole = whole_run("../whole/run")
    if Path("run/run.parquet").exists():
        check_prefix(Run("run"))
        assert not [problem for problem in analysis.load("run").problems if "finished" not in problem]
    if any(one.get("status") == "finished" for one in outcomes):
        assert Run("run").status == "finished", Run("run").status
    if not Path("run/run.parquet").exists() or Run("run").status not in FINISHED:
        if not any(work in WRITERS for work in works) and not Path("run").exists():
            return
        resume = Path("run/run.parquet").exists()
        train(make_config(CONFIG), out="run", engine="inline", resume=resume, progress=False)
    same_records(Run("run"), whole)
    left = [str(path) for path in Path("run").rglob(".*") if path.name != ".lock"]
    assert not left, f"left behind: {left}"


def _judge_study(*, confirmed: bool) -> None:
    done = sweep(resume=Path("run/study.toml").exists(), confirm=confirmed)
    assert "refused" not in done, done
    assert set(done["confirmed"]) <= {"finished"}, done
    mine, whole = analysis.load("run"), whole_study()
    assert [one for one in mine.problems if one not in whole.problems] == [], mine.problems
    alike = ["trial", "name", "status", "notation", "objective.accuracy_on"]
    own = mine.trials[mine.trials["study"] == whole.trials["study"].iloc[0]] if confirmed else mine.trials
    assert own[alike].reset_index(drop=True).equals(whole.trials[alike]), mine.trials[alike].to_string()
    for run in whole.runs["run"]:
        same_records(Run(mine.path(run)), whole_run(whole.path(run)))
