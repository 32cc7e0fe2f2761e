"""Memory and CPUs that this process may use: the machine's, or the tighter limit of its control groups, `ulimit` or affinity.

A container is a control group (cgroup) of Linux, of version 1 or 2, and every group around it limits it too. psutil reads the
machine alone.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")


class MemoryLimit(NamedTuple):
    """Bytes, and who sets them; as text, `this container may use 1.1 GB`."""

    size: int
    setter: str

    def __str__(self) -> str:
        return f"{self.setter} {self.size / 1e9:.1f} GB"


def process_memory(root: Path = ROOT) -> MemoryLimit:
    """Return the least memory limit of this process; `root` is the folder of `proc` and `sys`."""
    limits = [node_memory(root)]
    for kind, flag in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        size = resource.getrlimit(kind)[0]
        if size != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(size, f"`ulimit {flag}` lets this process use"))
    return min(limits)


def node_memory(root: Path = ROOT) -> MemoryLimit:
    """Return the least memory limit of all processes here together: that of the machine or of the container."""
    limits = [MemoryLimit(psutil.virtual_memory().total, "this machine has")]
    for group in _groups(root, "memory"):
        sizes = _read(group / "memory.max") + _read(group / "memory.limit_in_bytes")
        limits += [MemoryLimit(size, "this container may use") for size in sizes]
    return min(limits)


def usable_cpus(root: Path = ROOT) -> int:
    """Return the CPUs that this process may use, at least 1; a part of a CPU in a quota counts as a whole."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return math.ceil(min(allowed, cpu_quota(root)))


def cpu_quota(root: Path = ROOT) -> float:
    """Return the CPUs that control groups leave this process, infinity if they do not limit it."""
    quotas = [math.inf]
    for group in _groups(root, "cpu"):
        quota = _read(group / "cpu.max") or _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:  # of version 1, -1 is no quota
            quotas.append(quota[0] / quota[1])
    return min(quotas)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own to the outermost that is mounted."""
    own: dict[str, str] = {}  # paths of groups by controller, "" for version 2
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2" and "" in own:
            path = own[""]
        elif kind == "cgroup" and controller in own and controller in options.split(","):
            path = own[controller]
        else:
            continue
        top, point = (field.replace("\\040", " ") for field in mount.split(" ")[3:5])
        mounted = root / point.lstrip("/")
        inner = Path(path)
        below = inner.relative_to(top) if inner.is_relative_to(top) and ".." not in inner.parts else Path()
        yield from (mounted / group for group in (below, *below.parents))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return []


def _read(file: Path) -> list[int]:
    """Return the numbers in a file of a control group; none if it is absent, or says `max`."""
    try:
        return [int(word) for word in file.read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []
