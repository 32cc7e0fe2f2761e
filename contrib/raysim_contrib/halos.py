"""HALoS: local steps averaged within sites and merged through a global model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs import Identity
from raysim.codecs.codec import check_finite, count_work
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.gathered import Dense
from raysim.replication.local import LocalSteps, check_momentum
from raysim.replication.method import (
    AGREED,
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    ReplicaMethod,
    RoundPackets,
    Rounds,
)

_CHANGE, _SITE, _GLOBAL, _START = "change", "site model", "global model", "start/"


@dataclass(frozen=True, repr=False)
class HALoS(LocalSteps):
    """Two levels of averaging, each with momentum: within sites and between sites (Kim et al. 2025, 2506.04531).

    A site's server holds a model w. After every `steps` steps it takes a step by the mean change D of its replicas, which then
    continue from w::

        u = momentum u + rate D;   w = w - momentum u - rate D

    In every `updates`-th exchange it sends its change G since the last merge to the global server, which takes the same step by
    the mean G of all sites, with `global_rate` and `global_momentum`. `delay` exchanges later each site merges the global model
    W: w = (1 - merge) w + merge W. A site's progress between sending and merging is never sent, as in the authors' simulator.
    W is evaluated. Replicas are divided over `sites` in order; the first of each is its server. Defaults are the authors', per
    mean instead of per change.

    Use: Sites with fast links inside and slow links between them.

    >>> HALoS(8, sites=2).site_of(2, 4)
    [2, 3]
    """

    variants: ClassVar[tuple[str, ...]] = ("HALoS(5, sites=2, updates=4)",)

    rate: float = 0.8
    sites: int = 2
    momentum: float = 0.9
    updates: int = 8
    global_rate: float = 0.6
    global_momentum: float = 0.5
    merge: float = 0.25
    delay: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        updates = check_integer("updates", self.updates, 1)
        self._coerce(
            sites=check_integer("sites", self.sites, 1),
            momentum=check_momentum("momentum", self.momentum),
            updates=updates,
            global_rate=check_real("global_rate", self.global_rate, 0, 100, open_low=True),
            global_momentum=check_momentum("global_momentum", self.global_momentum),
            merge=check_real("merge", self.merge, 0, 1, open_low=True),
            delay=check_integer("delay", self.delay, 0, updates - 1),
        )

    @property
    def changes(self) -> ReplicaMethod:
        return Dense()

    @property
    def period(self) -> int:
        return self.steps * self.updates

    def part(self, step: int) -> int | None:
        """Return 0 for an exchange within sites, plus 1 if sites send and 2 if they merge; None without an exchange."""
        if (step + 1) % self.steps:
            return None
        exchange = (step + 1) // self.steps
        return int((exchange + self.delay) % self.updates == 0) + 2 * int(exchange % self.updates == 0)

    def num_rounds(self, num_replicas: int) -> int:
        return 4

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        if self.sites > num_replicas:
            raise ValueError(f"`sites` must be at most the number of replicas ({num_replicas}), but got {self.sites}.")

    def check_steps(self, num_steps: int) -> None:
        if num_steps % self.period:
            raise ValueError(
                f"`steps` times `updates` of {self!r} ({self.period}) must divide the {num_steps} steps of the run, or its last "
                "steps would never be merged."
            )

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * 7 * sum(math.prod(shape) for shape in shapes.values())  # of the global server; others keep fewer

    def begin(self, parameters: Gradients) -> Memory:
        start = {f"{_START}{name}": x.detach().clone() for name, x in parameters.items()}
        return {**super().begin(parameters), **start}

    def site_of(self, replica: int, num_replicas: int) -> list[int]:
        """Return the replicas of a replica's site; the first is its server."""
        of = [other * min(self.sites, num_replicas) // num_replicas for other in range(num_replicas)]
        return [other for other, site in enumerate(of) if site == of[replica]]

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        part = self.part(context.step)
        if part is None or not gradients:
            return Averaged({}, memory)
        sends, merges = bool(part & 1), bool(part & 2)
        site = self.site_of(context.replica, context.num_replicas)
        host = site[0]
        start, gone = _flat(memory, _START, gradients), _flat(memory, _START, gradients) - _joined(gradients)
        check_finite(gone)
        count_work(2 * gone.nbytes)
        state = _State.of(memory, gradients)
        received = yield _to(host, _CHANGE, gone, context.replica)
        if context.replica == host:
            changes = [gone if other == host else received[other][_CHANGE].decode(gone.device) for other in site]
            state.site, state.velocity = _stepped(start, state.velocity, changes, self.rate, self.momentum)
        if sends:
            yield from self._send(state, context, host)
        if merges and context.replica == host and state.waiting is not None:
            state.known, state.waiting = state.waiting, None
            state.site = (1 - self.merge) * state.site + self.merge * state.known
            state.merged = state.site
        models = {_SITE: state.site, **({_GLOBAL: state.known} if merges else {})}
        given = {name: Identity().encode(x) for name, x in models.items()}
        received = yield RoundPackets(each=dict.fromkeys(site[1:], given) if context.replica == host else {})
        if context.replica != host:
            state.site = received[host][_SITE].decode(gone.device)
            state.known = received[host][_GLOBAL].decode(gone.device) if merges else state.known
        return Averaged({}, state.memory(memory, gradients), parameters=_split(state.site, gradients))

    def _send(self, state: _State, context: ReplicaContext, host: int) -> Rounds[None]:
        """Send a site's change to the global server, which steps by the mean over sites and returns its model."""
        count = context.num_replicas
        hosts = sorted({self.site_of(replica, count)[0] for replica in range(count)})
        is_host = context.replica == host
        change = state.merged - state.site
        received = yield _to(0, _CHANGE, change, context.replica) if is_host else RoundPackets()
        if context.replica == 0:
            changes = [change if other == 0 else received[other][_CHANGE].decode(change.device) for other in hosts]
            rates = self.global_rate, self.global_momentum
            state.server, state.server_velocity = _stepped(state.server, state.server_velocity, changes, *rates)
        model = {_GLOBAL: Identity().encode(state.server)}
        received = yield RoundPackets(each=dict.fromkeys(hosts[1:], model) if context.replica == 0 else {})
        if is_host:
            state.waiting = state.server if host == 0 else received[0][_GLOBAL].decode(change.device)


@dataclass
class _State:
    """The flat models of a replica: its site's, and the servers' if it is one."""

    site: torch.Tensor
    known: torch.Tensor  # the global model as last received
    merged: torch.Tensor  # the site's model after its last merge
    server: torch.Tensor  # the global model at its server
    velocity: torch.Tensor | None
    server_velocity: torch.Tensor | None
    waiting: torch.Tensor | None  # the global model in transit

    @classmethod
    def of(cls, memory: Memory, gradients: Gradients) -> _State:
        known = _flat(memory, f"{AGREED}/", gradients)
        optional = {name: memory.get(name) for name in ("velocity", "server_velocity", "waiting")}
        site = _flat(memory, _START, gradients)
        return cls(site, known, memory.get("merged", known), memory.get("server", known), **optional)

    def memory(self, before: Memory, gradients: Gradients) -> Memory:
        """Return the replica's memory with these models."""
        kept = {name: getattr(self, name) for name in ("merged", "server", "velocity", "server_velocity", "waiting")}
        agreed = {f"{AGREED}/{name}": x for name, x in _split(self.known, gradients).items()}
        start = {f"{_START}{name}": x for name, x in _split(self.site, gradients).items()}
        return {**agreed, **start, **{name: x.clone() for name, x in kept.items() if x is not None}}


def _stepped(
    model: torch.Tensor, velocity: torch.Tensor | None, changes: list[torch.Tensor], rate: float, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model and its velocity after a Nesterov step by the mean of `changes`."""
    total = torch.zeros_like(model)
    for change in changes:
        total += change
    step = rate * (total / len(changes))
    velocity = step if velocity is None else momentum * velocity + step
    return model - (step + momentum * velocity), velocity


def _to(receiver: int, name: str, x: torch.Tensor, sender: int) -> RoundPackets:
    """Return the round of one packet to `receiver`, empty if that is the sender."""
    return RoundPackets() if sender == receiver else RoundPackets(each={receiver: {name: Identity().encode(x)}})


def _joined(tensors: Gradients) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in tensors.values()])


def _flat(memory: Memory, prefix: str, like: Gradients) -> torch.Tensor:
    return torch.cat([memory[f"{prefix}{name}"].reshape(-1) for name in like])


def _split(flat: torch.Tensor, like: Gradients) -> Gradients:
    parts = torch.split(flat, [x.numel() for x in like.values()])
    return {name: part.view_as(x).clone() for (name, x), part in zip(like.items(), parts, strict=True)}
