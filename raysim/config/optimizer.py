"""The optimizer of a run: keys written `optimizer.KEY`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raysim.config.fields import Natural, Positive, Strict


class OptimizerConfig(Strict):
    """How every stage updates its parameters; keys are written `optimizer.KEY`."""

    name: Literal["sgd", "adamw"] = "sgd"
    """The rule, as torch has it."""
    learning_rate: float = Field(default=0.1, ge=0)
    """Before warm-up and decay."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Of sgd, 0 where not given."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 for sgd, decoupled for adamw."""
    betas: tuple[float, float] | None = None
    """Of adamw, (0.9, 0.999) where not given."""
    epsilon: float | None = Field(default=None, gt=0)
    """Of adamw, 1e-8 where not given."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises linearly."""
    decay: Literal["constant", "cosine", "linear", "steps"] = "constant"
    """How the learning rate falls after the warm-up: to zero, or at `decay_at` to a tenth each time."""
    decay_at: tuple[Positive, ...] | None = Field(default=None, max_length=1000)
    """Steps from which on the learning rate is a tenth, with `decay` = 'steps'."""
    decay_epochs: float | None = Field(default=None, gt=0)
    """Epochs until it is zero; the length of the run where not given."""
    decay_every: Literal["step", "epoch"] = "step"
    """Whether it falls at every step or between epochs."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Greatest gradient norm over all stages together."""

    @model_validator(mode="after")
    def _only_what_counts(self) -> OptimizerConfig:
        other = {"sgd": ("betas", "epsilon"), "adamw": ("momentum",)}[self.name]
        for field in other:
            if getattr(self, field) is not None:
                raise ValueError(
                    f"`optimizer.{field}` has no effect with `optimizer.name` = {self.name!r}. Leave it out."
                )
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`optimizer.betas` must be in [0, 1), but got {self.betas}.")
        if self.decay in ("constant", "steps"):
            for field, default in (("decay_epochs", None), ("decay_every", "step")):
                if getattr(self, field) != default:
                    raise ValueError(
                        f"`optimizer.{field}` has no effect with `optimizer.decay` = {self.decay!r}. Leave it out."
                    )
        if (self.decay == "steps") != bool(self.decay_at):
            raise ValueError(
                f"`optimizer.decay_at` belongs to `optimizer.decay` = 'steps', but got {self.decay_at} with {self.decay!r}."
            )
        return self
