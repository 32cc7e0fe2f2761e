"""Schedule x Profile x Network -> Timeline: one training step on any network.

Channels are ordered and blocking, like Ray's: a worker runs its row in order, and an action whose packet has not arrived delays all
later actions. Codec time is on the clock of the worker that packs or unpacks.

>>> from raysim.network.presets import parse_network
>>> from raysim.schedules import OneFOneB
>>> profile = Profile.uniform(num_stages=4, forward_s=1.0, backward_s=2.0, wire_bytes=1_250_000)
>>> simulate(OneFOneB(), profile, parse_network("free"), num_microbatches=8).step_s
33.0
>>> simulate(OneFOneB(), profile, parse_network("10mbps"), num_microbatches=8).step_s
49.0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from raysim.network.collectives import Collective, TimedCollective, codec_seconds, total_seconds
from raysim.network.profile import COSTS, Floats, Profile
from raysim.network.rounds import Ints, equal_hosts, round_seconds
from raysim.network.step_end import Starts, last_backwards, on_end, start_times, steady_end, step_collectives
from raysim.network.timeline import Timeline
from raysim.network.topology import Network, Placement, links
from raysim.network.wiring import Ends, Moments, SharedWiring, are_ordered
from raysim.notation import check_integer
from raysim.schedules.arrays import ActionTable, steps_table
from raysim.schedules.families import Schedule


def simulate(
    schedule: Schedule,
    profile: Profile,
    network: Network,
    *,
    num_microbatches: int | None = None,
    num_replicas: int | None = None,
    placement: Placement | None = None,
    seed: int = 0,
) -> Timeline:
    """Return the timeline of one step.

    `num_microbatches` and `num_replicas` default to the profile's. Without `placement` every worker has its own host, or if the
    network has a fixed number of hosts, workers are spread evenly over them. Replicas average by `profile.transport.averaging`.
    Stages update when all collectives are done. `seed` is for the jitter.

    A schedule without a flush is simulated over several steps. The timeline is of one in the steady state, from the end of the
    previous step to its own end.

    A faster network never takes longer if the schedule alone orders every wire. If workers share ports or cores, it may in rare
    cases: a packet that arrives sooner can delay another, as in any list scheduling (Graham's anomalies).
    """
    setting = _set_up(schedule, profile, network, num_microbatches, num_replicas, placement)
    table = setting.table
    ((_, _, end),) = setting.ends([network], [profile], seed, keep=True)
    moments = end.moments
    assert moments.times is not None
    return Timeline(
        table=table,
        profile=end.profile,
        network=network,
        placement=setting.placement,
        row=moments.row,
        times=moments.times - end.began_s,
        pipeline_s=float(end.pipeline_s[0]),
        collectives=tuple(
            TimedCollective(collective, float(start), float(over), float(codec), *_rounds_s(collective, network))
            for collective, start, over, codec in zip(
                end.collectives, end.starts.start_s[:, 0], end.starts.end_s[:, 0], end.codec_s[:, 0], strict=True
            )
        ),
        collectives_end_s=float(end.starts.over_s[0]),
        step_s=float(end.step_s[0]),
    )


def _rounds_s(collective: Collective, network: Network) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of a collective's rounds over all buckets, and the seconds saved in each without latency."""
    networks = [network, network.without_latency]
    priced = [
        (times, (collective.repeats * round_seconds(each, networks)).tolist()) for times, each in collective.rounds
    ]
    seconds = [both for times, both in priced for _ in range(times)]
    return tuple(with_latency for with_latency, _ in seconds), tuple(both[0] - both[1] for both in seconds)


def step_seconds(
    schedule: Schedule,
    profiles: Profile | Sequence[Profile],
    networks: Sequence[Network],
    *,
    num_microbatches: int | None = None,
    num_replicas: int | None = None,
    placement: Placement | None = None,
    seed: int = 0,
) -> Floats:
    """Return `step_s` for every network and every profile: shape (networks, profiles). Arguments as in `simulate`.

    If nothing is shared, thousands of networks take a fraction of a second. Without jitter, profiles with equal actions share a
    pass; with it, the k-th profile uses `seed` + k.
    """
    steps = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if len({profile.compute_s.shape for profile in steps}) != 1:
        raise ValueError(
            f"`profiles` must be at least one, all of one shape, but got {[profile.compute_s.shape for profile in steps]}."
        )
    result = np.empty((len(networks), len(steps)))
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, network in enumerate(networks):
        groups.setdefault((network.num_hosts, network.host_sites, network.sharing == "inbound"), []).append(i)
    for rows in groups.values():
        alike = [networks[i] for i in rows]
        setting = _set_up(schedule, steps[0], alike[0], num_microbatches, num_replicas, placement)
        for lanes, chosen, end in setting.ends(alike, steps, seed):
            result[np.ix_(np.array(rows)[lanes], np.array(chosen))] = end.step_s.reshape(len(chosen), -1).T
    return result


Mixture = Sequence[tuple[float, Profile]]
"""Kinds of step, with their shares of all steps."""


def break_even_bps(
    schedule: Schedule,
    profile: Profile | Mixture,
    dense: Profile | Mixture,
    network: Network,
    *,
    lowest_bps: float = 1e5,
    highest_bps: float = 1e12,
    num_microbatches: int | None = None,
    placement: Placement | None = None,
    dense_schedule: Schedule | None = None,
) -> float:
    """Return the bandwidth below which steps of `profile` (compressed) are faster than those of `dense`, else as in `network`.

    Either may be a mixture of several kinds of step, compared by the mean. `dense_schedule`, the schedule of `dense`, defaults to
    `schedule`. Returns 0.0 if it is never faster between the limits, and infinity if it is still faster at the highest. Accurate to
    1e-6, by nested grids.
    """
    if network.num_hosts is not None and isinstance(network.bandwidth_bps, tuple):
        raise ValueError(f"`network` must have one bandwidth for a break-even, but got {network.notation()}.")
    low, high = lowest_bps, highest_bps
    for depth in range(5):
        grid = np.geomspace(low, high, 64)
        networks = [replace(network, bandwidth_bps=float(bandwidth), name="") for bandwidth in grid]
        seconds = []
        for rows, costs in ((schedule, profile), (dense_schedule or schedule, dense)):
            kinds = [(1.0, costs)] if isinstance(costs, Profile) else costs
            of_kinds = step_seconds(
                rows, [kind for _, kind in kinds], networks, num_microbatches=num_microbatches, placement=placement
            )
            seconds.append(of_kinds @ [share for share, _ in kinds])
        wins = np.flatnonzero(seconds[0] < seconds[1])
        if not len(wins):
            return 0.0 if depth == 0 else low
        if wins[-1] == len(grid) - 1:
            return math.inf if depth == 0 else high
        low, high = float(grid[wins[-1]]), float(grid[wins[-1] + 1])
        if high / low < 1 + 1e-6:
            break
    return math.sqrt(low * high)


class _End(NamedTuple):
    """The end of several profiles' steps on several networks; the last axis of arrays is (profile, network), as one."""

    profile: Profile
    """The first one's costs of all steps of the table."""
    moments: Moments
    """Ends of work, with the costs of the first profile."""
    began_s: Floats
    """Start of the priced step, on the table's clock."""
    pipeline_s: Floats
    collectives: Sequence[Collective]
    codec_s: Floats
    """By (collective, profile)."""
    starts: Starts
    step_s: Floats


class _Setting(NamedTuple):
    """A schedule for profiles of one shape, and networks with the same hosts."""

    schedule: Schedule
    table: ActionTable
    replicas: int
    placement: Placement

    def ends(
        self, networks: Sequence[Network], profiles: Sequence[Profile], seed: int, *, keep: bool = False
    ) -> Iterator[tuple[list[int], list[int], _End]]:
        """Yield, by index, the networks handled by one kernel, the profiles with the same collectives, and the ends of their steps."""
        from raysim.network.fast_path import OrderedWiring  # loads kernels, which is slow: only on first use

        table, placement = self.table, self.placement
        whole = [_joined(on_end(profile, table), table) for profile in profiles]
        ends = Ends.of(table, placement, profiles[0].compute_s.shape[2])
        ordered = are_ordered(networks, ends, placement, asked=any((each.messages > 1).any() for each in profiles))
        labels, hosts = equal_hosts(networks, placement.num_hosts), np.array(placement.hosts)
        of_ordered = partial(OrderedWiring.of, equal=profiles[0].num_replicas == 1)
        for of_kernel, served in ((of_ordered, ordered), (SharedWiring.of, ~ordered)):
            lanes: list[int] = np.flatnonzero(served).tolist()
            if not lanes:
                continue
            chosen = [networks[lane] for lane in lanes]
            # from the driver, on the first worker's host, to the farthest worker
            farthest_s = links(chosen, hosts[0], hosts)[1].max(axis=0)
            run = partial(of_kernel(table, chosen, placement, ends).run, self.schedule, seed=seed, keep=keep)
            first = _first_alike(whole, chosen)
            kept = dict.fromkeys(first)
            moments = dict(zip(kept, run([whole[i] for i in kept]), strict=True))
            groups: dict[tuple[Collective, ...], list[int]] = {}
            for i, profile in enumerate(whole):
                groups.setdefault(self.collectives(profile, chosen[0], labels), []).append(i)
            for collectives, alike in groups.items():
                yield (
                    lanes,
                    alike,
                    self._end(chosen, collectives, [(whole[i], moments[first[i]]) for i in alike], ends, farthest_s),
                )

    def _end(
        self,
        networks: Sequence[Network],
        collectives: tuple[Collective, ...],
        steps: Sequence[tuple[Profile, Moments]],
        packets: Ends,
        farthest_s: Floats,
    ) -> _End:
        """Return the ends of steps with these collectives; `farthest_s`: latency from the driver to its farthest worker, by network."""
        table, (profiles, moments) = self.table, zip(*steps, strict=True)
        free_s, done_s = (
            np.concatenate(parts, axis=-1) for parts in zip(*(each[1:3] for each in moments), strict=True)
        )
        flushed = table.num_steps == 1
        least_s = 0.0 if flushed else np.concatenate([packets.busiest_wire_s(table, p, networks) for p in profiles])
        began_s, pipeline_s, ready_s = steady_end(table, free_s, done_s, least_s)
        codec_s = np.stack([codec_seconds(collectives, table.owner, each.method_s) for each in profiles], axis=-1)
        seconds = codec_s[:, :, None] + total_seconds(collectives, networks)[:, None]
        starts = start_times(
            collectives,
            seconds.reshape(len(collectives), len(profiles) * len(networks)),
            ready_s,
            np.repeat(last_backwards(table, profiles), len(networks), axis=-1),
            pipeline_s,
        )
        after_s = np.array([each.step_s for each in profiles])[:, None]
        if flushed:  # else stages have already updated, and the driver does not wait
            trips_s = np.array([each.transport.step_trips for each in profiles])[:, None] * farthest_s
            update_s = [np.bincount(table.owner, each.update_s).max() for each in profiles]  # a worker's stages in turn
            after_s = np.array(update_s)[:, None] + trips_s + after_s
        step_s = starts.over_s + np.broadcast_to(after_s, (len(profiles), len(networks))).reshape(-1)
        return _End(profiles[0], moments[0], began_s, pipeline_s, collectives, codec_s, starts, step_s)

    def collectives(self, profile: Profile, network: Network, labels: Ints) -> tuple[Collective, ...]:
        """Return the collectives that end the step: the profile's transfers and the uncompressed averages."""
        replicas = self.replicas
        if replicas == 1 and not len(profile.transfers):
            return ()
        for name in ("source_replica", "target_replica"):
            highest = int(profile.transfers[name].max(initial=0))
            if highest >= replicas:
                raise ValueError(f"`transfers` must be between {replicas} replicas, but got replica {highest}.")
        alike = tuple(labels.tolist())
        return step_collectives(profile, self.placement, tuple(self.table.owner.tolist()), network.host_sites, alike)


def _first_alike(profiles: Sequence[Profile], networks: Sequence[Network]) -> list[int]:
    """Return for each profile the first with equal actions, whose pipeline takes as long; itself if a network has jitter."""
    if any(network.jitter_s for network in networks):
        return list(range(len(profiles)))
    names = ("transport", "blocking", "call_s", "message_s", "byte_s")
    keys = [
        (*(getattr(each, name) for name in names), *(getattr(each, name).tobytes() for name in COSTS))
        for each in profiles
    ]
    found: dict[tuple[Any, ...], int] = {}
    return [found.setdefault(key, i) for i, key in enumerate(keys)]


def _set_up(
    schedule: Schedule,
    profile: Profile,
    network: Network,
    num_microbatches: int | None,
    num_replicas: int | None,
    placement: Placement | None,
) -> _Setting:
    """Return the setting after checking that its parts match."""
    count = num_microbatches if num_microbatches is not None else profile.num_microbatches or 1
    check_integer("num_microbatches", count, 1)
    if profile.num_microbatches not in (None, count):
        raise ValueError(
            f"`num_microbatches` must be the profile's ({profile.num_microbatches}), but got {count}. "
            f"Use `Profile.mean_microbatch` to simulate another number."
        )
    if profile.blocking and network.sharing == "inbound":
        raise ValueError('`blocking` sends need a network whose `sharing` is not "inbound".')
    table = steps_table(schedule, profile.num_stages, count)
    if int(table.op.max()) >= profile.compute_s.shape[2]:
        raise ValueError(
            f"`profile` must hold costs of the weights' backward for {schedule!r}, but has only forward and backward. "
            f"Use `Profile.split_backward`."
        )
    if placement is not None:
        replicas = len(placement.by_replica(table.num_workers))
        if num_replicas not in (None, replicas):
            raise ValueError(f"`hosts` must name workers of {num_replicas} replicas, but got {replicas}.")
    else:
        replicas = num_replicas if num_replicas is not None else profile.num_replicas
        check_integer("num_replicas", replicas, 1)
        placement = Placement.spread(replicas * table.num_workers, network.num_hosts)
    if profile.num_replicas not in (1, replicas):
        raise ValueError(f"`num_replicas` must be the profile's ({profile.num_replicas}), but got {replicas}.")
    return _Setting(schedule, table, replicas, placement)


def _joined(profile: Profile, table: ActionTable) -> Profile:
    """Return the profile with the weight part of backward added to B for actions without a W in the schedule."""
    if profile.compute_s.shape[2] < 3:
        return profile
    apart = np.zeros((table.num_stages, table.num_microbatches), bool)
    apart[table.stage[table.op == 2], table.microbatch[table.op == 2]] = True
    if apart.all():
        return profile
    changed: dict[str, Any] = {}
    for name in ("compute_s", "cpu_s", "shard_s"):
        costs = getattr(profile, name)
        costs = np.broadcast_to(costs, (*costs.shape[:3], table.num_microbatches)).copy()
        costs[:, :, 1] += np.where(apart, 0.0, costs[:, :, 2])
        changed[name] = costs
    return replace(profile, **changed)
