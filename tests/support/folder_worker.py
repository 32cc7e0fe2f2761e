"""Carries out plans of `folder_orders`: `python folder_worker.py FOLDER < plans`, a list in JSON; each verdict is a line.

Every process is forked from this one, which has imported everything and computes nothing, and so has no threads.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from configurations import SMALL
from file_calls import Process
from folder_orders import Plan, Verdict
from runs import MEASURED, same_records
from studies import BASE, write_study

from raysim import analysis
from raysim.config import ConfigError, make_config
from raysim.records import FINISHED, Recorder, RecordsError, Run
from raysim.training.run import Training
from raysim.training.train import train

CONFIG = {**SMALL, "forward": "ErrorFeedback(TopK(0.3))", "evaluate_every_steps": 4}
BLOCKED_S = 10.0  # after which a process is taken to wait for the one that is held
STUDY = {"trials": 2, "engine": "inline", "jobs": 1, "objectives": ["accuracy_on"]}


def _train(*, resume: bool) -> dict[str, Any]:
    try:
        return {"status": train(make_config(CONFIG), out="run", engine="inline", resume=resume, progress=False).status}
    except ConfigError as error:
        return {"refused": str(error)}


def _load() -> dict[str, Any]:
    """Read the run as it is: a part of the whole, without a gap, whatever is done to it meanwhile."""
    try:
        results = analysis.load("run")
        steps = results.steps["step"].tolist()
        for run, rows in results.steps.groupby("run", observed=True):
            assert rows["step"].tolist() == list(range(len(rows))), f"steps of {run}: {rows['step'].tolist()}"
        shown = [
            problem for problem in results.problems if "not finished" not in problem and "finished (" not in problem
        ]
        assert not [problem for problem in shown if "There is no run in" not in problem], shown
        if Path("run/run.parquet").exists():
            _check_prefix(Run("run"))
    except (analysis.AnalysisError, RecordsError) as error:
        if "There is no" not in str(error):
            raise
        return {"refused": str(error)}
    return {"read": len(steps)}


def _check_prefix(run: Run) -> int:
    """Check that the records are the first of the whole run's, bit for bit; return the number of steps."""
    whole = Run("../whole/run")
    for table in ("steps", "links", "evals"):
        have, want = (getattr(one, table).drop(columns=MEASURED, errors="ignore") for one in (run, whole))
        assert have.empty or have.equals(want.head(len(have))), f"{table}: {have['step'].tolist()}"
        if table == "links" and len(have):
            last = have["step"].iloc[-1]
            assert len(have) == (want["step"] <= last).sum(), f"a part of step {last}"
    return len(run.steps)


def _pack() -> dict[str, Any]:
    try:
        return {"packed": analysis.pack("run", "packed").runs}
    except analysis.AnalysisError as error:
        return {"refused": str(error)}


def _report() -> dict[str, Any]:
    from raysim.analysis.report import write_report

    try:
        write_report("run", Path("report.html"))
    except analysis.AnalysisError as error:
        return {"refused": str(error)}
    return {"reported": True}


def _sweep(*, resume: bool) -> dict[str, Any]:
    """Sweep without Ray and Tune: trials are trained one after another in this process."""
    from raysim.sweeps.allocation import Allocation
    from raysim.sweeps.runner import Sweep
    from raysim.sweeps.search import LedgerSearch
    from raysim.sweeps.study_file import read_study
    from raysim.sweeps.trial import SweepTrial
    from raysim.sweeps.trial_resources import Share

    def tune(self: Sweep) -> None:
        self.search = LedgerSearch(self.ledger, lambda going: 1, self._spec)
        while isinstance(spec := self.search.suggest("trial"), dict):
            trial = SweepTrial.__new__(SweepTrial)
            trial.setup(spec)
            for result in trial._reports:
                if not result.get("done"):
                    self.search.on_trial_result("trial", result)
            self.search.on_trial_complete("trial", result)

    @contextmanager
    def no_ray(self: Sweep) -> Iterator[None]:
        yield

    allocation = Allocation("inline", Share(1.0, 0.0, 1), 1, None, 1)
    Sweep._tune, Sweep._ray, Sweep._allocate = tune, no_ray, lambda self: allocation
    try:
        sweep = Sweep(read_study("../small.toml"), out="run", resume=resume)
        sweep.run()
    except ConfigError as error:
        return {"refused": str(error)}
    return {"status": "finished", "trials": [row.status for row in sweep.rows]}


WORKS: dict[str, Callable[[], dict[str, Any]]] = {
    "train": lambda: _train(resume=False),
    "resume": lambda: _train(resume=True),
    "load": _load,
    "pack": _pack,
    "report": _report,
    "sweep": lambda: _sweep(resume=False),
    "resume-sweep": lambda: _sweep(resume=True),
}
WRITERS = ("train", "resume", "sweep", "resume-sweep")


def _judge(outcomes: list[dict[str, Any]], works: list[str | None], mode: str) -> dict[str, Any]:
    """Return the harm that two processes have done."""
    failed = [
        one["error"] + f" {one.get('at')}"
        for one in outcomes
        if "error" in one and not (one["system"] and mode[0] == "E")
    ]
    if failed:
        return {"harm": failed[0]}
    study = any("sweep" in work for work in works if work)
    try:
        if mode == "hold":
            ends = [one for one, work in zip(outcomes, works, strict=True) if work in WRITERS]
            assert not ends or any("status" in one for one in ends) or Run("run").status in FINISHED, (
                f"all refused: {ends}"
            )
            left = [str(path) for path in Path().rglob(".*")]
            assert not left, f"left behind: {left}"
        if not study:
            _judge_run(outcomes, works)
        else:
            _judge_study()
        if Path("report.html").exists():
            assert Path("report.html").read_text().rstrip().endswith("</html>")
        if Path("packed").exists():
            packed, (run,) = analysis.load("packed"), analysis.load("packed").runs["run"]
            assert not packed.problems, packed.problems
            assert _check_prefix(Run(packed.path(run))) == SMALL["steps"]
    except Exception as error:
        return {"harm": f"{type(error).__name__}: {error}"}
    return {"harm": None}


def _judge_run(outcomes: list[dict[str, Any]], works: list[str | None]) -> None:
    whole = Run("../whole/run")
    if Path("run/run.parquet").exists():
        _check_prefix(Run("run"))
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


def _judge_study() -> None:
    _sweep(resume=Path("run/study.toml").exists())
    mine, whole = analysis.load("run"), analysis.load("../whole-study/run")
    assert mine.problems == whole.problems, mine.problems
    alike = ["trial", "name", "status", "notation", "objective.accuracy_on"]
    assert mine.trials[alike].equals(whole.trials[alike]), mine.trials[alike].to_string()
    for run in whole.runs["run"]:
        same_records(Run(mine.path(run)), Run(whole.path(run)))


def _interrupted() -> dict[str, Any]:
    events = Training(make_config(CONFIG), out="run", engine="inline").events()
    while next(events).row.get("step") != 3:
        pass
    events.close()
    return {}


def _unmerged() -> dict[str, Any]:
    """Train until all tables are merged, and the run is not over in `run.parquet`: a kill in the compaction."""
    compact = Recorder.compact

    def stop(self: Recorder) -> None:
        compact(self)
        raise KeyboardInterrupt

    Recorder.compact = stop
    Recorder.write_run = lambda self, row, write=Recorder.write_run: write(self, row | {"status": "running"})  # type: ignore[misc]
    try:
        train(make_config(CONFIG), out="run", engine="inline", progress=False)
    except KeyboardInterrupt:
        Path("run/.lock").touch()
    return {}


STARTS = {
    "nothing": None,
    "broken": _interrupted,
    "unmerged": _unmerged,
    "whole": WORKS["train"],
    "whole-study": WORKS["sweep"],
    "half-study": WORKS["sweep"],
}
KILLED = {"half-study": 290}  # the operation at which a start is killed: in the second trial


HANGS: dict[str, Any] = {"error": "it hangs", "system": False}


def carry_out(plan: Plan, folder: Path) -> Verdict:
    """Carry out a plan in a copy of its start, and judge what came of it."""
    home = folder / "case"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(folder / plan.start, home)
    first = Process(WORKS[plan.first], home, plan.at, plan.mode)
    said = first.wait() or HANGS
    held, killed = "held" in said, "killed" in said
    outcomes, works = [] if held or killed else [said], [plan.first, plan.second]
    if plan.second is not None:
        second = Process(WORKS[plan.second], home)
        answer = second.wait(BLOCKED_S if held else 120)
        if held:
            first.go_on()
            outcomes.append(first.wait() or HANGS)
        outcomes.append(answer or second.wait() or HANGS)
    calls = next((one["calls"] for one in outcomes if "calls" in one), 0)
    judged = Process(lambda: _judge(outcomes, works, plan.mode), home).wait() or HANGS
    harm = judged.get("harm", judged.get("error"))
    where = said.get("held") or said.get("killed") or "".join(said.get("failed", []))
    return Verdict(calls, bool(where), harm and f"{harm} ({where})", outcomes)


def main() -> None:
    """Make the starts that plans need, then carry them out."""
    folder, plans = Path(sys.argv[1]).resolve(), [Plan(*plan) for plan in json.load(sys.stdin)]
    torch.set_num_threads(1)
    starts = {"whole", *(plan.start for plan in plans)}
    if any("sweep" in plan.first for plan in plans):
        starts.add("whole-study")
        write_study(folder, base=BASE | {"steps": 2, "checkpoint_every_steps": 1}, **STUDY)
    for name in starts:
        (folder / name).mkdir()
        if (work := STARTS[name]) is not None:
            said = Process(work, folder / name, KILLED.get(name), "kill").wait()
            assert said is not None, name
            assert "error" not in said, said
    for plan in plans:
        print(json.dumps(carry_out(plan, folder)._asdict()), flush=True)


if __name__ == "__main__":
    main()
