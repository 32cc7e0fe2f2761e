"""Hand-written timings: a step's seconds and bytes from a paper, a profiler or a guess.

schedule = "1F1B"
num_stages = 8
num_microbatches = 24
forward_s = 18.522e-3
input_s = 18.086e-3
weight_s = 9.337e-3
message_bytes = 27_262_976
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import AfterValidator, Field, ValidationError, model_validator

from raysim.config import ConfigError, apply_override
from raysim.config.fields import Natural, Positive, Strict
from raysim.config.reading import first_error
from raysim.limits import process_memory
from raysim.network.collectives import of_each_replica
from raysim.network.profile import FORMAT, Profile
from raysim.network.sharding import Sharded, Units, parse_sharding
from raysim.network.timed_step import TimedStep
from raysim.notation import InputError, check_integer
from raysim.schedules import Schedule, parse_schedule
from raysim.schedules.arrays import make_table
from raysim.schedules.weights import parse_weights
from raysim.storage.files import is_file, read_text
from raysim.storage.texts import parse_json, parse_toml
from raysim.units import format_bytes

Seconds = Annotated[float, Field(ge=0, lt=math.inf)]
ByStage = Seconds | Annotated[tuple[Seconds, ...], Field(min_length=1)]
KEYS = ("schedule", "num_microbatches", "num_replicas", "weight_share", "weights", "averaging_delay")
"""Overrides accepted with a file of `Profile.save`."""
ACTION_BYTES = 210
"""Memory of a simulated action: 83 to 88 bytes measured with one stage a worker, 210 with several."""


def _checked_by(parse: Callable[[str], object]) -> AfterValidator:
    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


class Timings(Strict):
    """A step's costs in seconds and bytes of one microbatch; lists have a value for each stage.

    >>> timings = Timings(num_stages=4, num_microbatches=8, forward_s=1.0, backward_s=2.0)
    >>> from raysim.network.topology import FREE
    >>> timings.step().simulate(FREE).step_s
    33.0
    """

    schedule: Annotated[str, _checked_by(parse_schedule)] = "1F1B"
    """The order of forwards and backwards, such as 1F1B, ZBH1 or Interleaved1F1B(2)."""
    weights: Annotated[str, _checked_by(parse_weights)] = "Synchronous"
    """Weight policy, such as PostValidated, which has no flush between steps."""
    num_stages: Positive
    """Stages of the pipeline: more than workers with an interleaved schedule."""
    num_microbatches: Positive
    """Microbatches of a step on each replica."""
    num_replicas: Positive = 1
    """Copies of the pipeline; their gradients are averaged."""
    microbatch_samples: Natural = 0
    """Samples of a microbatch, to report samples a second."""
    forward_s: ByStage
    """Seconds of a forward."""
    backward_s: ByStage | None = None
    """Seconds of a whole backward; or give `input_s` and `weight_s`."""
    input_s: ByStage | None = None
    """Seconds of the backward for inputs, T_B of zero-bubble papers."""
    weight_s: ByStage | None = None
    """Seconds of the backward for weights, T_W."""
    weight_share: float | None = Field(default=None, ge=0, le=1)
    """Weight gradients' share of `backward_s`, for schedules that run them separately."""
    message_bytes: ByStage = 0.0
    """Bytes of the activation sent to the next stage."""
    gradient_message_bytes: ByStage | None = None
    """Bytes of the gradient sent back to the previous stage; by default those of the activation from it."""
    message_s: Seconds = 0.0
    """Measured seconds of a message on any network, added to the network's own for `message_bytes`."""
    blocking_sends: bool = False
    """Whether a send keeps its stage from computing until the message has arrived."""
    send_byte_s: Seconds = 0.0
    """Sender's seconds for each sent byte, such as copies by the host."""
    encode_s: ByStage = 0.0
    """Seconds to compress a message."""
    decode_s: ByStage = 0.0
    """Seconds to decompress a message."""
    update_s: ByStage = 0.0
    """Seconds of an update."""
    step_s: Seconds = 0.0
    """Seconds of every step in addition to all else."""
    gradient_bytes: ByStage = 0.0
    """Bytes of the gradients that replicas average, or scatter if they are sharded."""
    averaging_delay: Natural = 0
    """Steps by which an average may lag: 1 lets it overlap the whole next step."""
    sharding: Annotated[str, _checked_by(parse_sharding)] | None = None
    """Sharding of the parameters over replicas, such as FSDP(8)."""
    parameter_bytes: ByStage = 0.0
    """Bytes of the parameters gathered by sharded replicas."""
    units: Positive = 1
    """Equal units of a stage, such as blocks, gathered one by one by sharded replicas."""
    source: str = "timings by hand"
    """Where the figures come from."""

    @model_validator(mode="after")
    def _fits(self) -> Timings:
        self._check_memory()
        whole, parts = self.backward_s is not None, (self.input_s is not None, self.weight_s is not None)
        if whole == any(parts) or any(parts) != all(parts):
            raise ValueError("Give either `backward_s`, or `input_s` and `weight_s`.")
        if self.weight_share is not None and not whole:
            raise ValueError("`weight_share` splits `backward_s`: leave it out if `input_s` and `weight_s` are given.")
        for name, value in self:
            if isinstance(value, tuple) and len(value) != self.num_stages:
                raise ValueError(
                    f"`{name}` must have a value for each of {self.num_stages} stages, but has {len(value)}."
                )
        if self.blocking_sends and not (self.message_s or np.any(self.message_bytes)):
            raise ValueError("`blocking_sends` needs messages: give `message_bytes`, `message_s` or both.")
        self._check_sharding()
        return self

    def _check_memory(self) -> None:
        size = 2 * ACTION_BYTES * self.num_stages * self.num_microbatches
        if size > (memory := process_memory()).size:
            raise ValueError(
                f"`num_stages` = {self.num_stages} with `num_microbatches` = {self.num_microbatches} takes {format_bytes(size)} to "
                f"simulate, but {memory}."
            )

    def _check_sharding(self) -> None:
        bytes_given = np.any(self.parameter_bytes)
        if self.sharding is None:
            if bytes_given or self.units > 1:
                raise ValueError(
                    "`parameter_bytes` and `units` apply only to sharded replicas: add `sharding`, such as FSDP(8)."
                )
            return
        if self.averaging_delay:
            raise ValueError("`averaging_delay` applies only without `sharding`. Leave it out.")
        parse_sharding(self.sharding).groups(self.num_replicas)
        if not bytes_given or not np.any(self.gradient_bytes):
            raise ValueError("`sharding` needs `parameter_bytes` to gather and `gradient_bytes` to scatter.")
        if repr(parse_weights(self.weights)) != "Synchronous":
            raise ValueError(f"`sharding` needs a flush between steps, which `weights` = {self.weights} does without.")

    def step(self) -> TimedStep:
        """Return the step of these costs; raises InputError if the schedule does not fit them."""
        forward_bytes = self._by_stage(self.message_bytes)
        back = np.roll(forward_bytes, 1) if self.gradient_message_bytes is None else self.gradient_message_bytes
        wire_bytes = np.stack([forward_bytes, self._by_stage(back)], axis=1)
        if self.weight_s is not None:
            wire_bytes = np.pad(wire_bytes, ((0, 0), (0, 1)))
        profile = Profile.uniform(
            self.num_stages,
            self.forward_s,
            self.backward_s if self.backward_s is not None else self.input_s or 0.0,
            weight_s=self.weight_s,
            wire_bytes=wire_bytes,
            encode_s=self._by_stage(self.encode_s)[:, None] + self.send_byte_s * wire_bytes,
            decode_s=self._by_stage(self.decode_s)[:, None],
            update_s=self._by_stage(self.update_s),
            gradient_bytes=self._by_stage(0.0 if self.sharding else self.gradient_bytes),
            call_s=self.message_s if self.blocking_sends else 0.0,
            message_s=0.0 if self.blocking_sends else self.message_s,
            blocking=self.blocking_sends,
            step_s=self.step_s,
            microbatch_samples=self.microbatch_samples,
            source=self.source,
        )
        step = timed_step(
            profile,
            self.schedule,
            self.num_microbatches,
            num_replicas=self.num_replicas,
            weight_share=self.weight_share,
            weights=self.weights,
            averaging_delay=self.averaging_delay,
        )
        if self.sharding is None:
            return step
        sizes = np.stack([self._by_stage(self.parameter_bytes), self._by_stage(self.gradient_bytes)], axis=1)
        units = tuple(Units.even(self.units, *of_stage) for of_stage in sizes.tolist())
        return replace(step, sharded=Sharded(parse_sharding(self.sharding), units))

    def _by_stage(self, value: ArrayLike) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(value, np.float64), (self.num_stages,))


def timed_step(
    profile: Profile,
    schedule: str | Schedule = "1F1B",
    num_microbatches: int | None = None,
    *,
    num_replicas: int | None = None,
    weight_share: float | None = None,
    weights: str = "Synchronous",
    averaging_delay: int = 0,
) -> TimedStep:
    """Return the step of a profile under a schedule. Counts default to the profile's.

    `weight_share`: weight gradients' share of a backward timed as a whole. `weights`: a weight policy, possibly without a flush
    between steps. `averaging_delay`: steps by which an average may lag. Raises InputError.
    """
    try:
        policy = parse_weights(weights)
        rows = policy.order(parse_schedule(schedule) if isinstance(schedule, str) else schedule)
        count = num_microbatches if num_microbatches is not None else profile.num_microbatches or 1
        table = make_table(rows, profile.num_stages, count)
        if count != profile.num_microbatches:
            profile = profile.mean_microbatch()
        if table.splits_backward and profile.compute_s.shape[2] == 2:
            if weight_share is None:
                raise InputError(
                    f"{rows!r} runs weight gradients separately, but the backward was timed as a whole: give `weight_share`, their "
                    "share of it (0.34 to 0.42 in tables 4 and 9 of Qi et al. 2024), or time the two parts."
                )
            profile = profile.split_backward(weight_share)
        if policy.updates_each_microbatch:
            profile = replace(profile, update_s=count * profile.update_s)
        replicas = num_replicas if num_replicas is not None else profile.num_replicas
        if profile.num_replicas == 1:
            profile = replace(profile, transfers=of_each_replica(profile.transfers, replicas))
        delay = check_integer("averaging_delay", averaging_delay, 0)
        return TimedStep([(1.0, profile)], rows, count, replicas, averaging_delay=delay)
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from None


def read_timings(path: str, overrides: Sequence[str] = ()) -> TimedStep | None:
    """Read the step in a file of timings or of `Profile.save`, with `key=value` overrides; None if it is neither.

    Raises InputError.
    """
    if Path(path).suffix not in (".toml", ".json") or not is_file(path):
        return None
    values = read_toml_or_json(path)
    if not isinstance(values, dict):
        return None
    if values.get("format") == FORMAT:
        return _saved_step(path, overrides)
    if not any(name in values for name in ("forward_s", "backward_s", "input_s")):
        return None
    for override in overrides:
        apply_override(values, override)
    try:
        timings = Timings.model_validate(values)
    except ValidationError as error:
        raise InputError(first_error(error, Timings.model_fields, f" in {path}")) from None
    return timings.step()


def read_toml_or_json(path: str | Path) -> Any:
    """Return the content of a TOML or JSON file; raises InputError."""
    kind = Path(path).suffix
    try:
        text = read_text(path)
        return parse_json(text) if kind == ".json" else parse_toml(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise InputError(f"{path} is not {kind[1:].upper()}: {error}.") from None


def _saved_step(path: str, overrides: Sequence[str]) -> TimedStep:
    """Return the step of a saved profile, with schedule and counts from the overrides."""
    changes: dict[str, Any] = {}
    for override in overrides:
        key = apply_override(changes, override)
        if key not in KEYS:
            raise ConfigError(f"Unknown key `{key}` with a profile. Known: {', '.join(KEYS)}.")
    try:
        profile = Profile.load(path)
        if changes.get("num_replicas", 1) != 1 and not profile.gradient_bytes.any() and not len(profile.transfers):
            raise InputError(
                f"`num_replicas`: {path} has no `gradient_bytes` to average: record it again, or add them."
            )
        return timed_step(profile, **changes)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from None
