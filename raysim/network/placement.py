"""Placement of workers on hosts, and the cores of each host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raysim.notation import check_integer, check_real


@dataclass(frozen=True)
class Placement:
    """The host of every worker, replica by replica, and the cores of the hosts.

    >>> Placement.spread(num_workers=4, num_hosts=8)
    Placement(hosts=(0, 2, 4, 6), cores=None, machines=None, threads=1)
    """

    hosts: tuple[int, ...]
    """Host of worker 0, 1, ... of replica 0, then of replica 1, and so on."""
    cores: tuple[float, ...] | None = None
    """Cores of every machine, shared by its workers; None where workers never slow one another down."""
    machines: tuple[int, ...] | None = None
    """Machine of every host, where namespaces or virtual machines share the cores of one; None: each host is a machine."""
    threads: int = 1
    """Cores that one worker's compute can use; read only where `cores` is given."""

    def __post_init__(self) -> None:
        hosts = tuple(check_integer("hosts", host, 0) for host in self.hosts)
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "threads", check_integer("threads", self.threads, 1))
        highest = max(hosts, default=-1)
        if self.machines is not None:
            machines = tuple(check_integer("machines", machine, 0) for machine in self.machines)
            object.__setattr__(self, "machines", machines)
            if len(machines) <= highest:
                raise ValueError(f"`machines` must be given for {highest + 1} hosts, but got {len(machines)} numbers.")
            highest = max(machines)
        if self.cores is not None:
            cores = tuple(check_real("cores", count, 0, math.inf, open_low=True) for count in self.cores)
            object.__setattr__(self, "cores", cores)
            if len(cores) <= highest:
                what = "hosts" if self.machines is None else "machines"
                raise ValueError(f"`cores` must be given for {highest + 1} {what}, but got {len(cores)} numbers.")

    @classmethod
    def spread(cls, num_workers: int, num_hosts: int | None = None) -> Placement:
        """Return workers spread evenly over the hosts in order; one host each where the number of hosts is open."""
        hosts = num_workers if num_hosts is None else num_hosts
        return cls(tuple(worker * hosts // num_workers for worker in range(num_workers)))

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return max(self.hosts, default=0) + 1


def replica_hosts(placement: Placement, num_workers: int) -> list[Sequence[int]]:
    """Return the hosts of each replica's workers; raises ValueError where they do not come out even."""
    if not placement.hosts or len(placement.hosts) % num_workers:
        raise ValueError(
            f"`hosts` must name a host for each of {num_workers} workers of every replica, but got {len(placement.hosts)} hosts."
        )
    return [placement.hosts[i : i + num_workers] for i in range(0, len(placement.hosts), num_workers)]
