"""The keys of a run, and the combinations of values that are allowed.

Values are checked here, by field and rule. Rules that need the data or the model (cuts, sizes, memory) are checked by
`raysim.pipeline.plan`, still before anything starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from raysim.config.fields import LARGEST, MOST_STAGES, Natural, Positive, Strict, role
from raysim.config.links import (
    ByReplica,
    Notations,
    Pairs,
    canonical,
    check_numbers,
    checked_setting,
    of_replica,
    pairs_of,
)
from raysim.config.optimizer import OptimizerConfig
from raysim.config.weights import check_weights
from raysim.network.presets import parse_network
from raysim.network.transport import parse_transport
from raysim.notation import shown, suggestion
from raysim.quality import LOSSES, MEASURES
from raysim.replication import parse_replica_method
from raysim.replication.method import ReplicaMethod
from raysim.schedules.families import Schedule, parse_schedule
from raysim.schedules.unflushed import Unflushed
from raysim.weights import WeightPolicy, parse_weights
from raysim.weights.base import Delays


class Named(BaseModel):
    """A model or a data set by name; its other keys are options of that model or data set."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys besides the name."""
        return dict(self.__pydantic_extra__ or {})


class RunConfig(Strict):
    """Everything that decides a run's result, and where it runs.

    >>> config = RunConfig(forward="TopK(density=0.1)", steps=100)
    >>> config.forward, config.optimizer.learning_rate
    ('TopK(0.1)', 0.1)
    """

    name: str = Field(default="run", json_schema_extra=role("place"))
    """Folder under `results/`; by default the recipe's name."""
    model: Named = Named(name="cnn")
    """`cnn`, `resnet18`, `resnet101`, `vgg16`, `gpt`, `gpt2`, `lstm`, `mlp`, `hf`, or `package.module:function` of your own."""
    data: Named = Named(name="digits")
    """`digits`, `topics`, `cifar10`, `cifar100`, `wikitext2`; yours: `images`, `table`, `text`, `hf`, `package.module:function`."""
    loss: Named | None = None
    """`cross_entropy` (with `loss.label_smoothing`), `mse`, or `package.module:function`; by default that of the targets' kind."""
    metrics: tuple[str, ...] | None = Field(default=None, max_length=1000, json_schema_extra=role("observation"))
    """Figures of evaluations beside the loss; settings are judged by the first. `accuracy`, `top5_accuracy`, `f1`, `mae`, `r2`,
    `loss`, `perplexity` or `package.module:function`."""
    num_stages: int | None = Field(default=None, ge=1, le=MOST_STAGES)
    """Stages of equal work, 4 where neither this nor `cuts` is given."""
    cuts: tuple[str, ...] | None = Field(default=None, max_length=MOST_STAGES - 1)
    """Names of the layers after which the model is cut, instead of `num_stages`."""
    bottleneck: Positive | Annotated[tuple[Natural, ...], Field(max_length=MOST_STAGES)] | None = None
    """Features that cross each boundary, reduced and restored by learned layers at its ends (a list: one number each, 0 for none)."""
    num_microbatches: Positive = 4
    """Equal parts of a replica's batch that follow each other through the stages."""
    num_replicas: Positive = 1
    """Pipelines side by side, each with an equal part of the batch, whose gradients are averaged."""
    schedule: str = "1F1B"
    """`GPipe`, `1F1B`, `Interleaved1F1B(stages_per_worker)`, `ZBH1`, or `Custom('rows.csv')` in torch's format."""
    forward: ByReplica = Field(default="Identity", json_schema_extra=role("compression"))
    """Compressor of activations: one for all boundaries, a list with one each, or a table by tensor or by replica."""
    backward: ByReplica = Field(default="Identity", json_schema_extra=role("compression"))
    """Compressor of gradients at the boundaries: one for all boundaries, a list with one each, or a table by tensor or by replica."""
    shared_indices: bool = Field(default=False, json_schema_extra=role("compression"))
    """Send gradients at the positions that their activation kept, values only, by the codec `backward`."""
    replica_gradient: Notations = Field(default="Identity", json_schema_extra=role("compression"))
    """Method by which replicas average the gradients of a stage: one for all stages, or a list with one each."""
    fused_embedding: bool = Field(default=False, json_schema_extra=role("compression"))
    """Sum the gradients of tied parameters over stages and replicas at once, uncompressed (Optimus-CC)."""
    weights: str = Field(default="Synchronous", json_schema_extra=role("compression"))
    """Versions of the weights that passes read, and times of updates: `Synchronous`, or `Stashed`, `DoubleBuffered`,
    `PipeMare(steps)`, `Predicted`, which run without a flush between steps."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: Positive = 32
    """Samples a step, over all replicas."""
    steps: Positive | None = None
    """Length of the run in steps, instead of `epochs`."""
    epochs: Positive | None = None
    """Length of the run in epochs, instead of `steps`; an incomplete last batch is dropped."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1, json_schema_extra=role("seed"))
    """Seed of weights, order, augmentation, dropout and random codecs."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of numbers in compute and in messages; weights stay float32."""
    loss_scale: float | None = Field(default=None, gt=0)
    """Factor of the loss, and so of all gradients until they reach the weights: a power of two, by default 4096 with float16,
    else 1."""
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", json_schema_extra=role("arithmetic"))
    """`auto` takes a GPU where there is one."""
    tf32: bool = False
    """Let a GPU round the factors of float32 products to 10 bits, which is faster."""
    deterministic: bool = Field(default=False, json_schema_extra=role("arithmetic"))
    """Let a GPU use only kernels that give the same bits each time, which are slower; a CPU always does."""
    threads_per_stage: int = Field(default=1, ge=1, le=1024, json_schema_extra=role("arithmetic"))
    """CPU threads of a stage; another number gives gradients that differ in the last bits."""
    cpus_per_stage: float = Field(default=1.0, gt=0, json_schema_extra=role("place"))
    """CPUs that Ray reserves for a stage, or for all stages of one worker."""
    gpus_per_stage: float | None = Field(default=None, ge=0, json_schema_extra=role("place"))
    """GPUs that Ray reserves for a stage; where not given, an equal share of all GPUs, at most one."""
    placement: Literal["spread", "pack"] = Field(default="spread", json_schema_extra=role("place"))
    """`spread`: stages over all nodes. `pack`: on as few nodes as hold them. Neighbours are side by side either way."""
    recompute: bool = False
    """Keep only a stage's inputs and run its forward again before the backward."""
    checkpoint_every_steps: Natural = Field(default=100, json_schema_extra=role("observation"))
    """Steps between checkpoints, of which there is one at least every four minutes; 0 keeps only the last state of a finished run."""
    evaluate_every_steps: Natural = Field(default=0, json_schema_extra=role("observation"))
    """Steps between evaluations; 0 evaluates at the end only."""
    evaluate_samples: Positive | None = None
    """Number of test samples in an evaluation, the first ones of the set; all where not given."""
    evaluate_batchnorm_batches: Natural = 0
    """Training batches over which BatchNorm statistics are estimated for a second evaluation; 0 for none."""
    profile_every_steps: Natural = Field(default=10, json_schema_extra=role("observation"))
    """Steps whose every action is recorded, with fidelity and residual norms; 0 records none."""
    clock: str = "measured"
    """Source of step times for adaptive methods: "measured", or a network on which steps are simulated, so that runs repeat."""
    profile: str | None = None
    """Compute times of a simulated `clock`, which needs them: a device such as A100, or a file of `raysim profile`."""
    codec_speed: float | None = Field(default=None, gt=0)
    """Dense bytes a second that codecs encode or decode under a simulated `clock`; by default an eighth of the device's memory
    bandwidth, or the speed in the profile's file."""
    transport: str = "ray"
    """The transport of packets on the network of a simulated `clock`: "ray", "nccl" or "gloo"."""
    timeout_s: float = Field(default=600.0, gt=0, json_schema_extra=role("place"))
    """Seconds that a start, a step or a few evaluation batches may take before the stages are given up."""
    grace_s: float = Field(default=15.0, ge=0, json_schema_extra=role("place"))
    """Seconds after SIGTERM, SIGINT or SIGHUP in which a run may finish its step and write a checkpoint."""

    @field_validator("model", "data", mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        if not isinstance(value, (str, Mapping, Named)):
            raise PydanticCustomError("no_name", "Input should be a name")
        return {"name": value} if isinstance(value, str) else value

    @field_validator("model", "data")
    @classmethod
    def _has_sizes_that_exist(cls, value: Named, info: ValidationInfo) -> Named:
        for key, option in value.options.items() if ":" not in value.name else ():
            if isinstance(option, int) and abs(option) > LARGEST:
                raise ValueError(
                    f"`{info.field_name}.{key}` must be from -{LARGEST} to {LARGEST}, but got {shown(option)}."
                )
        return value

    @field_validator("loss", mode="before")
    @classmethod
    def _bare_loss(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "name" not in value:  # the one that has options
            return {"name": "cross_entropy", **value}
        return value if value is None else cls._bare_name(value)

    @field_validator("loss")
    @classmethod
    def _is_loss(cls, value: Named | None) -> Named | None:
        if value is not None and ":" not in value.name and value.name not in LOSSES:
            known = ", ".join(LOSSES)
            raise ValueError(
                f"Unknown loss {value.name!r}. Known: {known}; your own is written `package.module:function`."
                f"{suggestion(value.name, LOSSES)}"
            )
        return value

    @field_validator("metrics", mode="before")
    @classmethod
    def _bare_metric(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("metrics")
    @classmethod
    def _are_metrics(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("`metrics` must name one metric or more. Leave it out for those of the task.")
        for name in value or ():
            if ":" not in name and name not in MEASURES:
                known = ", ".join(MEASURES)
                raise ValueError(
                    f"Unknown metric {name!r}. Known: {known}; your own is written `package.module:function`."
                    f"{suggestion(name, MEASURES)}"
                )
        return value

    @field_validator("name")
    @classmethod
    def _is_folder(cls, value: str) -> str:
        if not re.fullmatch(r"[\w+=-][\w.+=-]*", value) or len(value.encode()) > 200:
            raise ValueError(
                f"`name` must be the name of a folder, of at most 200 letters, digits and `_+=-.`, but got {shown(value)}."
            )
        return value

    @field_validator("schedule")
    @classmethod
    def _canonical_schedule(cls, value: str) -> str:
        return repr(parse_schedule(value))

    @field_validator("weights")
    @classmethod
    def _canonical_weights(cls, value: str) -> str:
        return repr(parse_weights(value))

    @field_validator("forward", "backward", mode="before")
    @classmethod
    def _by_replica(cls, value: Any, info: ValidationInfo) -> Any:
        return checked_setting(str(info.field_name), value)

    @field_validator("forward", "backward")
    @classmethod
    def _canonical(cls, value: ByReplica) -> ByReplica:
        return canonical(value)

    @field_validator("replica_gradient")
    @classmethod
    def _canonical_method(cls, value: Notations) -> Notations:
        if isinstance(value, str):
            return repr(parse_replica_method(value))
        return tuple(repr(parse_replica_method(text)) for text in value)

    @field_validator("clock")
    @classmethod
    def _is_clock(cls, value: str) -> str:
        if value != "measured":
            parse_network(value)
        return value

    @field_validator("transport")
    @classmethod
    def _is_transport(cls, value: str) -> str:
        return parse_transport(value).name

    @field_validator("loss_scale")
    @classmethod
    def _is_power_of_two(cls, value: float | None) -> float | None:
        if value is not None and math.frexp(value)[0] != 0.5:
            raise ValueError(f"`loss_scale` must be a power of two, which changes no digit, but got {value:g}.")
        return value

    @model_validator(mode="after")
    def _together(self) -> RunConfig:
        if (self.steps is None) == (self.epochs is None):
            given = f"{self.steps} and {self.epochs}" if self.steps is not None else "neither"
            raise ValueError(f"Just one of `steps` and `epochs` must be given, but got {given}.")
        if self.cuts is not None and self.num_stages is not None:
            raise ValueError("Just one of `num_stages` and `cuts` may be given, but got both.")
        if self.batch_size % (self.num_microbatches * self.num_replicas):
            each = f" on each of {self.num_replicas} replicas" if self.num_replicas > 1 else ""
            raise ValueError(
                f"`num_microbatches` must divide `batch_size` ({self.batch_size}), but got {self.num_microbatches}{each}."
            )
        if self.device == "cuda" and self.gpus_per_stage == 0:
            raise ValueError("`gpus_per_stage` must be more than 0 with `device` = 'cuda', but got 0.")
        if self.device == "cpu" and self.gpus_per_stage:
            raise ValueError(f"`gpus_per_stage` must be 0 with `device` = 'cpu', but got {self.gpus_per_stage:g}.")
        for field in ("forward", "backward"):
            check_numbers(field, getattr(self, field), self.stages - 1, self.num_replicas)
        if isinstance(self.bottleneck, tuple) and (len(self.bottleneck) != self.stages - 1 or not any(self.bottleneck)):
            raise ValueError(
                f"`bottleneck` must be one number or a list of one a boundary ({self.stages - 1}), not all 0, "
                f"but got {shown(list(self.bottleneck))}."
            )
        if self.stages == 1:
            for field in ("forward", "backward", "shared_indices", "bottleneck"):
                if getattr(self, field) not in ("Identity", (), False, None):
                    raise ValueError(f"`{field}` has no effect with one stage, which has no boundaries. Leave it out.")
        for methods in dict.fromkeys(
            ends for links in self.compressors() for pairs in links for ends in pairs.values()
        ):
            for field, method in zip(("forward", "backward"), methods, strict=True):
                if method.needs_sensitivity and self.gradient_scale != 1:
                    raise ValueError(
                        f"`loss_scale` must be 1 with {method!r}, which measures gradients, but got {self.gradient_scale:g}."
                    )
                if field not in method.directions:
                    raise ValueError(
                        f"`{field}` cannot be {method!r}, which is for {' and '.join(method.directions)} messages."
                    )
        if isinstance(self.replica_gradient, tuple) and len(self.replica_gradient) != self.stages:
            raise ValueError(
                f"`replica_gradient` must be one method or a list of one a stage ({self.stages}), but got {len(self.replica_gradient)}."
            )
        if self.num_replicas == 1:
            alone = any(method.works_alone for method in self.replica_methods())
            for field, default in (("replica_gradient", "Identity"), ("fused_embedding", False)):
                if getattr(self, field) != default and not (field == "replica_gradient" and alone):
                    raise ValueError(f"`{field}` has no effect with one replica. Leave it out, or set `num_replicas`.")
        keeping = next((one for one in self.replica_methods() if one.keeps_momentum), None)
        if keeping is not None and self.optimizer.clip_norm is not None:
            instead = f"{type(keeping).__name__}(..., clip_norm={self.optimizer.clip_norm:g})"
            raise ValueError(
                f"`optimizer.clip_norm` must be left out with {keeping!r}, whose averages hold the momentum: sums of gradients would "
                f"be clipped as one gradient is. Write {instead}, which clips gradients first, in a file without the key."
            )
        check_weights(self)
        if self.profile is not None and self.clock == "measured":
            raise ValueError("`profile` has no effect with `clock` = 'measured'. Leave it out, or name a network.")
        if self.transport != "ray" and self.clock == "measured":
            raise ValueError("`transport` has no effect with `clock` = 'measured'. Leave it out, or name a network.")
        if self.codec_speed is not None and self.clock == "measured":
            raise ValueError("`codec_speed` has no effect with `clock` = 'measured'. Leave it out, or name a network.")
        return self

    @property
    def gradient_scale(self) -> float:
        """The factor of the loss, as configured or by `dtype`."""
        if self.loss_scale is not None:
            return self.loss_scale
        return 4096.0 if self.dtype == "float16" else 1.0

    @property
    def stages(self) -> int:
        """Number of stages, however they are given."""
        return len(self.cuts) + 1 if self.cuts is not None else self.num_stages or 4

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch."""
        return self.batch_size // (self.num_replicas * self.num_microbatches)

    @property
    def parsed_schedule(self) -> Schedule:
        """The schedule as data, without a flush where the weights need none."""
        return self.weight_policy.order(parse_schedule(self.schedule))

    @property
    def weight_policy(self) -> WeightPolicy:
        """The policy of the weights."""
        return parse_weights(self.weights)

    def weight_delays(self) -> Delays:
        """Return the delay of each stage's microbatches: the updates between a forward and the update with its gradient."""
        policy, schedule = self.weight_policy, self.parsed_schedule
        if not isinstance(schedule, Unflushed):
            return [[0] * self.num_microbatches] * self.stages
        per = 1 if policy.updates_each_microbatch else self.num_microbatches
        return policy.delays(schedule.delays(self.stages, self.num_microbatches, per))

    def compressors(self) -> list[list[Pairs]]:
        """Return the compressors of each replica and boundary, by the names of tensors in its tables."""
        count = self.stages - 1
        known: dict[str, list[Pairs]] = {}
        found = []
        for replica in range(self.num_replicas):
            settings = (of_replica(self.forward, replica, count), of_replica(self.backward, replica, count))
            if repr(settings) not in known:
                known[repr(settings)] = [
                    pairs_of(*ends, shared_indices=self.shared_indices, boundary=boundary)
                    for boundary, ends in enumerate(zip(*settings, strict=True))
                ]
            found.append(known[repr(settings)])
        return found

    def replica_methods(self) -> list[ReplicaMethod]:
        """Return the replica method of each stage."""
        value = self.replica_gradient
        texts = [value] * self.stages if isinstance(value, str) else value
        return [parse_replica_method(text) for text in texts]

    def flat(self) -> dict[str, Any]:
        """Return every key as it is written (`optimizer.momentum`), with its value."""
        flat: dict[str, Any] = {}
        for key, value in self.model_dump().items():
            if isinstance(getattr(self, key), BaseModel):
                name = value.pop("name")
                flat[key if key in ("model", "data", "loss") else f"{key}.name"] = name
                flat |= {f"{key}.{option}": option_value for option, option_value in value.items()}
            else:
                flat[key] = value
        return flat
