"""Asynchronous sparse averaging of AsyncMesh, with delayed averages corrected for the delay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import derive_key
from raysim.codecs.codec import check_finite, count_work
from raysim.codecs.draws import uniform
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    ReplicaMethod,
    Rounds,
    sum_over_members,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class AsyncSPARTA(ReplicaMethod):
    """Local steps with delayed averages of a few parameters (Ajanthan et al. 2026, 2601.22442, and PluralisResearch/AsyncMesh).

    Every `steps` steps replicas average the next share `share` of their parameters. An average arrives `delay` exchanges later
    and is corrected by a moving mean of the replica's own progress meanwhile. With w the parameters of an exchange at its
    positions, a their average and v the parameters when it arrives::

        m = decay m + (1 - decay) (v - w);   v = a + scale m

    A random order of the positions, common to all replicas, is cut into 1/`share` parts of equal size (ours), averaged in turn.
    At the first arrival m is v - w. `decay` rises along a half cosine from step `rise` to 0.99 at the end of `until` steps; without
    `until` it is constant. Evaluation uses the mean of the replicas.

    Use: Links of high latency, if replicas may differ from one another.

    >>> AsyncSPARTA(delay=10).steps_under_way
    10
    """

    variants: ClassVar[tuple[str, ...]] = ("AsyncSPARTA(delay=5)",)
    after_update: ClassVar[bool] = True
    decentralized: ClassVar[bool] = True

    share: float = 0.05
    delay: int = 10
    steps: int = 1
    decay: float = 0.5
    scale: float = 1.0
    rise: int = 1000
    until: int | None = None

    def __post_init__(self) -> None:
        rise = check_integer("rise", self.rise, 0)
        self._coerce(
            share=check_real("share", self.share, 0, 1, open_low=True),
            delay=check_integer("delay", self.delay, 0, 1000),
            steps=check_integer("steps", self.steps, 1),
            decay=check_real("decay", self.decay, 0, 1),
            scale=check_real("scale", self.scale, 0, 100),
            rise=rise,
            until=None if self.until is None else check_integer("until", self.until, rise + 2),
        )

    @property
    def num_parts(self) -> int:
        """The number of exchanges that average every parameter once."""
        return math.ceil(1 / self.share)

    def part(self, step: int) -> int | None:
        return 0 if (step + 1) % self.steps == 0 else None

    @property
    def period(self) -> int:
        return self.steps

    @property
    def steps_under_way(self) -> int:
        return self.delay * self.steps

    def num_rounds(self, num_replicas: int) -> int:
        return 2

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        values = sum(math.prod(shape) for shape in shapes.values())
        sent = sum(math.ceil(math.prod(shape) / self.num_parts) for shape in shapes.values())
        return 4 * (values + 2 * self.delay * sent) + 8 * self.delay if self.delay else 0

    def positions(self, name: str, count: int, exchange: int, context: ReplicaContext, device: torch.device) -> Tensor:
        """Return the increasing positions of an exchange in a tensor of `count` values, the same at all replicas."""
        cycle, part = divmod(exchange, self.num_parts)
        key = derive_key(context.seed, "AsyncSPARTA", context.stage, name, cycle)
        order = uniform(key, count, device).argsort(stable=True)
        size = math.ceil(count / self.num_parts)
        taken = torch.arange(part * size, (part + 1) * size, device=device) % count
        return order[taken].sort().values

    def decay_of(self, step: int) -> float:
        """Return the decay of the moving mean at a step."""
        if self.until is None or step < self.rise:
            return self.decay
        done = min(1.0, (step - self.rise) / (self.until - self.rise - 1))
        return self.decay + (0.99 - self.decay) * (1 - math.cos(math.pi * done)) / 2

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.part(context.step) is None or not gradients:
            return Averaged({}, memory)
        exchange = (context.step + 1) // self.steps - 1
        drawn = {n: self.positions(n, x.numel(), exchange, context, x.device) for n, x in gradients.items()}
        values = torch.cat([x.reshape(-1)[drawn[name]] for name, x in gradients.items()])
        check_finite(values)
        count_work(2 * values.nbytes)
        members = context.replica, context.num_replicas
        total = yield from sum_over_members("share of parameters", values, *members, values.device)
        assert total is not None
        moved = {**memory, f"own {exchange}": values, f"mean {exchange}": total / context.num_replicas}
        moved[f"seed {exchange}"] = torch.tensor(context.seed)  # a branch may have another one
        arrived = exchange - self.delay
        if f"own {arrived}" not in moved:  # the first average is still on its way
            return Averaged({}, moved)
        own, mean = moved.pop(f"own {arrived}"), moved.pop(f"mean {arrived}")
        seed = int(moved.pop(f"seed {arrived}", context.seed))
        if not self.delay:
            return Averaged({}, moved, parameters=_placed(gradients, drawn, mean))
        after = self._corrected(gradients, own, mean, arrived, moved, context._replace(seed=seed))
        return Averaged({}, moved, parameters=after)

    def _corrected(
        self, now: Gradients, own: Tensor, mean: Tensor, exchange: int, memory: Memory, context: ReplicaContext
    ) -> Gradients:
        """Return the parameters after an average arrives, and update the moving mean in `memory`."""
        drawn = {n: self.positions(n, x.numel(), exchange, context, x.device) for n, x in now.items()}
        sizes = [len(positions) for positions in drawn.values()]
        decay, corrected = self.decay_of(context.step), []
        for (name, x), then, average in zip(
            now.items(), torch.split(own, sizes), torch.split(mean, sizes), strict=True
        ):
            positions = drawn[name]
            progress = x.reshape(-1)[positions] - then
            held = memory.get(f"progress/{name}")
            if held is None:
                smooth = progress
                held = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
            else:
                smooth = decay * held.view(-1)[positions] + (1 - decay) * progress
            memory[f"progress/{name}"] = held.view(-1).index_copy(0, positions, smooth)
            corrected.append(average + self.scale * smooth)
        return _placed(now, drawn, torch.cat(corrected))


def _placed(tensors: Gradients, positions: Mapping[str, Tensor], values: Tensor) -> Gradients:
    """Return the tensors with new values at `positions`."""
    parts = torch.split(values, [len(drawn) for drawn in positions.values()])
    placed = {}
    for (name, x), part in zip(tensors.items(), parts, strict=True):
        placed[name] = x.reshape(-1).clone().index_copy_(0, positions[name], part).view_as(x)
    return placed
