"""DeCo-SGD: delayed compressed gradients, with delay and density chosen together for a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from raysim.codecs import Codec, Identity, TopK
from raysim.codecs.codec import check_is_codec
from raysim.codecs.message import Entry
from raysim.compressors.memory import ErrorFeedback
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.gathered import Gathered
from raysim.replication.layers import Layered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, ReplicaMethod, Rounds

_SENT = "sent/"  # memory prefix of the averaging method


@dataclass(frozen=True, repr=False)
class DeCoSGD(Layered):
    """Steps by the average TopK of gradients, with error feedback, of `delay` steps before (Lu et al. 2025, 2507.17346).

    With g and e of step t - delay::

        D = mean over replicas of TopK(e + g);   e = e + g - TopK(e + g);   step by D

    The first `delay` steps change nothing. An exchange may take `delay` steps; `choose` picks delay and density for a network.
    One-dimensional tensors, and tensors of fewer than `min_values` values, are delayed too, but not compressed.

    Use: Links of high latency, if all replicas must step alike.

    >>> DeCoSGD(0.05, delay=2)
    DeCoSGD(0.05, delay=2)
    """

    variants: ClassVar[tuple[str, ...]] = ("DeCoSGD(0.05, delay=2)",)

    density: float
    delay: int = 1
    values: Codec = Identity()  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is_codec("values", self.values)
        self.values.check_feedback()
        self._coerce(
            density=check_real("density", self.density, 0, 1, open_low=True),
            delay=check_integer("delay", self.delay, 0, 1000),
        )

    @property
    def averages(self) -> ReplicaMethod:
        """The method that averages a step's gradients."""
        codec = ErrorFeedback(TopK(self.density, values=self.values))
        return Gathered(codec, min_values=self.min_values, warmup=self.warmup)

    @property
    def steps_under_way(self) -> int:
        return self.delay

    def entries(self) -> tuple[Entry, ...]:
        return self.averages.entries()

    def num_rounds(self, num_replicas: int) -> int:
        return self.averages.num_rounds(num_replicas)

    def compressed_rounds(self, num_replicas: int) -> int:
        return self.averages.num_rounds(num_replicas)

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        return (yield from self.averages.average(gradients, memory, context))

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        waiting = 4 * self.delay * sum(math.prod(shape) for shape in shapes.values())
        return waiting + self.averages.memory_bytes(shapes)

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        kept = {name.removeprefix(_SENT): x for name, x in memory.items() if name.startswith(_SENT)}
        averaged = yield from self.averages.average(gradients, kept, context)
        moved = {f"{_SENT}{name}": x for name, x in averaged.memory.items()}
        if not self.delay:
            return Averaged(averaged.gradients, moved)
        queue = [averaged.gradients]  # newest first
        for age in range(self.delay):
            held = {name: memory.get(f"waiting {age}/{name}") for name in gradients}
            queue.append(
                {
                    name: torch.zeros_like(gradients[name]) if x is None else x.view_as(gradients[name])
                    for name, x in held.items()
                }
            )
        for age, means in enumerate(queue[:-1]):
            moved |= {f"waiting {age}/{name}": x for name, x in means.items()}
        return Averaged(queue[-1], moved)


class Choice(NamedTuple):
    """A delay and a density that hide a step's exchange behind compute, and their noise."""

    delay: int
    density: float
    noise: float


def noise(density: float, delay: int) -> float:
    """Return the slow-down of convergence by compression and delay: (1 - d) / (d (1 - d/2)^delay).

    >>> noise(1.0, 5), round(noise(0.5, 0), 3), noise(0.1, 4) > noise(0.1, 1)
    (0.0, 1.0, True)
    """
    return (1 - density) / (density * (1 - density / 2) ** delay)


def choose(
    step_s: float, dense_bytes: float, bandwidth_bps: float, latency_s: float, max_delay: int = 20, cost: float = 1.0
) -> Choice:
    """Return the delay and density of least noise at which no step waits for its exchange.

    `step_s`: seconds of a step without exchange. `dense_bytes`: a replica's uncompressed bytes in a step. `cost`: bytes sent per
    kept byte, positions included. An exchange must be sent within a step, and arrive `delay` steps later. Raises ValueError if
    even `max_delay` steps do not cover the latency.

    >>> choose(0.1, 10e6, 100e6, 0.03)
    Choice(delay=2, density=0.125, noise=7.964444444444444)
    """
    choices = []
    for delay in range(1, max_delay + 1):
        seconds = min(step_s, delay * step_s - latency_s)
        density = min(1.0, seconds * bandwidth_bps / (8 * dense_bytes * cost))
        if density > 0:
            choices.append(Choice(delay, density, noise(density, delay)))
    if not choices:
        raise ValueError(
            f"`max_delay` steps of {step_s:g} s must last longer than the latency of {latency_s:g} s, but got {max_delay}."
        )
    return min(choices, key=lambda choice: (choice.noise, choice.delay))
