"""A step of known costs on any network: its seconds, their causes, its timeline, and its price with churn and money."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.network.collectives import EXCHANGES
from raysim.network.costs import Expected, FleetCosts, expected_step
from raysim.network.prices import after_pipelines, overlapped_steps, without_exchange
from raysim.network.profile import Floats, Profile
from raysim.network.sharding import Sharded
from raysim.network.simulate import Mixture, simulate, step_seconds
from raysim.network.timeline import Timeline
from raysim.network.topology import FREE, Network, Placement
from raysim.network.transport import Transport
from raysim.notation import InputError
from raysim.schedules.arrays import ActionTable, make_table
from raysim.schedules.families import Schedule

TOGETHER = 64
"""Networks on which sharded replicas are priced in one pass, each with its own costs."""


class Parts(NamedTuple):
    """Seconds of a step by cause, adding up to the step."""

    compute: float
    bubble: float
    """Idle time due to the schedule, plus the optimiser, on an unlimited network."""
    codecs: float
    links: float
    tied: float
    """Sums of tied parameters, such as an embedding that is also the head, over their stages."""
    averaging: float
    latency: float


@dataclass(frozen=True, eq=False)
class TimedStep:
    """A step of known costs, ready to be simulated on any network."""

    kinds: Mixture
    """Kinds of step, with their shares of all steps; they differ in the exchange at their end, and the first has most bytes."""
    schedule: Schedule
    num_microbatches: int
    num_replicas: int
    sharded: Sharded | None = None
    """The units of sharded replicas."""
    averaging_delay: int = 0
    """Steps by which an average may lag before a step waits for it."""
    interval: float = 1.0
    """Steps from one average to the next."""
    placement: Placement | None = None
    """The host of every worker; by default see `raysim.network.simulate.simulate`."""

    @property
    def profile(self) -> Profile:
        """The costs of the first kind."""
        return self.kinds[0][1]

    @property
    def workers(self) -> int:
        """Workers of one replica."""
        return max(self.schedule.workers(self.profile.num_stages)) + 1

    @property
    def num_workers(self) -> int:
        """Workers of all replicas."""
        return self.num_replicas * self.workers

    @property
    def samples(self) -> int:
        """Samples of a step over all replicas; 0 if not known."""
        return self.profile.microbatch_samples * self.num_microbatches * self.num_replicas

    @property
    def compute_s(self) -> float:
        """Compute seconds of a step, averaged over workers."""
        return self.num_microbatches * float(self.profile.compute_s.mean(axis=(0, 3)).sum()) / self.workers

    def over(self, transport: Transport) -> TimedStep:
        """Return the step with messages over a transport, whose host overheads are added to the step's own."""
        costs: dict[str, Any] = transport.host.overheads(self.num_workers)
        whole = {name: getattr(self.profile, name) + seconds for name, seconds in costs.items()}
        return replace(self, kinds=[(share, replace(each, transport=transport, **whole)) for share, each in self.kinds])

    def simulate(self, network: Network, kind: int = 0) -> Timeline:
        """Return the timeline of one of the kinds; raises InputError if it does not fit the network."""
        try:
            (profile,) = self._profiles(self.kinds[kind][1], [network])
            if self.averaging_delay:
                profile = after_pipelines(profile)
            timeline = simulate(self.schedule, profile, network, **self._counts)
        except ValueError as error:
            raise InputError(str(error)) from None
        hides = self.averaging_delay and timeline.collectives
        return timeline.under_next_step(float(self.seconds([network])[0, kind])) if hides else timeline

    def step_s(self, network: Network) -> float:
        """Return the seconds of a mean step, without its timeline; raises InputError if it does not fit the network."""
        return float(self.steps_s([network])[0])

    def steps_s(self, networks: Sequence[Network]) -> Floats:
        """Return the seconds of a mean step on each network; raises InputError."""
        return np.array(
            sum(share * kind for (share, _), kind in zip(self.kinds, self.seconds(networks).T, strict=True))
        )

    def seconds(self, networks: Sequence[Network]) -> Floats:
        """Return the seconds of every kind on every network: shape (networks, kinds); later steps may hide part of an exchange."""
        profiles = [profile for _, profile in self.kinds]
        try:
            owner = self.schedule.workers(self.profile.num_stages)
            return overlapped_steps(self._waiting, profiles, networks, self.averaging_delay, self.interval, owner)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _waiting(self, profiles: Sequence[Profile], networks: Sequence[Network]) -> Floats:
        """Return the seconds of steps that wait for their exchange, all with the same jitter: shape (networks, profiles)."""
        if len(profiles) > 1 and any(network.jitter_s for network in networks):
            return np.concatenate([self._waiting([each], networks) for each in profiles], axis=1)
        waiting: Callable[..., Floats] = partial(step_seconds, self.schedule, **self._counts)
        if self.sharded is None:
            return waiting(profiles, networks)
        rows = []
        for chosen in _alike(networks):
            costs = [own for profile in profiles for own in self._profiles(profile, chosen)]
            every = waiting(costs, chosen).reshape(len(chosen), len(profiles), len(chosen))
            rows.append(np.diagonal(every, axis1=0, axis2=2).T)  # each network with its own costs
        return np.concatenate(rows)

    @property
    def _counts(self) -> dict[str, Any]:
        names = ("num_microbatches", "num_replicas", "placement")
        return {name: getattr(self, name) for name in names}

    def parts(self, network: Network, dense_s: float | None = None) -> Parts:
        """Return a step's seconds by cause: those saved by removing latency, the exchanges, all bytes, and codecs in turn.

        `dense_s`: the step without compression on an unlimited network; by default this step has no codecs.
        """
        prompt = network.without_latency
        step_s, prompt_s, own_s = self.steps_s([network, prompt, FREE]).tolist()
        quiet = without_exchange(self.profile)
        silent = [(1.0, quiet), (1.0, without_exchange(quiet, EXCHANGES[1]))]
        quiet_s, links_s = np.subtract(*replace(self, kinds=silent, sharded=None).seconds([prompt, FREE])).tolist()
        free_s = own_s if dense_s is None else dense_s
        return Parts(
            compute=self.compute_s,
            bubble=free_s - self.compute_s,
            codecs=own_s - free_s,
            links=links_s,
            tied=quiet_s - links_s,
            averaging=prompt_s - own_s - quiet_s,
            latency=step_s - prompt_s,
        )

    def expected(self, costs: FleetCosts, network: Network, *, gpus: int = 1) -> Expected:
        """Return the mean step with the churn and money of `costs`; raises InputError if it does not fit the network.

        `gpus`: GPUs of each worker.
        """
        kinds = [(share, self.simulate(network, i)) for i, (share, _) in enumerate(self.kinds)]
        period = self.interval if self.num_replicas > 1 else 1.0
        shards = 1 if self.sharded is None else self.sharded.sharding.shards
        sent = self.sharded_bytes(network)
        return expected_step(
            costs, self.step_s(network), kinds, period=period, gpus=gpus, shards=shards, sharded_bytes=sent
        )

    def sharded_bytes(self, network: Network) -> float:
        """Return the bytes of parameters and gradients that leave hosts, or the sites of a network, in a step."""
        if self.sharded is None:
            return 0.0
        _, places = self._table_and_hosts(network)
        if network.host_sites is not None:
            places = np.array([network.sites.index(site) for site in network.host_sites])[places]
        return self.sharded.crossing_bytes(places, self.num_microbatches)

    def _profiles(self, profile: Profile, networks: Sequence[Network]) -> list[Profile]:
        """Return the costs on each network, with sharded replicas' gathers and scatters in the actions."""
        if self.sharded is None:
            return [profile] * len(networks)
        return self.sharded.profiles(profile, *self._table_and_hosts(networks[0]), networks)

    def _table_and_hosts(self, network: Network) -> tuple[ActionTable, NDArray[np.int64]]:
        """Return the rows of the step, and the host of each (replica, stage)."""
        table = make_table(self.schedule, self.profile.num_stages, self.num_microbatches)
        placement = self.placement or Placement.spread(self.num_replicas * table.num_workers, network.num_hosts)
        return table, placement.by_replica(table.num_workers)[:, table.owner]


def _alike(networks: Sequence[Network]) -> Iterator[Sequence[Network]]:
    """Yield consecutive networks that can be priced together: with any number of hosts, and without jitter."""
    special = any(network.num_hosts is not None or network.jitter_s for network in networks)
    count = 1 if special else TOGETHER
    for low in range(0, len(networks), count):
        yield networks[low : low + count]
