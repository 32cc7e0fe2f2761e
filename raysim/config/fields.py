"""Base class of configuration tables, number types, roles of keys, and the optimiser's table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from raysim.notation import known_words

LARGEST = 2**31 - 1  # the largest count in the records
Role = Literal["training", "computation", "compression", "seed", "arithmetic", "observation", "place"]
"""The part of a key in a run's result.

"training": decides the result. "computation": also decides the work of a step, and so makes the job. "compression": makes the
setting of links and replicas, by which runs of one job are compared. "seed": draws another sample of the same setting.
"arithmetic": changes the last bits only. "observation": how often a run is looked at. "place": where it runs and its name; a
resumed run may change it.
"""


def role(name: Role) -> dict[str, Any]:
    """Return the argument of `Field` that sets a key's role; keys without one belong to training."""
    return {"role": name}


Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
MOST_STAGES = 1024  # a few times the stages of the largest published pipelines


class Strict(BaseModel):
    """A table that rejects unknown keys, and booleans in place of numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("no_truth", "Input should be a number or a text, not a boolean")
        return value


OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adadelta": ("rho", "epsilon", "weight_decay"),
    "adafactor": ("beta2_decay", "d", "weight_decay"),
    "adagrad": ("lr_decay", "weight_decay", "initial_accumulator_value", "epsilon"),
    "adam": ("betas", "epsilon", "weight_decay", "amsgrad", "decoupled_weight_decay"),
    "adamax": ("betas", "epsilon", "weight_decay"),
    "adamw": ("betas", "epsilon", "weight_decay", "amsgrad"),
    "asgd": ("lambd", "alpha", "t0", "weight_decay"),
    "muon": ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "weight_decay", "betas", "epsilon"),
    "nadam": ("betas", "epsilon", "weight_decay", "momentum_decay", "decoupled_weight_decay"),
    "radam": ("betas", "epsilon", "weight_decay", "decoupled_weight_decay"),
    "rmsprop": ("alpha", "epsilon", "weight_decay", "momentum", "centered"),
    "rprop": ("etas", "step_sizes"),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
}
"""The optimisers of torch.optim and their options under torch's names, but `epsilon` for `eps`."""
_REFUSED = {
    "lbfgs": "it computes the loss several times a step",
    "sparseadam": "its gradients are sparse tensors",
}


class OptimizerConfig(Strict):
    """The optimiser, the same at every stage; keys are written `optimizer.KEY`.

    Options of an optimiser without a field here have torch's names: `optimizer.nesterov=true`.
    """

    model_config = ConfigDict(extra="allow")

    name: str = "sgd"
    """A rule of torch.optim: `sgd`, `adam`, `adamw`, `muon` (with AdamW for embeddings, the last layer and all that is no
    matrix), `adafactor`, `adagrad`, `rmsprop`, ..."""
    learning_rate: float = Field(default=0.1, ge=0)
    """Learning rate before warm-up and decay."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Momentum of sgd, rmsprop and muon; torch's default if not given."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay as torch's rule defines it: L2 for sgd, decoupled for adamw and muon."""
    betas: tuple[float, float] | None = None
    """Betas of the Adam family, and of the AdamW used with muon; torch's default if not given."""
    epsilon: float | None = Field(default=None, gt=0)
    """Torch's `eps`; torch's default if not given."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises linearly. With `one-cycle`, the steps of its rise; 0 means 30 % of the run."""
    decay: Literal["constant", "cosine", "linear", "one-cycle", "steps"] = "constant"
    """Learning rate after the warm-up: constant, falling to zero, torch's OneCycleLR, or falling to a tenth at each of `decay_at`."""
    decay_at: tuple[Positive, ...] | None = Field(default=None, max_length=1000)
    """Steps at which the learning rate falls to a tenth, with `decay` = 'steps'."""
    decay_epochs: float | None = Field(default=None, gt=0)
    """Epochs until the learning rate is zero; the length of the run if not given."""
    decay_every: Literal["step", "epoch"] = "step"
    """`step`: the learning rate falls at every step. `epoch`: it falls between epochs."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Greatest gradient norm over all stages together; without a flush, see `weights`, of each stage alone."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value in _REFUSED:
            raise ValueError(f"`optimizer.name` cannot be {value!r} in a pipeline, since {_REFUSED[value]}.")
        if value not in OPTIMIZERS:
            raise ValueError(f"Unknown optimiser {value!r}.{known_words(value, OPTIMIZERS)}")
        return value

    @property
    def options(self) -> dict[str, Any]:
        """The given options, under torch's names, and `weight_decay` if the optimiser has it."""
        values = {name: getattr(self, name, None) for name in OPTIMIZERS[self.name]}
        given = {name: value for name, value in values.items() if value is not None}
        if "epsilon" in given:
            given["eps"] = given.pop("epsilon")
        return given

    @model_validator(mode="after")
    def _only_what_counts(self) -> OptimizerConfig:
        known = OPTIMIZERS[self.name]
        for field, default in (("momentum", None), ("betas", None), ("epsilon", None), ("weight_decay", 0.0)):
            if field not in known and getattr(self, field) != default:
                raise ValueError(
                    f"`optimizer.{field}` has no effect with `optimizer.name` = {self.name!r}. Leave it out."
                )
        fields = type(self).model_fields
        for option, value in (self.__pydantic_extra__ or {}).items():
            if option not in known:
                names = [*fields, *(name for name in known if name not in fields)]
                raise ValueError(f"Unknown key `optimizer.{option}`.{known_words(option, names, 'optimizer.')}")
            _check_option(option, value)
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`optimizer.betas` must be in [0, 1), but got {self.betas}.")
        if self.decay in ("constant", "one-cycle", "steps"):
            for field, usual in (("decay_epochs", None), ("decay_every", "step")):
                if getattr(self, field) != usual:
                    raise ValueError(
                        f"`optimizer.{field}` has no effect with `optimizer.decay` = {self.decay!r}. Leave it out."
                    )
        if (self.decay == "steps") != bool(self.decay_at):
            raise ValueError(
                f"`optimizer.decay_at` belongs to `optimizer.decay` = 'steps', but got {self.decay_at} with {self.decay!r}."
            )
        return self


_FLAGS = ("nesterov", "amsgrad", "decoupled_weight_decay", "centered")
_LISTS = {"ns_coefficients": 3, "etas": 2, "step_sizes": 2}


def _check_option(option: str, value: object) -> None:
    """Raise ValueError if an optimiser's option does not have torch's type."""
    key = f"`optimizer.{option}`"
    if option in _FLAGS:
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, but got {value!r}.")
    elif option in _LISTS:
        length = _LISTS[option]
        if not isinstance(value, (list, tuple)) or len(value) != length or not all(map(_is_number, value)):
            raise ValueError(f"{key} must be a list of {length} numbers, but got {value!r}.")
    elif option == "adjust_lr_fn":
        if value not in ("original", "match_rms_adamw"):
            raise ValueError(f"{key} must be 'original' or 'match_rms_adamw', but got {value!r}.")
    elif not _is_number(value):
        raise ValueError(f"{key} must be a number, but got {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
