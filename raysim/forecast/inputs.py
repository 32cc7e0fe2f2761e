"""Parse the job of a command line: its model, defaults, layout, and the settings to try."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysim.config import ConfigError, read_config
from raysim.config.identity import METHOD_KEYS, Setting
from raysim.forecast.families import read_shape
from raysim.forecast.fleet import Fleet, HostLayout
from raysim.forecast.job import Job, Model
from raysim.forecast.shapes import ModelShape
from raysim.forecast.structure import RecipeModel
from raysim.network.sharding import parse_sharding
from raysim.network.transport import calibrated_transport
from raysim.notation import InputError, check_real
from raysim.schedules import parse_schedule

SHAPE = ("layers", "width", "length", "vocabulary")
"""Options that describe a model without a recipe or config."""
HEAD_WIDTH = 128
"""Head width of a model given by its shape, if it divides the model's width."""
BATCH = 8
"""Default samples of a step for each host."""
KEYS = "|".join(METHOD_KEYS)
SETTING = re.compile(rf"\s*({KEYS})=(.+?)(?=\s+(?:{KEYS})=|\s*$)")


def find_model(source: str | None, length: int | None, shape: Mapping[str, int | None]) -> Model:
    """Return the model of a recipe, a config of transformers, or a shape; raises InputError."""
    sizes = {**shape, "length": length}
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if source is None:
        missing = [f"--{name}" for name in SHAPE if name not in given]
        if missing:
            raise InputError(
                "Give a model: a recipe, a config.json of transformers, or --layers, --width, --length and --vocabulary. "
                f"Missing: {', '.join(missing)}."
            )
        width = given["width"]
        try:
            return ModelShape(**given, heads=max(width // HEAD_WIDTH, 1) if width % HEAD_WIDTH == 0 else 1)
        except ValueError as error:
            raise InputError(re.sub("`(layers|width|length|vocabulary)`", r"`--\1`", str(error))) from None
    if given.keys() - {"length"}:
        raise InputError(
            f"`--layers`, `--width` and `--vocabulary` describe a model, but {source} is one already: leave them out."
        )
    model = read_shape(source, length)
    if model is not None:
        return model
    if Path(source).is_dir():
        raise InputError(
            f"{source} holds no config.json of transformers. Give --layers, --width, --length, --vocabulary."
        )
    if length is not None:
        raise InputError("`--length` belongs to a transformer: a recipe's is `data.length`.")
    try:
        return RecipeModel(read_config(source))
    except ConfigError as error:
        raise InputError(
            f"{error} You can also give a config.json of transformers, or --layers, --width, --length and --vocabulary."
        ) from None


def make_job(
    model: Model,
    fleet: Fleet,
    *,
    schedule: str,
    batch: int | None,
    microbatch: int | None,
    efficiency: float,
    transport: str,
    recompute: bool,
) -> Job:
    """Return the job, with missing values taken from its model; raises InputError."""
    for option, size in {"--batch": batch, "--microbatch": microbatch}.items():
        if size is not None and size < 1:
            raise InputError(f"`{option}` must be an integer of at least 1, but got {size}.")
    if isinstance(model, RecipeModel):
        config = model.config
        batch = batch or config.batch_size
        microbatch = microbatch or config.microbatch_size
        dtype, recompute = config.dtype, recompute or config.recompute
    else:
        batch, microbatch, dtype = batch or BATCH * fleet.hosts, microbatch or 1, "bfloat16"
    try:
        check_real("--efficiency", efficiency, 0, 1, open_low=True)
        rows = parse_schedule(schedule)
    except ValueError as error:
        raise InputError(str(error)) from None
    return Job(model, fleet, rows, batch, microbatch, efficiency, calibrated_transport(transport), recompute, dtype)


def parse_layout(job: Job, stages: int | None, replicas: int | None, sharding: str | None = None) -> HostLayout | None:
    """Return the layout of `--stages`, `--replicas` and `--sharding`; None if all are missing. Raises InputError.

    Stages or replicas may be missing; with `--sharding` alone, every host is a replica.
    """
    if stages is None and replicas is None:
        if sharding is None:
            return None
        stages = 1
    hosts = job.fleet.hosts
    for option, given in {"--stages": stages, "--replicas": replicas}.items():
        if given is not None and (given < 1 or hosts % given):
            raise InputError(f"`{option}` must divide the {hosts} hosts of {job.fleet!r}, but got {given}.")
    layout = HostLayout(stages or hosts // (replicas or 1), replicas or hosts // (stages or 1))
    if sharding is None:
        return layout
    try:
        shards = parse_sharding(sharding)
        shards.groups(layout.replicas)
    except ValueError as error:
        raise InputError(f"`--sharding`: {error}") from None
    return layout._replace(sharding=shards)


def parse_setting(text: str, *, trained: bool = False) -> Setting:
    """Parse the link codecs and methods of `--try`; raises InputError.

    `trained`: the setting will be trained; only training can judge sums of tied parameters.

    >>> print(parse_setting("forward=TopK(density=0.1) backward=Quantize(8)"))
    forward=TopK(0.1) backward=Quantize(8)
    """
    pairs = SETTING.findall(text)
    values = dict(pairs)
    if len(values) < len(pairs):
        raise InputError(f"`--try` must name a key once, but got {text!r}.")
    if not values or SETTING.sub("", text).strip():
        raise InputError(
            f"`--try` must look like 'forward=TopK(0.1) backward=Quantize(8) replica_gradient=PowerSGD(8)', but got {text!r}."
        )
    if "tied_gradient" in values and not trained:
        raise InputError("`--try`: only training can judge `tied_gradient`: use `raysim decide`.")
    overrides = [f"{key}={value}" for key, value in Setting(**values).methods().items()]
    config = read_config("topics-gpt", ["num_replicas=2", *overrides])
    return Setting.of({key: repr(getattr(config, key)) for key in METHOD_KEYS})
