"""Runs and sweeps in containers: little memory or CPU, a read-only root, no /dev/shm to speak of (Linux, root)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from asking import KEYS, left_of
from commands import LIMIT_S, difference, train_command
from on_sweeps import STUDY, sweep_command, sweep_ends
from studies import write_study

from raysim.training.train import train

GROUPS = Path("/sys/fs/cgroup")
MIB = 2**20
READ_ONLY = "mount -o remount,bind,ro /"
OWN = "mount --bind {folder} {folder}"


class Box(NamedTuple):
    """A container: commands of a shell that make it, and the limits of the outer of its two control groups of version 1."""

    mounts: str = ":"
    memory_bytes: int | None = None
    cpus: float | None = None


BOXES = {
    **{f"{size} MiB of memory": Box(memory_bytes=size * MIB) for size in (256, 512, 1024, 1536, 2048)},
    "half a CPU": Box(cpus=0.5),
    "one and a half CPUs": Box(cpus=1.5),
    "a read-only root": Box(f"{OWN}; mount --rbind /tmp /tmp; {READ_ONLY}"),
    "a read-only root, and no /tmp": Box(f"{OWN}; {READ_ONLY}"),
    "a read-only home": Box(
        "mkdir {folder}/home; mount --bind {folder}/home {folder}/home; mount -o remount,bind,ro {folder}/home; "
        "export HOME={folder}/home"
    ),
    "1 MiB of /dev/shm": Box("mount -t tmpfs -o size=1m tmpfs /dev/shm"),
    "a read-only /dev/shm": Box("mount -t tmpfs -o ro tmpfs /dev/shm"),
}
WORKS = ("one and a half CPUs", "half a CPU", "a read-only root", "1 MiB of /dev/shm", "2048 MiB of memory")
"""Containers in which every command works; in others it works, or says in a sentence why not."""
COMMANDS = ("train inline", "train ray", "sweep inline", "sweep ray")


class Contained(NamedTuple):
    """A command in a container."""

    box: str
    command: str

    def __str__(self) -> str:
        return f"{self.command} with {self.box}"


def contained() -> list[Contained]:
    """Return every command in every container."""
    return [Contained(box, command) for box in BOXES for command in COMMANDS]


def in_containers(plans: Sequence[Contained], folder: Path) -> list[str]:
    """Run commands in containers; return the harm: other bits, more than a sentence, a wrong exit code, a process that is left."""
    whole, harm = train("digits-cnn", *KEYS, engine="inline", out=folder / "whole"), []
    for number, plan in enumerate(plans):
        place = folder / f"box-{number}"
        place.mkdir()
        kind, engine = plan.command.split()
        path = write_study(place, trials=1, base=STUDY, jobs=1, engine=engine)
        out = place / "out"
        words = train_command(engine, out, KEYS) if kind == "train" else sweep_command(path, out)
        code, said, left = _run(BOXES[plan.box], words, place)
        found = [f"left {left}"] if left else []
        last = said.strip().splitlines()[-1:]
        if code not in (0, 1, 2) or (code and not last[0].startswith("raysim: ")) or "Traceback" in said:
            found.append(f"ended with {code}: {said[-1500:]}")
        elif code and plan.box in WORKS:
            found.append(f"does not work: {last}")
        elif not code:
            found += difference(out, engine, whole, KEYS) if kind == "train" else sweep_ends(path, out)
        harm += [f"{plan}: {one}" for one in found]
        shutil.rmtree(place, ignore_errors=True)
    return harm


def _run(box: Box, words: Sequence[str], folder: Path) -> tuple[int, str, list[str]]:
    """Run a command in a container; return its exit code, its errors, and the processes that it left."""
    tmp = tempfile.mkdtemp(prefix="box-")  # a short path: Ray's sockets lie in it
    environment = os.environ | {"TMPDIR": tmp}
    try:
        with _group(box, tmp) as join:
            script = f"set -e; {join}; {box.mounts.format(folder=folder)}; exec {shlex.join(words)}"
            command = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "bash", "-c", script],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                said, code = command.communicate(timeout=LIMIT_S)[1], command.returncode
            except subprocess.TimeoutExpired:
                command.kill()
                said, code = command.communicate()[1], -1
            return code, said, left_of(tmp)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


@contextmanager
def _group(box: Box, tmp: str) -> Iterator[str]:
    """Make a control group with the box's limits, and one in it; yield what joins the latter."""
    settings = {
        "memory": {} if box.memory_bytes is None else {"memory.limit_in_bytes": box.memory_bytes},
        "cpu": {}
        if box.cpus is None
        else {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": round(box.cpus * 100_000)},
    }
    made, join = list[Path](), [":"]
    try:
        for controller, limits in settings.items():
            if limits:
                outer = GROUPS / controller / f"raysim-{Path(tmp).name}"
                for group in (outer, outer / "job"):
                    group.mkdir()
                    made.append(group)
                for name, value in limits.items():
                    (outer / name).write_text(str(value))
                join.append(f"echo $$ > {outer / 'job' / 'cgroup.procs'}")
        yield "; ".join(join)
    finally:
        for group in reversed(made):
            with suppress(OSError):  # of processes that are being killed
                group.rmdir()
