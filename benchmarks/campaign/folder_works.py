"""What processes of `folder_worker` do in their folder: train, resume, sweep, confirm, load, pack and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from configurations import SMALL
from runs import MEASURED, break_off
from studies import BASE, write_study

from raysim import analysis
from raysim.analysis import Results
from raysim.config import ConfigError, make_config
from raysim.records import Recorder, RecordsError, Run
from raysim.storage.places import Place
from raysim.training.run import Training
from raysim.training.train import train

CONFIG = {**SMALL, "forward": "ErrorFeedback(TopK(0.3))", "evaluate_every_steps": 4}
STUDY = {
    "trials": 2,
    "engine": "inline",
    "jobs": 1,
    "objectives": ["accuracy_on"],
    "confirm": 3,
    "space": {"forward": ["Identity", "Quantize(8)", "Quantize(7)", "Quantize(6)"]},
    "symbols": None,
}


@cache
def whole_run(folder: str | Place) -> Run:
    """Return a run that nobody disturbs; its tables are read once, for all processes that are forked later."""
    run = Run(folder)
    run._table = cache(run._table)  # type: ignore[method-assign]
    return run


@cache
def whole_study() -> Results:
    """Return the study that nobody disturbs."""
    return analysis.load("../whole-study/run")


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
            check_prefix(Run("run"))
    except (analysis.AnalysisError, RecordsError) as error:
        if "There is no" not in str(error):
            raise
        return {"refused": str(error)}
    return {"read": len(steps)}


def check_prefix(run: Run) -> int:
    """Check that the records are the first of the whole run's, bit for bit; return the number of steps."""
    whole = whole_run("../whole/run")
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
    from raysim.analysis.report import compose, write_report

    try:
        write_report(compose("run"), Path("report.html"))
    except analysis.AnalysisError as error:
        return {"refused": str(error)}
    return {"reported": True}


def sweep(*, resume: bool, confirm: bool = False) -> dict[str, Any]:
    """Sweep without Ray and Tune: trials are trained one after another in this process."""
    from raysim.sweeps import confirm as confirmation
    from raysim.sweeps.allocation import Allocation, Share
    from raysim.sweeps.runner import Sweep
    from raysim.sweeps.search import LedgerSearch
    from raysim.sweeps.study_file import read_study
    from raysim.sweeps.trial import SweepTrial

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

    allocation = Allocation("inline", Share(1.0, 0.0, 1), 1)
    confirmation.fresh_seeds = lambda study: [max(study.seeds) + 1]  # one is enough here
    Sweep._tune, Sweep._ray, Sweep._allocate = tune, no_ray, lambda self: allocation
    confirmed = []
    try:
        made = Sweep(read_study("../small.toml"), out="run", resume=resume)
        made.run()
        if confirm and (second := confirmation.confirming(made)) is not None:
            second.run()
            confirmed = [row.status for row in second.rows]
    except ConfigError as error:
        return {"refused": str(error)}
    return {"status": "finished", "trials": [row.status for row in made.rows], "confirmed": confirmed}


WORKS: dict[str, Callable[[], dict[str, Any]]] = {
    "train": lambda: _train(resume=False),
    "resume": lambda: _train(resume=True),
    "load": _load,
    "pack": _pack,
    "report": _report,
    "sweep": lambda: sweep(resume=False),
    "resume-sweep": lambda: sweep(resume=True),
    "confirm": lambda: sweep(resume=True, confirm=True),
}
WRITERS = ("train", "resume", "sweep", "resume-sweep", "confirm")


def _interrupted() -> dict[str, Any]:
    break_off(Training(make_config(CONFIG), out="run", engine="inline"), 4)
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
KILLED_IN = "trials/1-s0/checkpoints"  # in the second trial of `half-study`


def write_study_file(folder: Path) -> None:
    """Write the study that is swept, beside the folders of the works."""
    write_study(folder, base=BASE | {"steps": 2, "checkpoint_every_steps": 1}, **STUDY)
