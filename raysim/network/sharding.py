"""Sharded replicas (FSDP, ZeRO-3): parameters gathered and gradients scattered unit by unit, within the actions of a step.

A forward gathers the parameters of its units in order, ahead of their compute; a backward gathers them in reverse, and scatters each
unit's gradients once computed. A worker's collectives run on its wire one at a time, in the order issued: with one unit of prefetch,
the gather of the next unit is issued when a unit starts to compute, before that unit's scatter. An action ends when its last unit
has computed and its last scatter is done, since torch's FSDP2 waits for it. With fewer shards than replicas (HSDP), the owners of a
shard then sum it in a ring. Packets between stages and collectives do not slow each other down.

>>> from raysim.network.profile import Profile
>>> from raysim.network.presets import parse_network
>>> from raysim.schedules import GPipe
>>> from raysim.schedules.arrays import make_table
>>> profile = Profile.uniform(num_stages=1, forward_s=4.0, backward_s=8.0)
>>> sharded = Sharded(FSDP(2), (Units.even(4, gather_bytes=8e6, scatter_bytes=8e6),))
>>> table, hosts = make_table(GPipe(), 1, 1), np.array([[0], [1]])
>>> (slow,) = sharded.profiles(profile, table, hosts, [parse_network("8mbps")])  # a unit's gather takes 1 s, and so does its scatter
>>> slow.compute_s[0, 0, :, 0]
array([ 5., 10.])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.network.exchanges import all_gather_rounds, all_reduce_rounds
from raysim.network.profile import Floats, Profile
from raysim.network.rounds import Rounds, crossing_bytes, rounds_s
from raysim.network.topology import Network
from raysim.notation import Notation, check_choice, check_integer, parse_notation
from raysim.schedules.arrays import OPS, ActionTable

RESHARDS = ("forward", "backward", "step")
FORWARD, BACKWARD, WEIGHTS = range(len(OPS))


@dataclass(frozen=True, repr=False)
class FSDP(Notation):
    """Shards parameters, gradients and optimiser over `shards` replicas (ZeRO-3; Rajbhandari et al. 2020, 1910.02054).

    With fewer shards than replicas, each group of `shards` replicas holds a copy, and gradients are averaged over groups (HSDP).
    `reshard_after`: "forward" gathers parameters for every forward and again for its backward (ZeRO-3,
    `reshard_after_forward=True`); "backward" keeps them from a forward to its backward; "step" gathers them once per step and scatters
    the accumulated gradients in the last backward, as torch's pipelines do. `prefetch`: units gathered ahead of the computing one.

    >>> FSDP(8), FSDP(4, reshard_after="step", prefetch=2)
    (FSDP(8), FSDP(4, reshard_after='step', prefetch=2))
    """

    shards: int
    reshard_after: str = "forward"
    prefetch: int = 1

    def __post_init__(self) -> None:
        check_choice("reshard_after", self.reshard_after, RESHARDS)
        self._coerce(
            shards=check_integer("shards", self.shards, 1), prefetch=check_integer("prefetch", self.prefetch, 0)
        )

    def groups(self, num_replicas: int) -> int:
        """Return the number of copies of the model; raises ValueError unless `shards` divides the number of replicas."""
        groups, rest = divmod(num_replicas, self.shards)
        if rest or not groups:
            raise ValueError(f"`shards` of {self!r} must divide the number of replicas ({num_replicas}).")
        return groups

    def counts(self, num_microbatches: int) -> tuple[int, int]:
        """Return how often per step all parameters are gathered and all gradients are scattered.

        >>> [FSDP(8, each).counts(4) for each in RESHARDS]
        [(8, 4), (4, 4), (1, 1)]
        """
        passes = 1 if self.reshard_after == "step" else num_microbatches
        return passes * (2 if self.reshard_after == "forward" else 1), passes


SHARDINGS: dict[str, type[FSDP]] = {FSDP.name(): FSDP}


def parse_sharding(text: str) -> FSDP:
    """Parse the notation of a sharding; the inverse of `repr`. Raises ValueError."""
    return parse_notation(text, SHARDINGS, kind="sharding")


class Units(NamedTuple):
    """The units of a stage, each gathered as a whole, in forward order."""

    share: tuple[float, ...]
    """Shares of the stage's seconds, which sum to 1."""
    gather_bytes: tuple[float, ...]
    """Bytes of a unit's gathered parameters."""
    scatter_bytes: tuple[float, ...]
    """Bytes of a unit's scattered gradients, over all shards."""
    codec_s: tuple[float, ...]
    """Seconds to compress and decompress a unit's gradients."""

    @classmethod
    def even(cls, count: int, gather_bytes: float, scatter_bytes: float) -> Units:
        """Return `count` equal units of a stage with these total bytes."""
        return cls(
            (1 / count,) * count, (gather_bytes / count,) * count, (scatter_bytes / count,) * count, (0.0,) * count
        )


@dataclass(frozen=True)
class Sharded:
    """The units of every stage of sharded replicas."""

    sharding: FSDP
    stages: tuple[Units, ...]
    coded: bool = False
    """Gradients are compressed for each owner and sent to it directly, instead of around a ring."""
    sums_groups: bool = True
    """Groups sum their gradients after each scatter; otherwise they train separately, as in local steps."""

    def sent_bytes(self, num_replicas: int, num_microbatches: int) -> float:
        """Return the bytes sent per step by the workers of one replica.

        With n shards, P bytes of parameters and G of gradients, a gather sends P (n - 1) / n and a scatter G (n - 1) / n. HSDP's sum
        over R groups adds 2 (R - 1) / R G / n to each scatter.
        """
        shards, groups = self.sharding.shards, self.sharding.groups(num_replicas)
        gathers, scatters = self.sharding.counts(num_microbatches)
        gathered = sum(sum(units.gather_bytes) for units in self.stages)
        scattered = sum(sum(units.scatter_bytes) for units in self.stages)
        across = 2 * (groups - 1) / groups / shards if self.sums_groups else 0.0
        return gathers * gathered * (shards - 1) / shards + scatters * scattered * ((shards - 1) / shards + across)

    def crossing_bytes(self, places: NDArray[np.int64], num_microbatches: int) -> float:
        """Return the bytes sent per step between places such as hosts or sites, given by (replica, stage)."""
        counts = zip(("gather_bytes", "scatter_bytes"), self.sharding.counts(num_microbatches), strict=True)
        return sum(
            times * crossing_bytes(self._rounds(sum(getattr(units, name)), len(places), name != "gather_bytes"), column)
            for name, times in counts
            for units, column in zip(self.stages, places.T, strict=True)
        )

    def profiles(
        self, profile: Profile, table: ActionTable, hosts: NDArray[np.int64], networks: Sequence[Network]
    ) -> list[Profile]:
        """Return the profile on each network, with the seconds added to its actions by gathers and scatters.

        `table`: the rows of a step. `hosts`: by (replica, stage). Raises ValueError if replicas do not fill the groups.
        """
        self.sharding.groups(len(hosts))
        once = self.sharding.reshard_after == "step"
        shape = (*profile.compute_s.shape[:3], table.num_microbatches if once else profile.compute_s.shape[3])
        whole = np.broadcast_to(profile.compute_s, shape)
        busy = whole.copy()
        seconds = np.repeat(whole[..., None], len(networks), axis=-1)
        apart = shape[2] > WEIGHTS
        for stage, units in enumerate(self.stages):
            gather_s, scatter_s = self._seconds(units, profile, hosts[:, stage], networks)
            first, last = (0, -1) if once else (slice(None), slice(None))
            plan = [(FORWARD, first, True, False)]
            if self.sharding.reshard_after == "forward":
                plan += [(BACKWARD, slice(None), True, not apart)]
            elif not apart:
                plan += [(BACKWARD, last, False, True)]
            plan += [(WEIGHTS, last, False, True)] if apart else []
            for op, chosen, gathers, scatters in plan:
                ahead = op == FORWARD
                order = slice(None) if ahead else slice(None, None, -1)
                busy[:, stage, op, chosen] += sum(units.codec_s) if scatters else 0.0
                seconds[:, stage, op, chosen] = chain_s(
                    np.multiply.outer(np.array(units.share)[order], whole[:, stage, op, chosen, None]),
                    gather_s[order] if gathers else None,
                    scatter_s[order] if scatters else None,
                    np.array(units.codec_s)[order],
                    self.sharding.prefetch,
                )
        by_network = np.moveaxis(seconds, -1, 0)
        wide = replace(profile, compute_s=whole)
        return wide.at_seconds(compute_s=by_network, shard_s=np.maximum(by_network - busy, 0.0))

    def _seconds(
        self, units: Units, profile: Profile, hosts: NDArray[np.int64], networks: Sequence[Network]
    ) -> tuple[Floats, Floats]:
        """Return the seconds of each unit's gather, and of its scatter including the sum over groups: (unit, network)."""

        @cache
        def of_size(size: float, scatters: bool) -> Floats:
            if not size:
                return np.zeros(len(networks))
            return rounds_s(self._rounds(size, len(hosts), scatters), hosts, networks, profile.transport)

        gathers = np.stack([of_size(size, False) for size in units.gather_bytes])
        return gathers, np.stack([of_size(size, True) for size in units.scatter_bytes])

    def _rounds(self, size: float, num_replicas: int, scatters: bool) -> list[Rounds]:
        """Return the rounds between replicas of a unit's gather, or of its scatter with the sum over groups."""
        shards, groups = self.sharding.shards, self.sharding.groups(num_replicas)
        shard = size / shards
        # A ring sends the same bytes for a gather and a scatter.
        in_groups = all_gather_rounds(shards, shard, "direct" if scatters and self.coded else "ring")
        replicas = np.arange(num_replicas).reshape(groups, shards)
        rounds = [_in_each(each, replicas) for each in in_groups]
        if scatters and self.sums_groups:  # the owners of each shard, over the groups
            rounds += [_in_each(each, replicas.T) for each in all_reduce_rounds(groups, shard)]
        return rounds


def _in_each(equal: Rounds, groups: NDArray[np.int64]) -> Rounds:
    """Return rounds of one group's positions as rounds of all groups' members (group, position)."""
    crossed = [each.on(members) for each in equal.sends if each.crossed for members in groups]
    paired = [
        each._replace(sources=groups[:, each.sources].reshape(-1), targets=groups[:, each.targets].reshape(-1))
        for each in equal.sends
        if not each.crossed
    ]
    return Rounds(equal.times, (*crossed, *paired))


def chain_s(
    compute_s: Floats, gather_s: Floats | None, scatter_s: Floats | None, codec_s: Floats, prefetch: int
) -> Floats:
    """Return the seconds of an action: units compute in order, each after its gather; collectives share one wire sequentially.

    Arguments are by unit, in compute order; further axes are lanes. The gather of unit i is issued when unit i - `prefetch` starts
    (without prefetch, when unit i - 1 is done), the scatter of a unit when it is done.
    """
    lanes = np.broadcast_shapes(
        compute_s.shape[1:], *(each.shape[1:] for each in (gather_s, scatter_s) if each is not None)
    )
    count = len(compute_s)
    wire, done = np.zeros(lanes), np.zeros(lanes)
    gathered: list[Floats] = []

    def gather(issued: Floats | float) -> None:
        nonlocal wire
        if gather_s is not None and len(gathered) < count:
            wire = np.maximum(wire, issued) + gather_s[len(gathered)]
            gathered.append(wire)

    for _ in range(prefetch):
        gather(0.0)
    for i in range(count):
        if not prefetch:
            gather(done)
        start = done if gather_s is None else np.maximum(done, gathered[i])
        if prefetch:
            gather(start)
        done = start + compute_s[i]
        if scatter_s is not None:
            done = done + codec_s[i]
            wire = np.maximum(wire, done) + scatter_s[i]
    end: Floats = np.maximum(done, wire)
    return end
