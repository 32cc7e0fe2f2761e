"""SIGTERM to a run on Ray while it is in a given phase."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from commands import COMMAND, LIMIT_S, Attack, Outcome, as_on_a_terminal, difference, disorder, train_command

from raysim.training.train import train

KEYS = ["num_stages=2", "steps=30", "checkpoint_every_steps=5", "evaluate_every_steps=10", "forward=EF21(TopK(0.2))"]
GONE_S = 20.0  # within which no process of Ray may be left
SENDER = Path(__file__).with_name("sender.py")


class Phase(NamedTuple):
    """A phase of a run: one of the first `calls` calls of a function, which takes up to `length_s`.

    `argument`: only calls with it count.
    """

    function: str
    calls: int
    length_s: float
    argument: str | None = None


PHASES = {
    "while Ray starts": Phase("raysim.engine.ray:RayEngine._connect", 1, 4.0),
    "while stages start": Phase("raysim.engine.ray:RayEngine._enlist", 1, 6.0),
    "in a step": Phase("raysim.engine.ray:RayEngine.step", 29, 0.03),
    "in a checkpoint": Phase("raysim.training.run:Training._keep", 5, 0.03),
    "in an evaluation": Phase("raysim.engine.engine:Engine._together", 6, 0.03, "infer"),
    "in the compaction": Phase("raysim.records.tables:Recorder.compact", 1, 0.03),
}


def in_phase(name: str) -> Attack:
    """Return the attack that sends SIGTERM in a phase."""

    def attack(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
        return sigterm(PHASES[name], name, count, folder, engine, chance)

    return attack


def sigterm(phase: Phase, name: str, count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Send SIGTERM in a phase: exit code 143 and a sentence, no process left, and the same bits when resumed.

    In the compaction the run is over: it finishes.
    """
    whole, harm = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), []
    for run in range(count):
        out, rays = folder / f"ended-{run}", tempfile.mkdtemp(prefix="ray-")  # a short path: sockets lie in it
        call = chance.randint(1, phase.calls)
        after_s = round(chance.uniform(0, phase.length_s), 3)
        moment = {
            "function": phase.function,
            "argument": phase.argument,
            "call": call,
            "after_s": after_s,
            "blow": None,
        }
        words = [sys.executable, str(SENDER), json.dumps(moment), *train_command(engine, out, KEYS)[len(COMMAND) - 2 :]]
        environment = os.environ | {"RAY_TMPDIR": rays}
        done = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            preexec_fn=as_on_a_terminal,
        )
        found = disorder(signal.SIGTERM, f"{name}, {moment}", done.returncode, done.stderr)
        if not found and (done.returncode == 0) != (name == "in the compaction"):
            found = [f"SIGTERM {name}, {moment}: {done.returncode}"]
        if left := left_of(rays):
            found.append(f"SIGTERM {name}, {moment}: left {left}")
        if not found and (out / "run.parquet").is_file():
            found = difference(out, "inline", whole, KEYS)
        harm += found
        shutil.rmtree(rays, ignore_errors=True)
    return Outcome(count, harm)


def left_of(rays: str) -> list[str]:
    """Return the names of processes of the Ray in a folder that have not ended in time, and kill them."""
    deadline = time.monotonic() + GONE_S
    while (
        left := [process for process in psutil.process_iter() if _uses(process, rays)]
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = []
    for process in left:
        with suppress(psutil.Error):
            names.append(process.name())
            process.kill()
    return names


def _uses(process: psutil.Process, rays: str) -> bool:
    """Return whether a process was started with a folder, or has a file in it open: some of Ray's overwrite the former."""
    try:
        words = [*process.cmdline(), *process.environ().values()]
        return any(rays in word for word in words) or any(rays in file.path for file in process.open_files())
    except psutil.Error:
        return False
