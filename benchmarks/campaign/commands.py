"""Commands that attacks run, break off and resume, and the harm that is found."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from runs import same_records

from raysim.records import Run
from raysim.signals import SIGNALS

COMMAND = [sys.executable, "-m", "raysim.cli", "train", "digits-cnn"]
KEYS = ["num_stages=2", "steps=120", "checkpoint_every_steps=10", "evaluate_every_steps=40", "forward=EF21(TopK(0.2))"]
LIMIT_S = 300  # of one run


class Outcome(NamedTuple):
    """The result of an attack."""

    tried: int
    harm: list[str]


Attack = Callable[[int, Path, str, random.Random], Outcome]
"""Tries something so many times, in a folder, with runs on an engine; all that is left to chance comes from the generator."""


def train_command(engine: str, out: Path, keys: Sequence[str] = KEYS) -> list[str]:
    """Return the command that starts the run in a folder, or goes on with it."""
    resume = ["--resume"] if out.exists() else []
    return [*COMMAND, *keys, "--engine", engine, "--out", str(out), *resume]


def broken_off(words: list[str], number: int, delay_s: float) -> tuple[int, str]:
    """Run a command, and send it a signal after a while; return its exit code and its errors."""
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=as_on_a_terminal
    )
    try:
        errors = process.communicate(timeout=delay_s)[1]  # over before its time
    except subprocess.TimeoutExpired:
        process.send_signal(number)
        errors = process.communicate(timeout=LIMIT_S)[1]
    return process.returncode, errors


def as_on_a_terminal() -> None:
    """Let a process get the signals that a shell ignores in what it starts in the background."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def disorder(number: int, moment: str, code: int, errors: str) -> list[str]:
    """Return the harm where a command that was asked to end did not do so in order."""
    said = "To continue: " in errors or "before anything began" in errors
    if code in (0, 128 + number) and (said or not code) and "Traceback" not in errors and "***" not in errors:
        return []
    return [f"{signal.Signals(number).name} {moment}: {code}, {errors.strip().splitlines()[-1:]}"]


def difference(out: Path, engine: str, whole: Run, keys: Sequence[str] = KEYS) -> list[str]:
    """Resume a run to its end; return the harm where its records are not those of the whole run."""
    if not (out / "run.parquet").is_file() or Run(out).status != "finished":
        words = train_command(engine, out, keys)
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            return [f"resume ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"]
    try:
        same_records(Run(out), whole)
    except AssertionError as error:
        return [f"other records: {str(error).splitlines()[0]}"]
    return []
