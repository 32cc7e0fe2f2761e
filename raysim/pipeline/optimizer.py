"""The optimiser of a stage and its learning rate, a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from raysim.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Return torch's optimiser, fused where it can be, or None for a stage without parameters."""
    owned = [parameter for parameter in parameters if parameter.requires_grad]
    if not owned:
        return None
    if config.name == "sgd":
        return torch.optim.SGD(
            owned,
            lr=config.learning_rate,
            momentum=config.momentum or 0.0,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.AdamW(
        owned,
        lr=config.learning_rate,
        betas=config.betas or (0.9, 0.999),
        eps=config.epsilon or 1e-8,
        weight_decay=config.weight_decay,
        fused=True,
    )


def slots_per_parameter(config: OptimizerConfig) -> int:
    """Return how many values the optimiser keeps beside each weight."""
    if config.name == "adamw":
        return 2
    return 1 if config.momentum else 0


def learning_rate(config: OptimizerConfig, step: int, steps_per_epoch: int, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then constant, cosine or linear decay to zero, or tenths.

    >>> config = OptimizerConfig(learning_rate=1.0, decay="linear", warmup_steps=2)
    >>> [round(learning_rate(config, step, steps_per_epoch=10, num_steps=6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    if config.decay == "steps":
        return config.learning_rate * 0.1 ** sum(step >= at for at in config.decay_at or ())
    length = config.decay_epochs * steps_per_epoch if config.decay_epochs else num_steps
    position = step - step % steps_per_epoch if config.decay_every == "epoch" else step
    done = min(1.0, max(0.0, (position - config.warmup_steps) / max(1.0, length - config.warmup_steps)))
    share = (1 + math.cos(math.pi * done)) / 2 if config.decay == "cosine" else 1 - done
    return config.learning_rate * share
