"""Tensors from training: activation and gradient at the middle cut of a recipe's model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from raysim.config import read_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.link import Link
from raysim.pipeline.prepare import prepare

RECIPES = ("digits-cnn", "topics-gpt")  # their data come with raysim
STEPS = 20


def record_tensors(recipe: str, steps: int = STEPS, overrides: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the last step's activation and gradient at the middle cut of a recipe's model, by name.

    Trains `steps` steps in this process, uncompressed and with the whole batch in one microbatch. Raises ConfigError if the recipe
    or an override is invalid.

    >>> {name: tuple(x.shape) for name, x in record_tensors("digits-cnn", 1).items()}
    {'digits-cnn 1 -> 2': (32, 32, 4, 4), 'digits-cnn 1 <- 2': (32, 32, 4, 4)}
    """
    plain = ("forward=Identity", "backward=Identity", "shared_indices=false", "num_microbatches=1", f"steps={steps}")
    workload = prepare(read_config(recipe, [*overrides, *plain]))
    boundary = (workload.plan.num_stages - 2) // 2
    engine = InlineEngine(workload)
    engine.check()
    engine.start()
    links = {
        link.direction: link
        for worker in engine.workers
        for each in worker.boundaries.values()
        for link in each.outgoing.values()
        if link.boundary == boundary
    }
    for step in range(steps - 1):
        engine.step(step)
    sent: dict[str, Tensor] = {}
    for direction, arrow in (("forward", "->"), ("backward", "<-")):
        _keep(links[direction], sent, f"{recipe} {boundary} {arrow} {boundary + 1}")
    engine.step(steps - 1)
    return sent


def _keep(link: Link, sent: dict[str, Tensor], name: str) -> None:
    """Make a link keep a copy of the next tensor it sends."""
    send = link.send

    def keeping(x: Tensor, *arguments: object, **options: object) -> object:
        sent.setdefault(name, x.detach().clone())
        return send(x, *arguments, **options)  # type: ignore[arg-type]

    link.send = keeping  # type: ignore[method-assign, assignment]
