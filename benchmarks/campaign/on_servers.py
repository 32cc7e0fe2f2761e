"""Attacks on Ray's control plane: each of its processes is killed, asked to end or stopped, in each phase of a run and of a sweep."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asking import KEYS as OF_A_RUN
from asking import PHASES, SENDER, Phase, left_of
from commands import COMMAND, LIMIT_S, as_on_a_terminal, difference, train_command
from on_sweeps import STUDY, sweep_command, sweep_ends
from studies import write_study

from raysim.records import Run
from raysim.training.train import train

PROCESSES = {
    "the GCS": ["gcs_server "],
    "the raylet": ["raylet "],
    "the autoscaler's monitor": ["_private/monitor.py"],
    "the dashboard": ["dashboard/dashboard.py"],
    "the log monitor": ["log_monitor.py"],
    "the dashboard's agent": ["ray::DashboardAgent", "dashboard/agent.py"],
    "the agent of environments": ["ray::RuntimeEnvAgent", "runtime_env/agent/main.py"],
    "a stage": ["ray::StageActor"],
    "a trial": ["ray::SweepTrial"],
}
"""Words of which the command line has one."""
BLOWS = {
    "killed": signal.SIGKILL,
    "asked to end": signal.SIGTERM,
    "stopped for a while": signal.SIGSTOP,
    "stopped for good": signal.SIGSTOP,
}
KEYS = [*OF_A_RUN, "timeout_s=60"]  # for which a stage may be stopped
RUN_PHASES = {
    **{name: phase for name, phase in PHASES.items() if name != "in the compaction"},
    "while Ray ends": Phase("raysim.engine.ray:end_ray", 1, 0.05),
}
SWEEP_PHASES = {
    "while Ray starts": Phase("raysim.sweeps.runner:start_ray", 1, 4.0),
    "in its trials": Phase("raysim.sweeps.runner:run_tune", 1, 25.0),
    "while Ray ends": Phase("raysim.sweeps.runner:end_ray", 1, 0.05),
}
MISSES = 4  # moments in a row at which there is no such process


class Blow(NamedTuple):
    """Which process is hit, how and when."""

    process: str
    blow: str
    phase: str

    def __str__(self) -> str:
        return f"{self.process} {self.blow} {self.phase}"


class Done(NamedTuple):
    """The end of a command whose Ray was hit."""

    code: int
    said: str
    left: list[str]


def run_blows() -> list[Blow]:
    """Return every blow to a run."""
    return _every(RUN_PHASES, [name for name in PROCESSES if name != "a trial"])


def sweep_blows() -> list[Blow]:
    """Return every blow to a sweep."""
    return _every(SWEEP_PHASES, [*PROCESSES])


def _every(phases: dict[str, Phase], processes: Sequence[str]) -> list[Blow]:
    return [
        Blow(process, blow, phase)
        for process in processes
        for blow in BLOWS
        for phase in phases
        if not (process in ("a stage", "a trial") and phase in ("while Ray starts", "while Ray ends"))
    ]


def strike_runs(blows: Sequence[Blow], folder: Path) -> list[str]:
    """Hit a run by each blow; return the harm: other bits, no sentence, a wrong exit code, or a process that is left."""
    whole, harm = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), []
    for number, blow in enumerate(blows):
        out = folder / f"run-{number}"
        words = train_command("ray", out, KEYS)[len(COMMAND) - 2 :]
        harm += _harms(blow, RUN_PHASES, words, partial(_run_ends, out, whole))
        shutil.rmtree(out, ignore_errors=True)
    return harm


def strike_sweeps(blows: Sequence[Blow], folder: Path) -> list[str]:
    """Hit a sweep by each blow; return the harm, a lost trial among it."""
    path, harm = write_study(folder, trials=2, base=STUDY, jobs=1, engine="ray"), []
    for number, blow in enumerate(blows):
        out = folder / f"sweep-{number}"
        words = sweep_command(path, out)[3:]
        harm += _harms(blow, SWEEP_PHASES, words, partial(sweep_ends, path, out))
        shutil.rmtree(out, ignore_errors=True)
    return harm


def _run_ends(out: Path, whole: Run) -> list[str]:
    return difference(out, "inline", whole, KEYS) if (out / "run.parquet").is_file() else []


def _harms(blow: Blow, phases: dict[str, Phase], words: Sequence[str], ends: Callable[[], list[str]]) -> list[str]:
    """Carry out a blow at a command, resume the command where it says so, and return the harm."""
    chance = random.Random(str(blow))
    for _ in range(MISSES):
        done = _hit(blow, phases[blow.phase], words, chance)
        if done is not None:
            break
        if "--out" in words:  # the command ended in peace
            shutil.rmtree(words[list(words).index("--out") + 1], ignore_errors=True)
    else:
        return [f"{blow}: no moment was found"]
    harm = [f"left {done.left}"] if done.left else []
    last = done.said.strip().splitlines()[-1:] or [""]
    if done.code not in (0, 1) or (done.code == 1 and "To continue: raysim " not in last[0]):
        harm.append(f"ended with {done.code}: {last}")
    if "Traceback" in done.said or "***" in done.said:
        harm.append(f"more than a sentence: {done.said[-2000:]}")
    return [f"{blow}: {each}" for each in harm or ends()]


def _hit(blow: Blow, phase: Phase, words: Sequence[str], chance: random.Random) -> Done | None:
    """Run a command whose Ray is hit once; None if there was nothing to hit at that moment."""
    rays = tempfile.mkdtemp(prefix="ray-")  # a short path: sockets lie in it
    struck = Path(rays) / "struck"
    moment: dict[str, Any] = {
        "function": phase.function,
        "argument": phase.argument,
        "call": chance.randint(1, phase.calls),
        "after_s": round(chance.uniform(0, phase.length_s), 3),
        "blow": {
            "words": PROCESSES[blow.process],
            "number": BLOWS[blow.blow],
            "pause_s": round(chance.uniform(0.5, 8), 1) if blow.blow == "stopped for a while" else None,
            "struck": str(struck),
        },
    }
    command = subprocess.Popen(
        [sys.executable, str(SENDER), json.dumps(moment), *words],
        env=os.environ | {"RAY_TMPDIR": rays},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_on_a_terminal,
    )
    try:
        said = command.communicate(timeout=LIMIT_S)[1]
        code, endless = command.returncode, []
    except subprocess.TimeoutExpired:
        command.kill()
        said, code, endless = command.communicate()[1], -1, [f"itself for {LIMIT_S} s"]
    try:
        if not struck.is_file() and not endless:
            return None
        return Done(code, said, endless + left_of(rays))
    finally:
        shutil.rmtree(rays, ignore_errors=True)
