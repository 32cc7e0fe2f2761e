"""Streaming DiLoCo: parameters exchanged in fragments, in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from raysim.notation import check_integer, check_real
from raysim.replication.local import CHANGES, DiLoCo
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds, num_values


@dataclass(frozen=True, repr=False)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo with the tensors divided into `fragments`, exchanged in turn, each every `steps` steps (Douillard et al. 2025,
    2501.18512).

    Training continues for `delay` steps between sending a fragment and using its mean: then W takes its outer step, and the
    replica's own parameters become W + blend (W_r - W). Arrivals are spread evenly over the steps; the last is in the last step of
    the run. Tensors are assigned largest first, each to the fragment with the fewest values so far.

    Use: DiLoCo if the peak of an exchange matters, or to hide its time (`delay`).
    """

    variants: ClassVar[tuple[str, ...]] = ("StreamingDiLoCo(100, fragments=4)",)

    fragments: int = 2
    delay: int = 0
    blend: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(
            fragments=check_integer("fragments", self.fragments, 1, self.steps),
            delay=check_integer("delay", self.delay, 0, self.steps - 1),
            blend=check_real("blend", self.blend, 0, 1),
        )

    @property
    def steps_under_way(self) -> int:
        return self.delay

    def part(self, step: int) -> int | None:
        arrivals = {(i * self.steps) // self.fragments: i for i in range(self.fragments)}
        return arrivals.get((step + 1 + self.delay) % self.steps)

    def fragment(self, shapes: Mapping[str, tuple[int, ...]], part: int) -> list[str]:
        """Return the names of the tensors of a fragment."""
        filled = [0] * self.fragments
        names: list[str] = []
        for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):  # equal sizes in the module's order
            i = filled.index(min(filled))
            filled[i] += max(1, math.prod(shapes[name]))
            if i == part:
                names.append(name)
        return [name for name in shapes if name in names]

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return super().memory_bytes(shapes) + (4 * num_values(shapes) if self.delay else 0)

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        shapes = {name: tuple(x.shape) for name, x in gradients.items()}
        sent, arrived = self.part(context.step), self.part(context.step - self.delay)
        change, moved = Averaged({}, memory), memory
        if sent is not None:
            fragment = {name: gradients[name] for name in self.fragment(shapes, sent)}
            change = yield from self.mean_change(fragment, memory, context, f"{CHANGES}{sent}/")
            moved = change.memory | {f"waiting/{name}": x for name, x in change.gradients.items()}
        names = [] if arrived is None else self.fragment(shapes, arrived)
        if not all(f"waiting/{name}" in moved for name in names):  # not sent: a run or a branch begins
            return Averaged({}, moved, change.decisions)
        mean = {name: moved[f"waiting/{name}"].view_as(gradients[name]) for name in names}
        after, outer = self.outer_step(mean, moved)
        left = {name: x for name, x in moved.items() if name.removeprefix("waiting/") not in names}
        blended = {name: x + self.blend * (gradients[name] - x) if self.blend else x for name, x in after.items()}
        return Averaged({}, {**left, **outer}, change.decisions, parameters=blended)
