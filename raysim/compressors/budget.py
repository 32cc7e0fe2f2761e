"""A common error budget over links (ours; the option `budget` of GraVAC on links): compression goes where messages are slowest.

Errors of links pass through the stages that follow and add up, so a pipeline has one budget in each direction: the product of
its links' fidelities. Budget that is spent on a fast link is missing at the slow link for which all stages wait.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
_ROUNDING = 1e-12  # how far a product of fidelities may fall below the budget for want of digits


class Way(NamedTuple):
    """One way to send a link's messages."""

    fidelity: float
    seconds: float  # of a message on the wire


def floors(links: Mapping[Key, Sequence[Way]], budget: float) -> dict[Key, float]:
    """Return for each link the fidelity that it must keep; their product is `budget`, in (0, 1].

    The first of a link's ways is the tensor as it is, of fidelity 1. The slowest link takes its next faster way for as long as
    the product of fidelities stays at least `budget`; then the next slowest link does. The rest of the budget is shared out, so
    that a link whose fidelity falls a little stays above its floor.

    >>> fast, slow = [Way(1, 2), Way(0.8, 1)], [Way(1, 20), Way(0.8, 10), Way(0.6, 5)]
    >>> {name: round(floor, 3) for name, floor in floors({"fast": fast, "slow": slow}, 0.6).items()}
    {'fast': 1.0, 'slow': 0.6}
    """
    if not links:
        return {}
    taken = spend(links, budget)
    rest = min(1.0, budget / math.prod(way.fidelity for way in taken.values())) ** (1 / len(taken))
    return {key: way.fidelity * rest for key, way in taken.items()}


def spend(links: Mapping[Key, Sequence[Way]], budget: float) -> dict[Key, Way]:
    """Return the way that each link takes, the slowest first served; links equally slow in their order.

    Where stronger ways keep less, nothing within the budget makes the slowest message faster.
    """
    taken = {key: ways[0] for key, ways in links.items()}
    least = budget * (1 - _ROUNDING)
    while True:
        for key, now in sorted(taken.items(), key=lambda item: -item[1].seconds):
            others = math.prod(way.fidelity for other, way in taken.items() if other != key)
            faster = [way for way in links[key] if way.seconds < now.seconds and others * way.fidelity >= least]
            if faster:
                taken[key] = max(faster, key=lambda way: (way.fidelity, -way.seconds))
                break
        else:
            return taken
