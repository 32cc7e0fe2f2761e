"""The optimiser of a stage, and its learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from raysim.config import OptimizerConfig

_RULES: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
_FUSED = ("adagrad", "adam", "adamw", "sgd")


class Together:
    """Several optimisers in one, each with its own parameters; their states are numbered consecutively."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the slots of all parameters, numbered consecutively."""
        return {"state": {self._first(p) + i: x for p, part in enumerate(self._parts) for i, x in _slots(part).items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, part in enumerate(self._parts):
            first, end = self._first(i), self._first(i + 1)
            slots = {index - first: x for index, x in state_dict["state"].items() if first <= index < end}
            part.load_state_dict({**part.state_dict(), "state": slots})

    def _first(self, i: int) -> int:
        """Return the number of the first parameter of a part."""
        return sum(len(group["params"]) for part in self._parts[:i] for group in part.param_groups)


def _slots(part: torch.optim.Optimizer) -> dict[int, Any]:
    slots: dict[int, Any] = part.state_dict()["state"]
    return slots


def make_optimizer(
    config: OptimizerConfig, named: Iterable[tuple[str, nn.Parameter]], elementwise: Collection[str] = ()
) -> torch.optim.Optimizer | Together | None:
    """Return the torch optimiser for named parameters, fused if possible; None if no parameter is trained.

    With Muon, the parameters named in `elementwise` are left to AdamW. Both have the same learning rate: unless `adjust_lr_fn`
    says otherwise, Muon's updates are scaled to the size of AdamW's.
    """
    owned = {name: parameter for name, parameter in named if parameter.requires_grad}
    if not owned:
        return None
    if config.name != "muon":
        return _of_torch(config.name, list(owned.values()), config.learning_rate, config.options)
    options = {"adjust_lr_fn": "match_rms_adamw", **config.options}
    adamw_options: dict[str, Any] = {key: options.pop(key) for key in ("betas", "eps") if key in options}
    adamw_options["weight_decay"] = config.weight_decay
    matrices = [parameter for name, parameter in owned.items() if name not in elementwise]
    others = [parameter for name, parameter in owned.items() if name in elementwise]
    rate = config.learning_rate
    parts = [_of_torch("muon", matrices, rate, options)] if matrices else []
    return Together([*parts, *([_of_torch("adamw", others, rate, adamw_options)] if others else [])])


def _of_torch(name: str, owned: list[nn.Parameter], rate: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    arguments: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    if name in _FUSED:
        arguments["fused"] = True
    return _RULES[name](owned, lr=rate, **arguments)  # type: ignore[call-arg]


def directions(
    optimizer: torch.optim.Optimizer | Together, named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Return the last updates by sgd with momentum, adam or adamw, divided by minus the learning rate, without weight decay.

    By parameter name; parameters without an update are left out.
    """
    slots = optimizer.state_dict()["state"]
    groups = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in named}
    steps = {}
    for index, (group, parameter) in enumerate(groups):
        own = slots.get(index, {})
        if own.get("momentum_buffer") is not None:
            steps[names[id(parameter)]] = own["momentum_buffer"]
        elif "exp_avg" in own:
            first, second = (1 - beta ** float(own["step"]) for beta in group["betas"])
            squares = own.get("max_exp_avg_sq", own["exp_avg_sq"])  # the former with amsgrad
            steps[names[id(parameter)]] = own["exp_avg"] / first / ((squares / second).sqrt() + group["eps"])
    return steps


def find_elementwise(
    stages: Sequence[nn.Sequential], tied: Iterable[Iterable[tuple[int, str]]]
) -> tuple[frozenset[str], ...]:
    """Return each stage's parameters that Muon does not update: embeddings, the last layer, and all but matrices.

    If the last layer is a sequence, only its own last layer is meant. `tied`: the owners (stage, name) of each shared parameter,
    which are all treated alike.
    """
    elementwise: list[set[str]] = [set() for _ in stages]
    last = _last_name(stages[-1])
    for i, stage in enumerate(stages):
        embeddings = {f"{name}.weight" for name, module in stage.named_modules() if isinstance(module, nn.Embedding)}
        for name, parameter in stage.named_parameters():
            of_last = i == len(stages) - 1 and name.startswith(f"{last}.")
            if parameter.ndim != 2 or name in embeddings or of_last:
                elementwise[i].add(name)
    for owners in tied:
        if any(name in elementwise[stage_index] for stage_index, name in owners):
            for stage_index, name in owners:
                elementwise[stage_index].add(name)
    return tuple(frozenset(names) for names in elementwise)


def _last_name(layers: nn.Sequential) -> str:
    """Return the name of the last layer; if that is a sequence, of its last layer."""
    name = next(reversed(layers._modules), "")
    last = layers._modules.get(name)
    return f"{name}.{_last_name(last)}" if isinstance(last, nn.Sequential) and len(last) else name


def slot_values(config: OptimizerConfig, shape: Sequence[int], *, elementwise: bool = False) -> int:
    """Return the number of values in a parameter's optimiser slots, scalars not counted."""
    size = math.prod(shape)
    given = config.options
    if config.name == "adafactor" and len(shape) > 1:  # a row and a column of each matrix
        return size // shape[-1] + size // shape[-2]
    slots = {"sgd": int(bool(config.momentum)), "adagrad": 1, "adafactor": 1, "asgd": 1}.get(config.name, 2)
    if config.name == "rmsprop":
        slots = 1 + bool(given.get("centered")) + bool(config.momentum)
    elif config.name == "muon":
        slots = 2 if elementwise else 1
    return size * (slots + bool(given.get("amsgrad")))


def learning_rate(config: OptimizerConfig, step: int, steps_per_epoch: int, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then constant, cosine or linear decay to 0, drops to a tenth, or 1cycle.

    >>> config = OptimizerConfig(learning_rate=1.0, decay="linear", warmup_steps=2)
    >>> [round(learning_rate(config, step, steps_per_epoch=10, num_steps=6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if config.decay == "one-cycle":
        return _one_cycle(config, step, num_steps)
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


_CYCLE_START, _CYCLE_END, _CYCLE_RISE = 25.0, 1e4, 0.3  # torch's: the first rate is a 25th, the last a 10,000th of that


def _one_cycle(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the 1cycle rate (Smith and Topin 2018, 1708.07120) with cosine annealing, as torch's OneCycleLR."""
    rise = (config.warmup_steps or _CYCLE_RISE * num_steps) - 1
    start = config.learning_rate / _CYCLE_START
    if step <= rise:
        first, last, done = start, config.learning_rate, step / rise if rise else 1.0
    else:
        first, last = config.learning_rate, start / _CYCLE_END
        done = min(1.0, (step - rise) / max(num_steps - 1 - rise, 1e-9))
    return last + (first - last) * (1 + math.cos(math.pi * done)) / 2
