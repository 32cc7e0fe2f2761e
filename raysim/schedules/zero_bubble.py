"""Zero-bubble orders of one stage a worker: the patterns of ZBH1 and ZBH2, and a search for given times and memory.

The search plays greedy rules against the times and keeps the best order, in the manner of Qi et al. 2023 (2401.10241, section 3.1).
Orders are letters, F, B and W, of each stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple


class Costs(NamedTuple):
    """Times of a microbatch on every stage, in any one unit, and the memory to stay within."""

    forward: float
    input: float
    weight: float
    message: float
    """From the end of an action until the neighbour has its packet; the sender computes meanwhile."""
    memory: float
    """Limit on the saved tensors of a stage, as a multiple of the first stage's under 1F1B."""
    kept: float
    """Share of a microbatch's saved tensors that is held from B to W."""


class _Stage:
    """Actions run by a stage, and when packets reach it."""

    def __init__(self) -> None:
        self.letters = ""
        self.count = dict.fromkeys("FBW", 0)
        self.arrivals: dict[str, list[float]] = {"F": [], "B": []}
        self.began = math.inf
        self.free = 0.0

    def due(self, op: str) -> float:
        """Return when the packet of the next F or B arrives; infinity if that is not known yet."""
        arrivals, count = self.arrivals[op], self.count[op]
        return arrivals[count] if count < len(arrivals) else math.inf

    @property
    def waiting(self) -> int:
        """Number of microbatches between B and W."""
        return self.count["B"] - self.count["W"]

    @property
    def in_flight(self) -> int:
        """Number of microbatches between F and B."""
        return self.count["F"] - self.count["B"]


Rule = Callable[[int, _Stage, float], str]
"""Returns the letter that a stage runs now, or "" to wait for a packet."""


@lru_cache(maxsize=64)
def search(costs: Costs, num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """Return each stage's letters in the best order found.

    The best has the shortest time from any stage's first to its last action, which bounds steps without a flush, then the
    earliest end. ZBH1 and ZBH2 are among the candidates if they fit.
    """
    rules = [
        _greedy(costs, num_stages, ahead, first, patience)
        for ahead, first, patience in product((1.0, 1.5, 2.0, num_microbatches), "BF", (0.0, 0.5, 1.0))
    ]
    rules += [
        _fixed([pattern(stage, num_stages, num_microbatches, warmup) for stage in range(num_stages)])
        for warmup in (1, 2)
        if costs.memory * num_stages >= warmup * (num_stages - 1) + 1
    ]
    return min((_play(rule, costs, num_stages, num_microbatches) for rule in rules), key=lambda played: played[:2])[2]


def pattern(stage: int, num_stages: int, num_microbatches: int, warmup: int) -> str:
    """Return the letters of a 1F1B row with `warmup` times its warm-up, and each W delayed by `warmup` backwards a stage."""
    ahead, delay = (min(warmup * hops, num_microbatches) for hops in (num_stages - 1 - stage, stage))
    letters = "F" * ahead
    for m in range(num_microbatches):
        letters += ("F" if ahead + m < num_microbatches else "") + "B" + ("W" if m >= delay else "")
    return letters + "W" * delay


def _greedy(costs: Costs, num_stages: int, ahead: float, first: str, patience: float) -> Rule:
    """Return the rule that runs F and B once their packets have arrived, and W in gaps or if memory is full.

    `ahead`: forwards that each stage runs ahead of the next before its first backward. `first`: F or B, if both have arrived.
    `patience`: the shortest gap for a W, as a share of a W's time.
    """

    def choose(index: int, stage: _Stage, now: float) -> str:
        full = stage.in_flight + costs.kept * stage.waiting > costs.memory * num_stages - 1
        forward, backward = stage.due("F"), stage.due("B")
        blocked = full or stage.in_flight >= 1 + round(ahead * (num_stages - 1 - index))
        runs = {"F": forward <= now and not blocked, "B": backward <= now}
        for op in (first, "F", "B"):
            if runs[op]:
                return op
        gap = min(math.inf if blocked else forward, backward) - now
        return "W" if stage.waiting and (full or gap >= patience * costs.weight) else ""

    return choose


def _fixed(letters: list[str]) -> Rule:
    """Return the rule that runs the letters of each stage in order."""

    def choose(index: int, stage: _Stage, now: float) -> str:
        op = letters[index][len(stage.letters) : len(stage.letters) + 1]
        return op if op == "W" or (op and stage.due(op) <= now) else ""

    return choose


def _play(rule: Rule, costs: Costs, num_stages: int, num_microbatches: int) -> tuple[float, float, tuple[str, ...]]:
    """Return the longest time from a stage's first to its last action, the end of the last action, and the executed letters."""
    seconds = {"F": costs.forward, "B": costs.input, "W": costs.weight}
    stages = [_Stage() for _ in range(num_stages)]
    stages[0].arrivals["F"] = [0.0] * num_microbatches
    events = [(0.0, 0)]
    while events:
        now, index = heappop(events)
        stage = stages[index]
        op = rule(index, stage, now) if now >= stage.free else ""
        if not op:
            continue
        stage.began = min(stage.began, now)
        stage.letters += op
        stage.count[op] += 1
        stage.free = now + seconds[op]
        heappush(events, (stage.free, index))
        if op == "F" and index == num_stages - 1:
            stage.arrivals["B"].append(stage.free)
        elif op != "W" and (neighbour := index + (1 if op == "F" else -1)) >= 0:
            arrival = stage.free + costs.message
            stages[neighbour].arrivals[op].append(arrival)
            heappush(events, (arrival, neighbour))
    return (
        max(stage.free - stage.began for stage in stages),
        max(stage.free for stage in stages),
        tuple(stage.letters for stage in stages),
    )
