"""The one list of weight policies over which their laws run, and one stage with one weight whose loss is a parabola.

A policy of raysim or raysim-contrib that is not here fails a test.
"""

from __future__ import annotations

import torch
from torch import nn

from raysim.config import make_config
from raysim.pipeline.stage import Stage
from raysim.plugins import contrib, import_object
from raysim.schedules.weights import POLICIES, WeightPolicy, parse_weights
from raysim.values import UNNAMED

VARIANTS = [
    "Synchronous",
    "PostValidated",
    "Stashed",
    "Stashed(update='step')",
    "DoubleBuffered",
    "PipeMare(4)",
    "PipeMare(40, decay=0.5)",
    "PipeMare(4, update='step')",
    "Predicted",
    "Predicted(update='step')",
]
RARE = {name: cls for name, path in contrib().items() if issubclass(cls := import_object(path), WeightPolicy)}
KNOWN = {**POLICIES, **RARE}
DELAYED = [text for text in VARIANTS if text not in ("Synchronous", "PostValidated")]

CURVATURE, RATE, MOMENTUM, MICROBATCHES = 0.5, 0.25, 0.5, 4


class Parabola(nn.Module):
    """Half the curvature times a weight squared, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return CURVATURE / 2 * (self.weight * self.weight) + 0 * x.sum()


def parabola(weights: str, stage: int, num_stages: int, *, steps: int = 8, schedule: str = "1F1B") -> list[float]:
    """Return the weight of one stage of a pipeline after every step, and first before any."""
    config = make_config(
        {
            "num_stages": num_stages,
            "num_microbatches": MICROBATCHES,
            "batch_size": MICROBATCHES,
            "steps": steps,
            "schedule": schedule,
            "weights": weights,
            "optimizer": {"learning_rate": RATE, "momentum": MOMENTUM},
        }
    )
    policy, delays = parse_weights(weights), config.weight_delays()[stage]
    run = Stage(Parabola(), config, torch.device("cpu"), first=True, last=True, loss=lambda y, *_: y, delays=delays)  # type: ignore[arg-type]
    found = [float(run.module.get_parameter("weight").detach())]
    row = config.executed_schedule.rows(num_stages, MICROBATCHES)[stage]
    for step in range(steps):
        run.begin(step)
        rate = policy.rate(RATE, run.versions.longest, step)
        for action in row:
            if action.op == "F":
                run.forward(action.microbatch, {UNNAMED: torch.zeros(1)}, 0, torch.zeros(1))
            else:
                run.backward(action.microbatch)
                if policy.updates_each_microbatch:
                    run.update(rate)
        if not policy.updates_each_microbatch:
            run.update(rate)
        assert run.versions.num_kept <= run.versions.longest + 1
        found.append(float(run.module.get_parameter("weight").detach()))
    return found
