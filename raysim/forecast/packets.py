"""Bytes and codec seconds of messages too large to make, extrapolated from small real ones.

A packet's size is linear in the length of each axis of its tensor (see the table in docs/methods/laws.md). So a few small packets
determine a large one, up to the rounding of lengths and bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from raysim.config import read_config
from raysim.forecast.link_costs import FIGURES, LinkCost, link_costs
from raysim.forecast.replica_costs import ReplicaCost, replica_costs
from raysim.network.collectives import EVERY, EXCHANGES, TRANSFER, Transfers
from raysim.notation import InputError
from raysim.replication.local import LocalSteps
from raysim.replication.method import ReplicaMethod
from raysim.values import UNNAMED, BoundaryTensors

Floats = NDArray[np.float64]

MOST_VALUES = 2**18
"""Largest activation that is encoded in full."""
FEWEST_ROWS = 64
"""Least rows of a shortened activation: more than the rank of any low-rank codec in use. If so few are still many values, one and
two samples are encoded instead of all."""
SMALL = (50, 100)
"""Axis lengths of shortened matrices: large enough to be compressed by default, with whole counts at usual densities."""
ROUNDING = 4
"""Bytes by which a small packet may deviate from its polynomial: header lengths, and padding to whole bytes."""
STARTED = 16
"""Bytes by which a small chunk may exceed its share of a message: the ranges of started blocks, and padding."""
FEW = (2, 4, 5)
"""Numbers of replicas measured to extrapolate to any number D: a message between two has p + q / D bytes, and a replica's
codecs process a + b D + c / D. Each divides the number of values of the small matrices."""
UNIT = 1e9
"""Nominal codec speed in bytes a second: codec seconds times `UNIT` are counted work."""


@lru_cache(maxsize=1024)
def link_messages(
    forward: str, backward: str, shape: tuple[int, ...], dtype: str, codec_bytes_per_s: float = UNIT
) -> tuple[LinkCost, LinkCost]:
    """Return the costs of an activation of `shape` (sample, position, ...) and of its gradient; raises InputError."""
    if len(shape) > 2 and shape[0] > 2 and shape[0] * FEWEST_ROWS * math.prod(shape[2:]) > MOST_VALUES:
        one, two = (
            link_messages(forward, backward, (samples, *shape[1:]), dtype, codec_bytes_per_s) for samples in (1, 2)
        )
        return _extended(one[0], two[0], shape[0] - 1), _extended(one[1], two[1], shape[0] - 1)
    rows = shape[1] if len(shape) > 2 and math.prod(shape) > MOST_VALUES else 0
    lengths = [0]
    if rows:
        small = max(MOST_VALUES * rows // math.prod(shape) // 16 * 8, FEWEST_ROWS)
        lengths = [small, 2 * small]
    shapes = [(shape[0], length, *shape[2:]) if length else shape for length in lengths]
    config = read_config(
        "topics-gpt", [f"num_stages={len(shapes) + 1}", f"forward={forward}", f"backward={backward}", f"dtype={dtype}"]
    )
    costs = link_costs(config, [BoundaryTensors({UNNAMED: each}, {}) for each in shapes], codec_bytes_per_s, [])
    forth, back = ([cost for cost in costs if cost.direction == direction] for direction in ("forward", "backward"))
    if not rows:
        return forth[0], back[0]
    times = (rows - lengths[0], lengths[1] - lengths[0])
    return _extended(forth[0], forth[1], *times), _extended(back[0], back[1], *times)


def _extended(cost: LinkCost, longer: LinkCost, times: int, of: int = 1) -> LinkCost:
    """Extrapolate figures by `times / of` their difference from those of a `longer` message."""
    figures = {name: (getattr(cost, name), getattr(longer, name)) for name in FIGURES}
    return cost._replace(**{name: low + (high - low) * times / of for name, (low, high) in figures.items()})


@dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange of a stage's replicas: its share of all steps, rounds of messages, and codec work."""

    share: float
    pair_bytes: tuple[float, ...]
    """Bytes of each message between two replicas, by round."""
    work: float
    """Dense bytes processed by the codecs of one replica."""

    def transfers(self, stage: int, num_replicas: int, shards: int = 1) -> Transfers:
        """Return the messages between all replicas of a stage; each may consist of `shards` members that send a shard each."""
        pairs = np.full((2, 1), EVERY)
        if shards > 1:
            source, target, shard = np.ogrid[:num_replicas, :num_replicas, :shards]
            members = np.broadcast_arrays(source * shards + shard, target * shards + shard)
            pairs = np.stack([each[~np.eye(num_replicas, dtype=bool)].reshape(-1) for each in members])
        rounds, count = len(self.pair_bytes), pairs.shape[1]
        transfers = np.zeros(rounds * count, TRANSFER)
        transfers["round"] = np.repeat(np.arange(rounds), count)
        transfers["wire_bytes"] = np.repeat(np.array(self.pair_bytes) / shards, count)
        transfers["source_replica"], transfers["target_replica"] = np.tile(pairs, rounds)
        transfers["direction"] = EXCHANGES[0]
        transfers["source_stage"] = transfers["target_stage"] = transfers["stage"] = stage
        return transfers


@lru_cache(maxsize=256)
def method_of(text: str) -> ReplicaMethod:
    """Return the replica method written in `text`."""
    return read_config("topics-gpt", ["num_replicas=2", f"replica_gradient={text}"]).replica_methods()[0]


@lru_cache(maxsize=4096)
def exchange_of(method: str, shape: tuple[int, ...], num_replicas: int) -> tuple[Exchange, ...]:
    """Return the exchanges of one parameter of `shape` by a method, for each kind of step with an exchange.

    Raises InputError if the method's messages depend on more than sizes.
    """
    rule = method_of(method)
    if isinstance(rule, LocalSteps) and type(rule).part is LocalSteps.part and rule.steps > 1:
        (each,) = exchange_of(repr(replace(rule, steps=1)), shape, num_replicas)
        return (replace(each, share=1 / rule.steps),)
    small = _small(shape)
    few = FEW if num_replicas > FEW[-1] else (num_replicas,)
    try:
        counted = [_counted(method, small, replicas) for replicas in few]
    except InputError:
        raise
    except ValueError:
        if len(shape) == 1:
            raise
        return exchange_of(method, (math.prod(shape),), num_replicas)  # narrower than a rank: sent as a vector is
    kinds = []
    weights = _weights(shape, small)
    for kind, (share, _) in enumerate(counted[0]):
        terms = np.stack([_terms(np.array(each[kind][1])) for each in counted])
        figures = np.einsum("t,dtf->df", weights, terms)
        work, sizes = figures[0, 0], figures[0, 1:]
        if len(few) > 1:
            sizes = weights @ _of_many(terms[:2, :, 1:], few[:2], num_replicas)
            counts = np.array([(1.0, count, 1 / count) for count in (*few, num_replicas)])
            work = counts[-1] @ np.linalg.solve(counts[:-1], figures[:, 0])
        kinds.append(Exchange(share, tuple(sizes.tolist()), float(work)))
    return tuple(kinds)


def sum_exchanges(parts: Sequence[tuple[int, tuple[Exchange, ...]]]) -> tuple[Exchange, ...]:
    """Return a stage's exchanges, summed over its parameters' counts and exchanges."""
    counts, kinds = [count for count, _ in parts], []
    for exchanges in itertools.zip_longest(*(exchanges for _, exchanges in parts)):
        present = [(count, each) for count, each in zip(counts, exchanges, strict=True) if each is not None]
        sizes = ([count * size for size in each.pair_bytes] for count, each in present)
        pair_bytes = tuple(map(sum, itertools.zip_longest(*sizes, fillvalue=0.0)))
        kinds.append(Exchange(present[0][1].share, pair_bytes, sum(count * each.work for count, each in present)))
    return tuple(kinds)


def _small(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return smaller shapes to exchange instead, with the first two axes shortened in turn; a small shape is kept.

    If one axis is shorter than `SMALL`, the other stays longer, so that the matrix has as many values.
    """
    longer = math.ceil(SMALL[0] / min(shape[:2])) if len(shape) > 1 else 1
    short = [tuple(min(length, longer * side) for length in shape[:2]) for side in SMALL]
    if short[1] == shape[:2]:
        return (shape,)
    pairs = itertools.product(*zip(*short, strict=True)) if len(shape) > 1 else short
    return tuple((*pair, *shape[2:]) for pair in pairs)


def _weights(shape: tuple[int, ...], small: Sequence[tuple[int, ...]]) -> Floats:
    """Return the factors of `_terms` that extrapolate figures of the `small` shapes to `shape`, linearly in each of two axes."""
    if len(small) == 1:
        return np.ones(1)
    t, *other = (
        (length - low) / (high - low) if high > low else 0.0
        for length, low, high in zip(shape[:2], small[0], small[-1], strict=False)
    )
    return np.array([1.0, t, other[0], t * other[0]] if other else [1.0, t])


def _terms(figures: Floats) -> Floats:
    """Split figures of the small shapes (shape, figure) into a constant and the additions of each axis and of both together."""
    if len(figures) < 4:
        return np.concatenate([figures[:1], figures[1:] - figures[:1]])
    corner, across, down, far = figures
    mixed = far - across - down + corner
    return np.stack([corner, down - corner, across - corner, np.where(np.abs(mixed) <= ROUNDING, 0.0, mixed)])


def _of_many(terms: Floats, few: Sequence[int], num_replicas: int) -> Floats:
    """Extrapolate terms of message sizes with `few` replicas (replicas, term, round) to `num_replicas`.

    In terms that grow with the shape, a part that does not depend on the number of replicas counts as 0 up to `STARTED` bytes,
    since a large shape would multiply a rounding error.
    """
    divided = (terms[1] - terms[0]) / (1 / few[1] - 1 / few[0])
    fixed = terms[0] - divided / few[0]
    rounded = np.abs(fixed) <= STARTED
    rounded[0] = False  # the headers
    return np.asarray(np.where(rounded, terms[0] * few[0] / num_replicas, fixed + divided / num_replicas))


@lru_cache(maxsize=1024)
def _counted(
    method: str, shapes: tuple[tuple[int, ...], ...], num_replicas: int
) -> tuple[tuple[float, tuple[tuple[float, ...], ...]], ...]:
    """Return the share of each kind of step and, by shape, its work and its pair bytes in each round."""
    config = read_config(
        "topics-gpt",
        [
            f"num_stages={len(shapes)}",
            f"num_replicas={num_replicas}",
            f"replica_gradient={method}",
            f"batch_size={num_replicas}",
            "num_microbatches=1",
        ],
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices, on cores that may be busy
    try:
        costs = replica_costs(config, [{"weight": shape} for shape in shapes], UNIT, [])
    finally:
        torch.set_num_threads(threads)
    rule = config.replica_methods()[0]
    parts = [rule.part(step) for step in range(rule.period)]
    kinds = []
    for part in dict.fromkeys(cost.part for cost in costs):
        own = [cost for cost in costs if cost.part == part]
        rounds = max(int(cost.transfers["round"].max(initial=-1)) + 1 for cost in own)
        figures = tuple((UNIT * cost.method_s, *_pair_bytes(cost, rounds, num_replicas)) for cost in own)
        kinds.append((parts.count(part) / len(parts), figures))
    return tuple(kinds)


def _pair_bytes(cost: ReplicaCost, rounds: int, num_replicas: int) -> list[float]:
    """Return the mean bytes of a message in each round; raises InputError unless each replica sends to every other."""
    every = (cost.transfers["source_replica"] == EVERY) | (cost.transfers["target_replica"] == EVERY)
    messages = np.where(every, num_replicas - 1, 1)  # of a row
    counts, sizes = (
        np.bincount(cost.transfers["round"], values, rounds)
        for values in (messages, messages * cost.transfers["wire_bytes"])
    )
    if not np.isin(counts, (0, num_replicas * (num_replicas - 1))).all():
        raise InputError(f"{cost.method} sends to some replicas only: price a recorded run by `raysim replay`.")
    return (sizes / np.maximum(counts, 1)).tolist()  # type: ignore[no-any-return]
