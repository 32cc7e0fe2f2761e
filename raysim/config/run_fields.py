"""The keys of a run and their allowed values.

Rules on several keys are in `raysim.config.run`. Rules that need the data or the model (cuts, sizes, memory) are checked by
`raysim.pipeline.plan`, still before anything starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from raysim.config.boundaries import UNCOMPRESSED, ByReplica, read_setting, write_setting
from raysim.config.fields import LARGEST, MOST_STAGES, Natural, OptimizerConfig, Positive, Strict, role
from raysim.network.presets import parse_network
from raysim.network.transport import parse_transport
from raysim.notation import Notation, shown, suggestion
from raysim.quality import LOSSES, MEASURES
from raysim.replication import parse_replica_method
from raysim.replication.method import ReplicaMethod
from raysim.schedules.families import Schedule, parse_schedule
from raysim.schedules.weights import WeightPolicy, parse_weights

AVERAGED = parse_replica_method("Identity")
SYNCHRONOUS = parse_weights("Synchronous")


@dataclass(frozen=True)
class Start:
    """The start of a branch: a run's folder and the step of a checkpoint, None for the last one.

    >>> Start.read("results/dense@1200"), Start.read("results/dense").step
    (results/dense@1200, None)
    """

    folder: str
    step: int | None = None

    def __repr__(self) -> str:
        return self.folder if self.step is None else f"{self.folder}@{self.step}"

    @classmethod
    def read(cls, value: Any) -> Start:
        """Parse `FOLDER@STEP` or `FOLDER`; raises ValueError for anything else."""
        if isinstance(value, Start):
            return value
        written = isinstance(value, str) and re.fullmatch(r"(.+)@([0-9]{1,9})|.+/[^@]*|[^@]+", value, re.DOTALL)
        if not written:
            raise ValueError(
                "`start` must be the folder of a run and the step of a checkpoint, such as results/dense@1200, but got "
                f"{shown(value)}."
            )
        folder, step = written.groups()
        return cls(value) if folder is None else cls(folder, int(step))


def _reader(kind: type[Notation], parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a validator that accepts an object of a notation, or its text."""

    def read(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "Input should be a valid string")
        return parse(value)

    return read


_read_method = _reader(ReplicaMethod, parse_replica_method)


def _read_methods(value: Any) -> Any:
    """Parse one replica method, or a tuple with one per stage."""
    if not isinstance(value, (list, tuple)):
        return _read_method(value)
    if len(value) > MOST_STAGES:
        raise PydanticCustomError("too_long", "", {"max_length": MOST_STAGES})
    return tuple(map(_read_method, value))


def _write_methods(value: Any) -> Any:
    return tuple(map(repr, value)) if isinstance(value, tuple) else repr(value)


def _read_boundaries(value: Any, info: ValidationInfo) -> ByReplica:
    return read_setting(str(info.field_name), value)


ScheduleField: TypeAlias = Annotated[Schedule, PlainValidator(_reader(Schedule, parse_schedule)), PlainSerializer(repr)]
WeightsField: TypeAlias = Annotated[
    WeightPolicy, PlainValidator(_reader(WeightPolicy, parse_weights)), PlainSerializer(repr)
]
MethodField: TypeAlias = Annotated[
    ReplicaMethod | tuple[ReplicaMethod, ...], PlainValidator(_read_methods), PlainSerializer(_write_methods)
]
SumField: TypeAlias = Annotated[ReplicaMethod, PlainValidator(_read_method), PlainSerializer(repr)]
StartField: TypeAlias = Annotated[Start, PlainValidator(Start.read), PlainSerializer(repr)] | None
BoundaryField: TypeAlias = Annotated[ByReplica, PlainValidator(_read_boundaries), PlainSerializer(write_setting)]


class Named(BaseModel):
    """A model or a data set by name; the other keys are its options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        if not isinstance(value, (str, Mapping, Named)):
            raise PydanticCustomError("no_name", "Input should be a name")
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The keys besides the name."""
        return dict(self.__pydantic_extra__ or {})


def _check_known(kind: str, name: str, known: Iterable[str]) -> None:
    if ":" not in name and name not in known:
        raise ValueError(
            f"Unknown {kind} {name!r}. Known: {', '.join(known)}; your own is written `package.module:function`."
            f"{suggestion(name, known)}"
        )


def _check_loss(value: Named) -> Named:
    _check_known("loss", value.name, LOSSES)
    return value


def _check_metrics(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("`metrics` must name at least one metric. Leave it out for those of the task.")
    for name in value:
        _check_known("metric", name, MEASURES)
    return value


def _check_folder(value: str) -> str:
    if not re.fullmatch(r"[\w+=-][\w.+=-]*", value) or len(value.encode()) > 200:
        raise ValueError(
            f"`name` must be the name of a folder, of at most 200 letters, digits and `_+=-.`, but got {shown(value)}."
        )
    return value


def _check_placement(value: str) -> str:
    if value not in ("spread", "pack") and not (value.endswith(".toml") and parse_network(value).sites):
        raise ValueError(
            f"`placement` must be spread, pack, or a network's .toml file with sites, but got {shown(value)}."
        )
    return value


def _check_clock(value: str) -> str:
    if value != "measured":
        parse_network(value)
    return value


def _check_power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise ValueError(f"`loss_scale` must be a power of two, so that scaling does not round, but got {value:g}.")
    return value


MetricsField: TypeAlias = Annotated[tuple[str, ...], Field(max_length=1000), AfterValidator(_check_metrics)]


class RunFields(Strict):
    """The keys of a run, each with its meaning, default and role."""

    name: Annotated[str, AfterValidator(_check_folder)] = Field(default="run", json_schema_extra=role("place"))
    """Folder under `results/`; by default the recipe's name."""
    model: Named = Field(default=Named(name="cnn"), json_schema_extra=role("computation"))
    """`cnn`, `resnet18`, `resnet101`, `vgg16`, `gpt`, `gpt2`, `lstm`, `mlp`, `hf`, or `package.module:function` of your own."""
    data: Named = Field(default=Named(name="digits"), json_schema_extra=role("computation"))
    """`digits`, `topics`, `addition`, `brackets`, `copying`, `cifar10`, `cifar100`, `wikitext2`; yours: `images`, `table`, `text`,
    `hf`, `package.module:function`."""
    loss: Annotated[Named, AfterValidator(_check_loss)] | None = Field(
        default=None, json_schema_extra=role("computation")
    )
    """`cross_entropy` (with `loss.label_smoothing`), `mse`, or `package.module:function`; by default that of the targets' kind."""
    metrics: MetricsField | None = Field(default=None, json_schema_extra=role("observation"))
    """Figures of evaluations in addition to the loss; settings are judged by the first. `accuracy`, `top5_accuracy`, `exact_match`,
    `f1`, `mae`, `r2`, `loss`, `perplexity` or `package.module:function`."""
    num_stages: int | None = Field(default=None, ge=1, le=MOST_STAGES, json_schema_extra=role("computation"))
    """Stages of equal work, 4 if neither this nor `cuts` is given."""
    cuts: tuple[str, ...] | None = Field(
        default=None, max_length=MOST_STAGES - 1, json_schema_extra=role("computation")
    )
    """Names of the layers after which the model is cut, instead of `num_stages`."""
    bottleneck: Positive | Annotated[tuple[Natural, ...], Field(max_length=MOST_STAGES)] | None = Field(
        default=None, json_schema_extra=role("computation")
    )
    """Features that cross each boundary, reduced and restored by learned layers at its ends (a list: one number each, 0 for none)."""
    bottleneck_form: Literal["linear", "residual", "orthonormal"] = Field(
        default="linear", json_schema_extra=role("computation")
    )
    """The layers of `bottleneck`: `linear`, `residual` added to the identity, or one `orthonormal` basis for both ends."""
    num_microbatches: Positive = Field(default=4, json_schema_extra=role("computation"))
    """Equal parts of a replica's batch that follow each other through the stages."""
    num_replicas: Positive = Field(default=1, json_schema_extra=role("computation"))
    """Pipelines side by side, each with an equal part of the batch, whose gradients are averaged."""
    schedule: ScheduleField = parse_schedule("1F1B")
    """`GPipe`, `1F1B`, `Interleaved1F1B(stages_per_worker)`, `ZBH1`, or `Custom('rows.csv')` in torch's format."""
    forward: BoundaryField = Field(default=UNCOMPRESSED, json_schema_extra=role("compression"))
    """Compressor of activations: one for all boundaries, a list with one each, or a table by tensor or by replica."""
    backward: BoundaryField = Field(default=UNCOMPRESSED, json_schema_extra=role("compression"))
    """Compressor of gradients at the boundaries: one for all boundaries, a list with one each, or a table by tensor or by replica."""
    shared_indices: bool = Field(default=False, json_schema_extra=role("compression"))
    """Send gradients at the positions that their activation kept, values only, by the codec `backward`."""
    replica_gradient: MethodField = Field(default=AVERAGED, json_schema_extra=role("compression"))
    """Method by which replicas average the gradients of a stage: one for all stages, or a list with one each."""
    fused_embedding: bool = Field(default=False, json_schema_extra=role("compression"))
    """Sum the gradients of tied parameters over stages and replicas at once (Optimus-CC)."""
    tied_gradient: SumField = Field(default=AVERAGED, json_schema_extra=role("compression"))
    """Method by which the stages that share a parameter, such as a tied embedding, sum its gradients; as in `replica_gradient`."""
    compress_from: Natural = Field(default=0, json_schema_extra=role("compression"))
    """Step from which links and replica gradients are compressed; before it they are sent as they are."""
    weights: WeightsField = Field(default=SYNCHRONOUS, json_schema_extra=role("compression"))
    """Versions of the weights that passes read, and times of updates: `Synchronous`, `PostValidated`, or `Stashed` and
    `DoubleBuffered`, which run without a flush between steps."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: Positive = Field(default=32, json_schema_extra=role("computation"))
    """Samples a step, over all replicas."""
    steps: Positive | None = None
    """Length of the run in steps, instead of `epochs`."""
    epochs: Positive | None = None
    """Length of the run in epochs, instead of `steps`; an incomplete last batch is dropped."""
    start: StartField = None
    """Checkpoint of another run from which this one continues, as a branch: `FOLDER@STEP`, or `FOLDER` for the last one."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1, json_schema_extra=role("seed"))
    """Seed of weights, order, augmentation, dropout and random codecs."""
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", json_schema_extra=role("computation"))
    """Type of numbers in compute and in messages; weights stay float32."""
    loss_scale: Annotated[float, Field(gt=0), AfterValidator(_check_power_of_two)] | None = None
    """Factor of the loss, and so of all gradients until they reach the weights: a power of two, by default 4096 with float16,
    else 1."""
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", json_schema_extra=role("arithmetic"))
    """`auto` takes a GPU if there is one."""
    tf32: bool = Field(default=False, json_schema_extra=role("computation"))
    """Let a GPU round the factors of float32 products to 10 bits, which is faster."""
    deterministic: bool = Field(default=False, json_schema_extra=role("arithmetic"))
    """Let a GPU use only kernels that give the same bits each time, which are slower; a CPU always does."""
    threads_per_stage: int = Field(default=1, ge=1, le=1024, json_schema_extra=role("arithmetic"))
    """CPU threads of a stage; another number gives gradients that differ in the last bits."""
    cpus_per_stage: float = Field(default=1.0, gt=0, json_schema_extra=role("place"))
    """CPUs that Ray reserves for a stage, or for all stages of one worker."""
    gpus_per_stage: float | None = Field(default=None, ge=0, json_schema_extra=role("place"))
    """GPUs that Ray reserves for a stage; if not given, an equal share of all GPUs, at most one."""
    placement: Annotated[str, AfterValidator(_check_placement)] = Field(
        default="spread", json_schema_extra=role("place")
    )
    """`spread`: stages over all nodes. `pack`: on as few nodes as hold them. Neighbours are side by side either way. A network's
    file with sites: with the least traffic on its slow links (see `raysim sites`)."""
    recompute: bool = Field(default=False, json_schema_extra=role("computation"))
    """Keep only a stage's inputs and run its forward again before the backward."""
    checkpoint_every_steps: Natural = Field(default=100, json_schema_extra=role("observation"))
    """Steps between checkpoints, of which there is one at least every four minutes; 0 writes no others, and keeps the newest alone."""
    checkpoint_at_steps: tuple[Natural, ...] | None = Field(
        default=None, max_length=1000, json_schema_extra=role("observation")
    )
    """Steps whose checkpoints are written and kept, for branches to `start` from; 0 is the state before the first step."""
    evaluate_every_steps: Natural = Field(default=0, json_schema_extra=role("observation"))
    """Steps between evaluations; 0 evaluates at the end only."""
    evaluate_samples: Positive | None = None
    """Number of test samples in an evaluation, the first ones of the set; all if not given."""
    evaluate_batchnorm_batches: Natural = 0
    """Training batches over which BatchNorm statistics are estimated for a second evaluation; 0 for none."""
    profile_every_steps: Natural = Field(default=10, json_schema_extra=role("observation"))
    """Steps whose every action is recorded, with fidelity and residual norms; 0 records none."""
    clock: Annotated[str, AfterValidator(_check_clock)] = "measured"
    """Source of step times for adaptive methods: "measured", or a network on which steps are simulated, so that runs repeat."""
    profile: str | None = None
    """Compute times of a simulated `clock`, which needs them: a device such as A100, or a file written by `raysim profile`."""
    codec_speed: float | None = Field(default=None, gt=0)
    """Dense bytes a second that codecs encode or decode under a simulated `clock`; by default an eighth of the device's memory
    bandwidth, or the speed in the profile's file."""
    transport: Annotated[str, AfterValidator(lambda text: parse_transport(text).name)] = "ray"
    """The transport of packets on the network of a simulated `clock`: "ray", "nccl" or "gloo"."""
    timeout_s: float = Field(default=600.0, gt=0, json_schema_extra=role("place"))
    """Seconds that a start, a step or a few evaluation batches may take before the stages are given up."""
    report_to: (
        Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], Field(max_length=4)] | None
    ) = Field(default=None, json_schema_extra=role("place"))
    """Tools that get the run's configuration and curves, in their local stores: `tensorboard`, `wandb`, `mlflow`, `trackio`."""
    grace_s: float = Field(default=15.0, ge=0, json_schema_extra=role("place"))
    """Seconds after SIGTERM, SIGINT or SIGHUP in which a run may finish its step and write a checkpoint."""

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
    def _bare_options(cls, value: Any) -> Any:
        has_options = isinstance(value, Mapping) and "name" not in value
        return {"name": "cross_entropy", **value} if has_options else value  # the only loss with options

    @field_validator("metrics", "report_to", mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value
