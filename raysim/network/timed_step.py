"""A step of known costs on any network: its seconds, its timeline, and its price with churn and money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.network.costs import Expected, FleetCosts, expected_step
from raysim.network.prices import after_pipelines, overlapped_steps
from raysim.network.profile import Profile
from raysim.network.sharding import Sharded
from raysim.network.simulate import simulate, step_seconds
from raysim.network.timeline import Timeline
from raysim.network.topology import Network, Placement
from raysim.network.transport import Transport
from raysim.notation import InputError
from raysim.schedules.arrays import ActionTable, make_table
from raysim.schedules.families import Schedule


@dataclass(frozen=True, eq=False)
class TimedStep:
    """A step of known costs, ready to be simulated on any network."""

    profile: Profile
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
    def num_workers(self) -> int:
        """Workers of all replicas."""
        return self.num_replicas * len(self.schedule.rows(self.profile.num_stages, self.num_microbatches))

    @property
    def samples(self) -> int:
        """Samples of a step over all replicas; 0 if not known."""
        return self.profile.microbatch_samples * self.num_microbatches * self.num_replicas

    def over(self, transport: Transport) -> TimedStep:
        """Return the step with messages over a transport, whose host overheads are added to the step's own."""
        costs: dict[str, Any] = transport.host.overheads(self.num_workers)
        whole = {name: getattr(self.profile, name) + seconds for name, seconds in costs.items()}
        return replace(self, profile=replace(self.profile, transport=transport, **whole))

    def simulate(self, network: Network) -> Timeline:
        """Return the timeline of the step; raises InputError if it does not fit the network."""
        try:
            (profile,) = self.profiles([network])
            if self.averaging_delay:
                profile = after_pipelines(profile)
            timeline = simulate(self.schedule, profile, network, **self._counts)
        except ValueError as error:
            raise InputError(str(error)) from None
        hides = self.averaging_delay and timeline.collectives
        return timeline.under_next_step(self.step_s(network)) if hides else timeline

    def step_s(self, network: Network) -> float:
        """Return the seconds of the step, without its timeline; raises InputError if it does not fit the network."""
        waiting = partial(step_seconds, self.schedule, **self._counts)
        try:
            profiles = self.profiles([network])
            return float(overlapped_steps(waiting, profiles, [network], self.averaging_delay, self.interval)[0, 0])
        except ValueError as error:
            raise InputError(str(error)) from None

    @property
    def _counts(self) -> dict[str, Any]:
        names = ("num_microbatches", "num_replicas", "placement")
        return {name: getattr(self, name) for name in names}

    def expected(self, costs: FleetCosts, network: Network) -> Expected:
        """Return the step with the churn and money of `costs`; raises InputError if it does not fit the network."""
        timeline = self.simulate(network)
        return expected_step(costs, timeline.step_s, [(1.0, timeline)], sharded_bytes=self.sharded_bytes(network))

    def sharded_bytes(self, network: Network) -> float:
        """Return the bytes of parameters and gradients that leave hosts, or the sites of a network, in a step."""
        if self.sharded is None:
            return 0.0
        _, places = self._table_and_hosts(network)
        if network.host_sites is not None:
            places = np.array([network.sites.index(site) for site in network.host_sites])[places]
        return self.sharded.crossing_bytes(places, self.num_microbatches)

    def profiles(self, networks: Sequence[Network]) -> list[Profile]:
        """Return the costs on each network, with sharded replicas' gathers and scatters in the actions."""
        if self.sharded is None:
            return [self.profile] * len(networks)
        return self.sharded.profiles(self.profile, *self._table_and_hosts(networks[0]), networks)

    def _table_and_hosts(self, network: Network) -> tuple[ActionTable, NDArray[np.int64]]:
        """Return the rows of the step, and the host of each (replica, stage)."""
        table = make_table(self.schedule, self.profile.num_stages, self.num_microbatches)
        placement = self.placement or Placement.spread(self.num_replicas * table.num_workers, network.num_hosts)
        return table, placement.by_replica(table.num_workers)[:, table.owner]
