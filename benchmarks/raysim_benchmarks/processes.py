"""CPU seconds of child processes by kind: Ray's own processes, and workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import psutil

PROGRAMS = {"gcs_server": "head", "raylet": "raylets"}
TITLES = {
    "ray::SweepTrial": "trials",
    "ray::StageActor": "stages",
    "Agent": "agents",
    "ray::": "idle workers",
    "default_worker.py": "idle workers",
    "agent": "agents",
}
"""Kinds of Python processes, by the first text that occurs in the command line."""
DRIVER, OTHER = "driver", "other"

Spent: TypeAlias = "dict[tuple[int, float], tuple[str, float]]"
"""Kind and CPU seconds of processes, by process ID and creation time."""


def cpu_seconds(driver: int) -> Spent:
    """Return the CPU seconds of all child processes, and of this process if it is the driver."""
    here = psutil.Process(os.getpid())
    spent = {}
    for process in [*([here] if here.pid == driver else []), *here.children(recursive=True)]:
        try:
            words, times = process.cmdline(), process.cpu_times()
            key = (process.pid, process.create_time())
        except psutil.Error:
            continue
        spent[key] = (DRIVER if process.pid == driver else kind_of(words), times.user + times.system)
    return spent


def by_kind(before: Spent, after: Spent) -> dict[str, float]:
    """Return the CPU seconds between two readings, by kind of process.

    >>> by_kind({(1, 0.0): ("driver", 2.0)}, {(1, 0.0): ("driver", 3.0), (2, 9.0): ("stages", 4.0), (3, 9.0): ("stages", 1.0)})
    {'driver': 1.0, 'stages': 5.0}
    """
    spent: dict[str, float] = {}
    for process, (kind, seconds) in after.items():
        spent[kind] = spent.get(kind, 0.0) + seconds - before.get(process, ("", 0.0))[1]
    return spent


def per(spent: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the CPU seconds per trial or step, of `count`."""
    return {kind: seconds / count for kind, seconds in sorted(spent.items())}


def kind_of(words: list[str]) -> str:
    """Return the kind of a process from its command line."""
    program, line = Path(words[0]).name if words else "", " ".join(words)
    return PROGRAMS.get(program) or next((kind for text, kind in TITLES.items() if text in line), OTHER)
