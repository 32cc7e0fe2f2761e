"""Numbers of seeds at which verdicts are given, and the share of the error spent at each.

A study that fixed its seeds is judged on all of them first. Looks at fewer seeds can then no longer happen, and later looks have
their shares. The shares of a plan and of its looks sum to one (Lan and DeMets 1983; Bonferroni).
"""

from __future__ import annotations

LOOKS = {3: 0.1, 5: 0.3, 8: 0.3, 13: 0.2, 21: 0.1}
"""Numbers of seeds of interim analyses, and the share of the error spent at each without a plan."""
MIN_SEEDS = min(LOOKS)
MOST_SEEDS = max(LOOKS)  # nothing is judged beyond: an effect that needs more seeds is too small to matter
PLANNED = 0.5  # share of the error for planned seeds if looks can follow


def planned_share(planned: int) -> float:
    """Return the share of the error spent on a plan's seeds: all of it if no look can follow.

    >>> planned_share(5), planned_share(40)
    (0.5, 1.0)
    """
    return PLANNED if planned < MOST_SEEDS else 1.0


def looks_after(planned: int) -> dict[int, float]:
    """Return the looks that can happen after a plan, with their shares of the error; all of `LOOKS` without a plan (0).

    A plan of fewer than `MIN_SEEDS` seeds is not judged, and spends nothing.

    >>> {count: round(share, 3) for count, share in looks_after(8).items()}
    {13: 0.333, 21: 0.167}
    """
    if planned < MIN_SEEDS:
        return dict(LOOKS)
    later = {count: share for count, share in LOOKS.items() if count > planned}
    left = 1 - planned_share(planned)
    return {count: left * share / sum(later.values()) for count, share in later.items()}


def look_at(seeds: int, planned: int = 0) -> int:
    """Return the number of seeds of the last look among `seeds` seeds, after a plan if there was one; 0 before the first.

    >>> look_at(2), look_at(7), look_at(100), look_at(7, planned=5)
    (0, 5, 21, 0)
    """
    return max((count for count in looks_after(planned) if count <= seeds), default=0)
