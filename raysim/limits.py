"""Memory and CPUs available to this process: the machine's, or a tighter limit of cgroups, `ulimit` or CPU affinity.

A container is a Linux control group (cgroup, version 1 or 2), and every enclosing group limits it too. psutil only reports the
machine.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")


class MemoryLimit(NamedTuple):
    """A limit in bytes and its source; as text, `this container may use 1.1 GB`."""

    size: int
    setter: str

    def __str__(self) -> str:
        return f"{self.setter} {self.size / 1e9:.1f} GB"


def process_memory(root: Path = ROOT) -> MemoryLimit:
    """Return the tightest memory limit of this process; `root` is the folder with `proc` and `sys`."""
    limits = [node_memory(root)]
    for kind, flag in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        size = resource.getrlimit(kind)[0]
        if size != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(size, f"`ulimit {flag}` lets this process use"))
    return min(limits)


def node_memory(root: Path = ROOT) -> MemoryLimit:
    """Return the memory limit shared by all processes here: the machine's or the container's."""
    limits = [MemoryLimit(psutil.virtual_memory().total, "this machine has")]
    for group in _groups(root, "memory"):
        sizes = _read(group / "memory.max") + _read(group / "memory.limit_in_bytes")
        limits += [MemoryLimit(size, "this container may use") for size in sizes]
    return min(limits)


def release_memory() -> None:
    """Return unused memory to the system: modules and graphs form cycles, and glibc keeps what they free."""
    gc.collect()
    with suppress(OSError, AttributeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of CPUs available to this process, at least 1; a quota is rounded up."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return math.ceil(min(allowed, cpu_quota(root)))


def cpu_quota(root: Path = ROOT) -> float:
    """Return the CPU quota of this process's control groups, infinity if there is none."""
    quotas = [math.inf]
    for group in _groups(root, "cpu"):
        quota = _read(group / "cpu.max") or _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:  # in version 1, -1 means no quota
            quotas.append(quota[0] / quota[1])
    return min(quotas)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own to the outermost mounted one."""
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
    """Return the numbers in a file of a control group; none if it is missing or says `max`."""
    try:
        return [int(word) for word in file.read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []
