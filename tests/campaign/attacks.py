"""Attacks on a run: each returns how often it was tried, and a line for every time that it did harm."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from disks import NoDiskError, SmallDisk
from runs import same_records
from studies import BASE, write_study
from typer.testing import CliRunner

from raysim.cli import app
from raysim.config import ConfigError, make_config
from raysim.records import Run
from raysim.training.ending import SIGNALS
from raysim.training.run import Training, train
from sweeps.reading import read_study
from sweeps.rows import Rows

COMMAND = [sys.executable, "-m", "raysim.cli", "train", "digits-cnn"]
KEYS = ["num_stages=2", "steps=120", "checkpoint_every_steps=10", "evaluate_every_steps=40", "forward=EF21(TopK(0.2))"]
LIMIT_S = 300  # of one run
LONGEST_S = 5.0  # of refusing an input


class Outcome(NamedTuple):
    """The result of an attack."""

    tried: int
    harm: list[str]


Attack = Callable[[int, Path, str, random.Random], Outcome]


def _command(engine: str, out: Path) -> list[str]:
    """Return the command that starts the run in a folder, or goes on with it."""
    resume = ["--resume"] if out.exists() else []
    return [*COMMAND, *KEYS, "--engine", engine, "--out", str(out), *resume]


def _broken_off(words: list[str], number: int, delay_s: float) -> tuple[int, str]:
    """Run a command, and send it a signal after a while; return its exit code and its errors."""
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=_as_on_a_terminal
    )
    try:
        errors = process.communicate(timeout=delay_s)[1]  # over before its time
    except subprocess.TimeoutExpired:
        process.send_signal(number)
        errors = process.communicate(timeout=LIMIT_S)[1]
    return process.returncode, errors


def _as_on_a_terminal() -> None:
    """Let a process get the signals that a shell ignores in what it starts in the background."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _of_signal(number: int, delay_s: float, code: int, errors: str) -> list[str]:
    """Return the harm where a command that was asked to end did not do so in order."""
    said = "To go on: " in errors or "before anything began" in errors
    if code in (0, 128 + number) and (said or not code) and "Traceback" not in errors and "***" not in errors:
        return []
    return [f"{signal.Signals(number).name} after {delay_s:.1f} s: {code}, {errors.strip().splitlines()[-1:]}"]


def _ends_as(out: Path, engine: str, whole: Run) -> str | None:
    """Resume a run to its end; return the harm where its records are not those of the whole run."""
    if not (out / "run.parquet").is_file() or Run(out).status != "finished":
        done = subprocess.run(_command(engine, out), capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            return f"resume ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    try:
        same_records(Run(out), whole)
    except AssertionError as error:
        return f"other records: {str(error).splitlines()[0]}"
    return None


def driver_kills(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Kill the driver at any moment, several times a run, and resume it to the end."""
    whole, harm, tried = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), [], 0
    for run in range(-(-count // 5)):
        out = folder / f"killed-{run}"
        for _ in range(min(5, count - tried)):
            code, _ = _broken_off(_command(engine, out), signal.SIGKILL, chance.uniform(2, 15))
            tried += code == -signal.SIGKILL
            if code == 0:
                break
        found = _ends_as(out, engine, whole)
        harm += [found] if found else []
    return Outcome(tried, harm)


def stage_kills(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Kill a stage's process in the middle of a step, several times a run."""
    from configurations import SMALL
    from runs import kill_at

    changes = {
        "forward": "EF21(TopK(0.3))",
        "backward": "ErrorFeedback(TopK(0.2))",
        "steps": 60,
        "checkpoint_every_steps": 4,
    }
    config = make_config({**SMALL, **changes})
    whole, harm, tried = train(config, engine="inline", out=folder / "whole"), [], 0
    for run in range(-(-count // 10)):
        moments = {6 * index + chance.randrange(6): chance.randrange(3) for index in range(min(10, count - tried))}
        training = Training(config, out=folder / f"killed-{run}", engine=engine)
        tried += len(moments)
        try:
            kill_at(training, moments)
            same_records(Run(training.folder), whole)
        except Exception as error:
            harm.append(f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    return Outcome(tried, harm)


def signals(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Send SIGTERM, SIGINT or SIGHUP at any moment: a sentence, the exit code of the signal, and the same bits when resumed."""
    whole, harm = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), []
    for run in range(count):
        out, number = folder / f"ended-{run}", chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        delay_s = chance.uniform(4, 20)
        code, errors = _broken_off(_command(engine, out), number, delay_s)
        found = _of_signal(number, delay_s, code, errors)
        if not found and (out / "run.parquet").is_file():
            differs = _ends_as(out, engine, whole)
            found = [differs] if differs else []
        harm += found
    return Outcome(count, harm)


def damage(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Cut, flip, empty or remove a file of an interrupted run: the same bits when resumed, or a refusal in a sentence."""
    from configurations import SMALL

    config = make_config({**SMALL, "steps": 12, "evaluate_every_steps": 4, "forward": "ErrorFeedback(TopK(0.3))"})
    whole, harm = train(config, engine="inline", out=folder / "whole"), []
    training = Training(config, engine="inline", out=folder / "broken")
    events = training.events()
    while next(events).row["step"] != 8:
        pass
    events.close()
    out = folder / "damaged"
    for _ in range(count):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "broken", out)
        path = chance.choice(sorted(path for path in out.rglob("*") if path.is_file() and path.name != ".lock"))
        content, how = path.read_bytes(), chance.choice(["cut", "flip", "empty", "gone"])
        place = chance.randrange(len(content))
        flipped = content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes({"cut": content[:place], "flip": flipped, "empty": b""}[how])
        try:
            same_records(train(config, engine="inline", out=out, resume=True), whole)
        except ConfigError:
            continue
        except Exception as error:
            harm.append(f"{path.relative_to(out)} {how} at {place}: {type(error).__name__}: {str(error)[:100]}")
    return Outcome(count, harm)


STUDY = BASE | {"steps": 80, "checkpoint_every_steps": 5, "evaluate_every_steps": 20}


def _study(folder: Path, **changes: object) -> Path:
    """Write a study whose trials take some seconds each."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_study(folder, **{"trials": 5, "base": STUDY, "jobs": 1, **changes})


def _sweep_command(path: Path, out: Path) -> list[str]:
    resume = ["--resume"] if out.exists() else []
    return [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", str(out), *resume]


def _rows(out: Path) -> Rows:
    rows = Rows(out, "small")
    rows.read()
    return rows


def _sweep_ends(path: Path, out: Path) -> list[str]:
    """Resume a sweep to its end; return the harm where a trial is lost, or is not what it would have been."""
    words = _sweep_command(path, out)
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        return [f"resume ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"]
    study, rows = read_study(path), [row for row in _rows(out) if row.same_as is None]
    if len(rows) != study.budget:
        return [f"trials are {[row.status for row in rows]}"]
    for row in rows:
        config = study.config({"forward": row.notation.split()[0].removeprefix("forward=")})
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
            code, _ = _broken_off(_sweep_command(path, out), signal.SIGKILL, chance.uniform(4, 25))
            tried += code == -signal.SIGKILL
            if code != -signal.SIGKILL:
                break
        harm += _sweep_ends(path, out)
        if tried == count:
            break
    return Outcome(tried, harm)


def sweep_signals(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Send SIGTERM, SIGINT or SIGHUP to a sweep at any moment, in turn: a sentence, the signal's exit code, and no trial lost."""
    path, harm = _study(folder, engine=engine), []
    out = folder / "sweep-0"
    for session in range(count):
        number, delay_s = SIGNALS[session % len(SIGNALS)], chance.uniform(3, 25)
        code, errors = _broken_off(_sweep_command(path, out), number, delay_s)
        harm += _of_signal(number, delay_s, code, errors)
        if code == 0:
            harm += _sweep_ends(path, out)
            out = folder / f"sweep-{session + 1}"
    harm += _sweep_ends(path, out)
    return Outcome(count, harm)


def full_disk_of_sweep(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Sweep, then report, on a small disk of memory that fills up: a sentence, and no trial lost once there is space."""
    path, harm = _study(folder, engine="inline", trials=3), []
    for run in range(count):
        size = chance.choice([16, 32, 64, 128, 256, 512, 1024])
        try:
            with SmallDisk(folder / "disk", size) as disk:
                out = disk.folder / "sweep"
                words = _sweep_command(path, out)
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                if done.returncode not in (0, 1) or "Traceback" in done.stderr:
                    harm.append(f"{size} KiB: {done.returncode}, {done.stderr.strip().splitlines()[-1:]}")
                    continue
                disk.resize("64m")
                harm += [f"{size} KiB: {found}" for found in _sweep_ends(path, out)]
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


WORDS = [
    *[
        "num_stages",
        "forward",
        "backward",
        "steps",
        "model",
        "model.width",
        "data",
        "data.path",
        "optimizer.name",
        "schedule",
    ],
    *[
        "clock",
        "seed",
        "cuts",
        "bottleneck",
        "name",
        "batch_size",
        "replica_gradient",
        "forward.1",
        "model.subspace",
        "num_replicas",
        "profile",
        "dtype",
    ],
]
VALUES = [
    *[
        "",
        "0",
        "-1",
        "1e999",
        "nan",
        "9" * 5000,
        "true",
        "[]",
        "[[1]]",
        "{a=1}",
        "{1='TopK(0.1)'}",
        "[1, 2, 3]",
        "100000",
        "x" * 3000,
        "'''",
    ],
    *[
        "TopK(",
        "TopK(0.1",
        "Topk(0.1)",
        "TopK(1e-400)",
        "Quantize(10**9)",
        "GraVAC(",
        "('" * 400,
        "TopK(__import__('os'))",
    ],
    *["/dev/zero", "/proc/self/mem", "\udcff", "a\x00b", "os:system", "sys:exit", "Custom('/dev/zero')"],
    *["1" * 300 + "mbps", "100mbps+-1ms"],
]


def full_disk(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Train on a small disk of memory (Linux, root) that fills up: a sentence, and the same bits once there is space."""
    whole, harm = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), []
    for run in range(count):
        size = chance.choice([32, 64, 128, 256, 512, 1024, 2048])
        try:
            with SmallDisk(folder / "disk", size) as disk:
                words = _command(engine, disk.folder / "run")
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr:
                    harm.append(f"{size} KiB: {done.returncode}, {done.stderr.strip().splitlines()[-1:]}")
                    continue
                disk.resize("64m")
                found = _ends_as(disk.folder / "run", engine, whole) if done.returncode == 1 else None
                harm += [f"{size} KiB: {found}"] if found else []
        except NoDiskError as error:
            return Outcome(run, [*harm, str(error)])
    return Outcome(count, harm)


def inputs(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Give keys values that no key can have: refused in one sentence, in under `LONGEST_S`."""
    harm, runner = [], CliRunner()
    before = Path.cwd()
    os.chdir(folder)
    try:
        for _ in range(count):
            keys = [f"{chance.choice(WORDS)}={chance.choice(VALUES)}" for _ in range(chance.randrange(1, 3))]
            began = time.monotonic()
            done = runner.invoke(app, ["train", "digits-cnn", *keys, "steps=0", "--engine", engine])  # never begins
            seconds = time.monotonic() - began
            sentence = done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1
            if not sentence or seconds > LONGEST_S:
                harm.append(f"{str(keys)[:200]}: {done.exit_code}, {seconds:.1f} s, {done.exception!r:.100}")
    finally:
        os.chdir(before)
    return Outcome(count, harm)


def packets(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Damage packets of every codec: a tensor of the stated shape, or a ValueError."""
    from codec_variants import VARIANTS
    from packet_fuzz import fuzz

    harm, each = [], -(-count // len(VARIANTS))
    for variant in VARIANTS:
        try:
            fuzz(variant, each, chance.getrandbits(32))
        except Exception as error:
            harm.append(f"{variant.notation}: {type(error).__name__}: {str(error)[:100]}")
    return Outcome(each * len(VARIANTS), harm)


ATTACKS: dict[str, tuple[Attack, int, int]] = {
    "driver killed": (driver_kills, 50, 5),
    "stage killed": (stage_kills, 100, 10),
    "sweep killed": (sweep_kills, 20, 5),
    "asked to end": (signals, 30, 2),
    "sweep asked to end": (sweep_signals, 15, 3),
    "files damaged": (damage, 500, 50),
    "disk full": (full_disk, 20, 2),
    "disk full under a sweep": (full_disk_of_sweep, 10, 1),
    "inputs": (inputs, 5000, 250),
    "packets damaged": (packets, 100_000, 10_000),
}
"""Attacks by name, how often a whole campaign tries each, and how often at once."""
