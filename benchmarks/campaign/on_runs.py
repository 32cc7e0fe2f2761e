"""Attacks on a run: its processes are killed, its files damaged, its disk fills up."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from pathlib import Path

from commands import KEYS, LIMIT_S, Outcome, broken_off, difference, train_command
from configurations import SMALL
from disks import NoDiskError, SmallDisk
from runs import break_off, kill_at, same_records

from raysim.config import ConfigError, make_config
from raysim.records import Run
from raysim.training.run import Training
from raysim.training.train import train


def driver_kills(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Kill the driver at any moment, several times a run, and resume it to the end."""
    whole, harm, tried = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), [], 0
    for run in range(-(-count // 5)):
        out = folder / f"killed-{run}"
        for _ in range(min(5, count - tried)):
            code, _ = broken_off(train_command(engine, out), signal.SIGKILL, chance.uniform(2, 15))
            tried += code == -signal.SIGKILL
            if code == 0:
                break
        harm += difference(out, engine, whole)
    return Outcome(tried, harm)


def stage_kills(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Kill a stage's process in the middle of a step, several times a run."""
    changes = {
        "num_stages": chance.choice([2, 3]),
        "forward": "EF21(TopK(0.3))",
        "backward": "ErrorFeedback(TopK(0.2))",
        "steps": 60,
        "checkpoint_every_steps": 4,
    }
    config = make_config({**SMALL, **changes})
    whole, harm, tried = train(config, engine="inline", out=folder / "whole"), [], 0
    for run in range(-(-count // 10)):
        kills = range(min(10, count - tried))
        moments = {6 * kill + chance.randrange(6): chance.randrange(config.num_stages) for kill in kills}
        training = Training(config, out=folder / f"killed-{run}", engine=engine)
        tried += len(moments)
        try:
            kill_at(training, moments)
            same_records(Run(training.folder), whole)
        except Exception as error:
            harm.append(f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    return Outcome(tried, harm)


def damage(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Cut, flip, empty or remove a file of an interrupted run: the same bits when resumed, or a refusal in a sentence."""
    config = make_config({**SMALL, "steps": 12, "evaluate_every_steps": 4, "forward": "ErrorFeedback(TopK(0.3))"})
    whole, harm = train(config, engine="inline", out=folder / "whole"), []
    break_off(Training(config, engine="inline", out=folder / "broken"), 9)
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


def full_disk(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Train on a small disk of memory (Linux, root) that fills up: a sentence, and the same bits once there is space."""
    whole, harm = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), []
    for run in range(count):
        size = chance.choice([32, 64, 128, 256, 512, 1024, 2048])
        try:
            with SmallDisk(folder / "disk", size) as disk:
                words = train_command(engine, disk.folder / "run")
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr:
                    harm.append(f"{size} KiB: {done.returncode}, {done.stderr.strip().splitlines()[-1:]}")
                    continue
                disk.resize("64m")
                if done.returncode == 1:
                    harm += [f"{size} KiB: {found}" for found in difference(disk.folder / "run", engine, whole)]
        except NoDiskError as error:
            return Outcome(run, [*harm, str(error)])
    return Outcome(count, harm)
