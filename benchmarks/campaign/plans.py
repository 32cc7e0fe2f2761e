"""Attacks of which every plan is tried once, in a random order, one of each kind first: a share of a campaign is a sample."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from commands import Outcome
from on_containers import contained, in_containers
from on_folders import FOLDER_PLANS, carry_out, kind, pairs, reduced
from on_servers import run_blows, strike_runs, strike_sweeps, sweep_blows


class Planned(NamedTuple):
    """All plans of an attack, what carries out some of them and returns the harm, and how many at once."""

    every: Callable[[], Sequence[Any]]
    carry_out: Callable[[Sequence[Any], Path], list[str]]
    at_once: int
    kind: Callable[[Any], str] = str


PLANS: dict[str, Planned] = {
    **{name: Planned(every, carry_out, 20, kind) for name, every in FOLDER_PLANS.items()},
    "two processes in a folder, one paused": Planned(partial(pairs, study=False), reduced, 1),
    "two processes in a study's folder, one paused": Planned(partial(pairs, study=True), reduced, 1),
    "a process of a run's Ray hit": Planned(run_blows, strike_runs, 4),
    "a process of a sweep's Ray hit": Planned(sweep_blows, strike_sweeps, 2),
    "a command in a container": Planned(contained, in_containers, 4),
}


def next_plans(name: str, tried: int, most: int, folder: Path, seed: int) -> Outcome:
    """Carry out the plans after the first `tried`, `most` of them, in the order of the seed."""
    planned = PLANS[name]
    some = in_order(planned, seed)[tried : tried + min(most, planned.at_once)]
    return Outcome(len(some), planned.carry_out(some, folder))


def in_order(planned: Planned, seed: int) -> list[Any]:
    """Return the plans in an order of the seed: the first of each kind, then the second of each; a new plan moves no other."""
    plans = sorted(planned.every(), key=lambda plan: hashlib.sha256(f"{seed} {plan}".encode()).digest())
    seen, rank = Counter[str](), list[int]()
    for plan in plans:
        rank.append(seen[planned.kind(plan)])
        seen[planned.kind(plan)] += 1
    return [plan for _, plan in sorted(zip(rank, plans, strict=True), key=lambda one: one[0])]
