"""Every message of a collective, in place of the classes and the `EVERY` by which prices count them."""

from collections.abc import Iterator

import numpy as np

from raysim.network.collectives import EVERY, TRANSFER, Transfers
from raysim.network.rounds import Sends


def pairs_of(sends: Sends) -> Iterator[tuple[int, int]]:
    """Yield source and target of every message."""
    if not sends.crossed:
        yield from zip(sends.sources.tolist(), sends.targets.tolist(), strict=True)
        return
    for source in sends.sources.tolist():
        yield from ((source, target) for target in sends.targets.tolist() if target != source)


def explicit(transfers: Transfers, num_replicas: int) -> Transfers:
    """Return the same transfers with a row for each pair of members, in place of rows of `EVERY`."""
    replicas = np.arange(num_replicas)
    parts = [transfers[(transfers["source_replica"] != EVERY) & (transfers["target_replica"] != EVERY)]]
    for row in transfers[(transfers["source_replica"] == EVERY) | (transfers["target_replica"] == EVERY)]:
        ends = [replicas if row[end] == EVERY else row[end] for end in ("source_replica", "target_replica")]
        source, target = (each.reshape(-1) for each in np.broadcast_arrays(*np.ix_(*map(np.atleast_1d, ends))))
        across = (source != target) | (row["source_stage"] != row["target_stage"])
        rows = np.full(int(across.sum()), row, TRANSFER)
        rows["source_replica"], rows["target_replica"] = source[across], target[across]
        parts.append(rows)
    return np.concatenate(parts)
