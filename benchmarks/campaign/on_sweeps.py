"""Attacks on a sweep: its driver is killed or asked to end, its disk fills up."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from commands import LIMIT_S, Outcome, broken_off, disorder
from disks import NoDiskError, SmallDisk
from runs import same_records
from studies import BASE, write_study

from raysim.records import Run
from raysim.signals import SIGNALS
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial_rows import Rows
from raysim.training.train import train

STUDY = BASE | {"steps": 80, "checkpoint_every_steps": 5, "evaluate_every_steps": 20}


def _study(folder: Path, **changes: object) -> Path:
    """Write a study whose trials take some seconds each."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_study(folder, **{"trials": 5, "base": STUDY, "jobs": 1, **changes})


def sweep_command(path: Path, out: Path) -> list[str]:
    resume = ["--resume"] if out.exists() else []
    return [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", str(out), *resume]


def _rows(out: Path) -> Rows:
    rows = Rows(out, "small")
    rows.read()
    return rows


def sweep_ends(path: Path, out: Path) -> list[str]:
    """Resume a sweep to its end; return the harm where a trial is lost, or is not what it would have been."""
    words = sweep_command(path, out)
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        return [f"resume ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"]
    study, rows = read_study(path), [row for row in _rows(out) if row.same_as is None]
    if len(rows) != study.most_trials:
        return [f"trials are {[row.status for row in rows]}"]
    for row in rows:
        config = study.config(
            {"forward": row.notation.split()[0].removeprefix("forward=").replace("dense", "Identity")}
        )
        fresh = path.parent / f"fresh-{row.trial}"
        shutil.rmtree(fresh, ignore_errors=True)
        alone = train(config, engine="inline", out=fresh)
        if row.status != alone.status:
            return [f"trial {row.trial} is {row.status}, and {alone.status} by itself: {row.error}"]
        try:
            if row.status == "finished":
                same_records(Run(out / row.runs[0]), alone)
        except AssertionError as error:
            return [f"trial {row.trial} has other records: {str(error).splitlines()[0]}"]
    return []


def sweep_kills(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Kill the driver of a sweep at any moment, several times, and resume it to the end."""
    path, tried, harm = _study(folder, engine=engine), 0, []
    for sweep in range(count):  # one that ends early is followed by another
        out = folder / f"sweep-{sweep}"
        while tried < count:
            code, _ = broken_off(sweep_command(path, out), signal.SIGKILL, chance.uniform(4, 25))
            tried += code == -signal.SIGKILL
            if code != -signal.SIGKILL:
                break
        harm += sweep_ends(path, out)
        if tried == count:
            break
    return Outcome(tried, harm)


def sweep_signals(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Send SIGTERM, SIGINT or SIGHUP to a sweep at any moment, in turn: a sentence, the signal's exit code, and no trial lost."""
    path, harm = _study(folder, engine=engine), []
    out = folder / "sweep-0"
    for session in range(count):
        number, delay_s = SIGNALS[session % len(SIGNALS)], chance.uniform(3, 25)
        code, errors = broken_off(sweep_command(path, out), number, delay_s)
        harm += disorder(number, f"after {delay_s:.1f} s", code, errors)
        if code == 0:
            harm += sweep_ends(path, out)
            out = folder / f"sweep-{session + 1}"
    harm += sweep_ends(path, out)
    return Outcome(count, harm)


def full_disk_of_sweep(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Sweep, then report, on a small disk of memory that fills up: a sentence, and no trial lost once there is space."""
    path, harm = _study(folder, engine="inline", trials=3), []
    for run in range(count):
        size = chance.choice([16, 32, 64, 128, 256, 512, 1024])
        try:
            with SmallDisk(folder / "disk", size) as disk:
                out = disk.folder / "sweep"
                words = sweep_command(path, out)
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                if done.returncode not in (0, 1) or "Traceback" in done.stderr:
                    harm.append(f"{size} KiB: {done.returncode}, {done.stderr.strip().splitlines()[-1:]}")
                    continue
                disk.resize("64m")
                harm += [f"{size} KiB: {found}" for found in sweep_ends(path, out)]
                used = sum(file.stat().st_blocks for file in disk.folder.rglob("*")) // 2
                disk.resize(f"{used + chance.choice([8, 64, 512])}k")
                words = [sys.executable, "-m", "raysim.cli", "report", str(out)]
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                if (
                    done.returncode not in (0, 1)
                    or "Traceback" in done.stderr
                    or (out / "report.html").exists() == done.returncode
                ):
                    harm.append(f"report on {size} KiB: {done.returncode}, {done.stderr.strip().splitlines()[-1:]}")
        except NoDiskError as error:
            return Outcome(run, [*harm, str(error)])
    return Outcome(count, harm)
