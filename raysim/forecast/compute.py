"""Compute times for forecasts, from a device's datasheet or a profile recorded on this machine."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raysim.codecs.codec import DTYPES
from raysim.config import ConfigError, RunConfig
from raysim.engine.inline import InlineEngine
from raysim.forecast.replica_costs import replica_costs, tied_transfers
from raysim.network.presets import DEVICES
from raysim.network.profile import Profile
from raysim.network.recorded import mean_profile, profiles_from_actions
from raysim.notation import check_choice, check_real
from raysim.pipeline.link import LinkAccount
from raysim.pipeline.plan import averaged_shapes
from raysim.pipeline.prepare import Workload, prepare
from raysim.pipeline.reports import ActionRecord
from raysim.records import WARMUP_STEPS
from raysim.schedules.arrays import OPS, make_table
from raysim.schedules.families import Schedule
from raysim.values import BoundaryTensors

RECORDED_EVERY = 2
EFFICIENCY = 0.4  # assumed share of a datasheet's peak that training reaches


def datasheet_profile(
    config: RunConfig,
    device: str,
    flops_forward: Sequence[int],
    weight_shares: Sequence[float],
    efficiency: float = EFFICIENCY,
) -> Profile:
    """Return the compute of a run on `device`, from each stage's forward operations per microbatch; no packets.

    `weight_shares`: see `counted_profile`. Raises ValueError if the device is unknown.
    """
    check_choice("device", device, DEVICES)
    speed = DEVICES[device].peak_flops * check_real("efficiency", efficiency, 0, 1, open_low=True)
    check_split(config.schedule, weight_shares)
    source = f"analytic, {device} at {efficiency:g} of its datasheet's dense 16-bit peak"
    return counted_profile(flops_forward, weight_shares, speed, recompute=config.recompute, source=source)


def check_split(schedule: Schedule, weight_shares: Sequence[float]) -> None:
    """Raise ConfigError if a share of the backward in weight gradients is not known, for a schedule that runs them separately."""
    if any(map(math.isnan, weight_shares)):
        raise ConfigError(
            f"`schedule` = {schedule!r} runs weight gradients separately, and their share of the backward cannot be counted for this "
            "model: use 1F1B, or a file written by `raysim profile`."
        )


def counted_profile(
    flops_forward: Sequence[float], weight_shares: Sequence[float], flops_per_s: float, *, recompute: bool, **rest: Any
) -> Profile:
    """Return the compute of counted operations: a backward counts as two forwards, or three with recomputation.

    `weight_shares`: weight gradients' share of each stage's backward without recomputation; empty if the schedule runs it as a whole.
    """
    forward_s = np.asarray(flops_forward, np.float64) / flops_per_s
    profile = Profile.uniform(len(forward_s), forward_s, (3.0 if recompute else 2.0) * forward_s, **rest)
    if not weight_shares:
        return profile
    return profile.split_backward([share * (2 / 3 if recompute else 1) for share in weight_shares])


def recorded_profile(config: RunConfig, recorded: Profile, boundaries: Sequence[BoundaryTensors]) -> Profile:
    """Return a recorded profile averaged over microbatches, with its packets and codec seconds.

    Data loading, recorded as decoding in actions that receive no packet, is moved into compute. Raises ConfigError if the
    profile's number of stages, microbatch size or activations differ from the run's, or it has several replicas.
    """
    num_stages, value_bytes = len(boundaries) + 1, DTYPES[config.dtype].itemsize
    if recorded.num_stages != num_stages:
        raise ConfigError(f"`num_stages` must be the profile's ({recorded.num_stages}), but got {num_stages}.")
    if recorded.num_replicas != 1:
        raise ConfigError(f"`profile` must have one replica, but got {recorded.num_replicas}: record it again.")
    try:
        recorded.check_microbatches(config.microbatch_size)
        recorded.check_messages(
            [value_bytes * sum(map(math.prod, x.shapes.values())) + sum(x.exact_bytes.values()) for x in boundaries]
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    loading = np.zeros_like(recorded.decode_s)
    loading[:, 0, 0], loading[:, -1, 1] = recorded.decode_s[:, 0, 0], recorded.decode_s[:, -1, 1]
    whole = replace(recorded, compute_s=recorded.compute_s + loading, decode_s=recorded.decode_s - loading)
    profile = _updates(config, whole.mean_microbatch())
    if cuts_backward(config, num_stages) and profile.compute_s.shape[2] < len(OPS):
        raise ConfigError(
            f"`profile` times each backward as a whole, but {config.schedule!r} runs weight gradients separately: record it with "
            f"`raysim profile ... schedule={config.schedule!r}`, or set their share of the backward: "
            "`Profile.load(FILE).split_backward(SHARE).save(FILE)`."
        )
    return profile


def _updates(config: RunConfig, profile: Profile) -> Profile:
    """Return the profile with one update per microbatch if the weight policy updates after each."""
    if not config.weights.updates_each_microbatch:
        return profile
    return replace(profile, update_s=config.num_microbatches * profile.update_s)


def cuts_backward(config: RunConfig, num_stages: int) -> bool:
    """Return whether the schedule splits backwards in two; raises ValueError if it does not fit the run."""
    return make_table(config.executed_schedule, num_stages, config.num_microbatches).splits_backward


def record_profile(config: RunConfig, *, num_steps: int = 5) -> Profile:
    """Measure the costs of actions on this machine with a short run in this process.

    `num_steps` steps are recorded, alternating with unrecorded ones. Actions run one at a time, so each has the machine to
    itself. Ray's overhead per packet belongs to the transport and is not included.
    """
    if num_steps < 1:
        raise ConfigError(f"`num_steps` must be an integer of at least 1, but got {num_steps}.")
    total = WARMUP_STEPS + RECORDED_EVERY * num_steps
    alone = {
        "steps": total,
        "epochs": None,
        "profile_every_steps": RECORDED_EVERY,
        "num_replicas": 1,
        "replica_gradient": "Identity",
        "fused_embedding": False,
        "tied_gradient": "Identity",
        "clock": "measured",
        "profile": None,
        "transport": "ray",
        "codec_speed": None,
        "batch_size": config.batch_size // config.num_replicas,  # the share of one replica
    }
    workload = prepare(config.changed(**alone))
    engine = InlineEngine(workload)
    engine.check()
    engine.start()
    rows: list[dict[str, Any]] = []
    links: list[LinkAccount] = []
    updates_s = []
    with closing(engine):
        for step in range(total):
            reports = engine.step(step)
            actions = [action for report in reports for action in report.actions]
            if step < WARMUP_STEPS or step % RECORDED_EVERY != RECORDED_EVERY // 2:
                continue
            rows += [action._asdict() | {"step": step, "replica": 0} | _alone(action, config) for action in actions]
            links += [link for report in reports for link in report.links if link.coded_bytes]
            updates_s.append(sum(report.update_s for report in reports))
    profiles = profiles_from_actions({name: np.array([row[name] for row in rows]) for name in rows[0]})
    sizes = np.array([sum(parameter.numel() for parameter in module.parameters()) for module in workload.modules])
    plan = workload.plan
    shapes = [averaged_shapes(stage, module, plan.config, plan.tied) for stage, module in enumerate(workload.modules)]
    gradient_bytes = np.array([4.0 * sum(map(math.prod, own.values())) for own in shapes])
    tied = [
        (tuple(stage for stage, _ in owners), workload.modules[owners[0][0]].get_parameter(owners[0][1]).numel())
        for owners in plan.tied
    ]
    return replace(
        mean_profile(list(profiles.values())),
        gradient_bytes=gradient_bytes,
        bucketed_bytes=gradient_bytes,
        transfers=tied_transfers(tied, 1),
        update_s=statistics.median(updates_s) * sizes.astype(np.float64) / max(sizes.sum(), 1),
        codec_bytes_per_s=_codec_speed(config, shapes, links),
        microbatch_samples=config.microbatch_size,
        source=_source(config, workload, len(profiles)),
    )


def _alone(action: ActionRecord, config: RunConfig) -> dict[str, float]:
    """Return the compute of an action without time lost to other load, as replays count it."""
    cpu_s = action.compute_cpu_s / config.threads_per_stage  # NaN on a GPU
    return {"compute_wall_s": float(np.fmin(action.compute_wall_s, cpu_s))}


def _codec_speed(
    config: RunConfig, shapes: Sequence[Mapping[str, tuple[int, ...]]], links: Sequence[LinkAccount]
) -> float:
    """Return the bytes a second processed by the codecs of links and replica methods; 0 without codecs."""
    work: list[tuple[float, float]] = [(link.coded_bytes, link.codec_s) for link in links]
    if config.num_replicas > 1 and not any("stage" in method.needs for method in config.replica_methods()):
        costs = replica_costs(config, shapes, None, [])
        work += [(cost.coded_bytes, cost.method_s) for cost in costs if cost.coded_bytes]
    return sum(size for size, _ in work) / sum(seconds for _, seconds in work) if work else 0.0


def _source(config: RunConfig, workload: Workload, num_steps: int) -> str:
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else f"{config.threads_per_stage} thread(s) of {platform.machine()}"
    return (
        f"raysim profile of {config.name} on {where}, host {platform.node()}: {workload.plan.num_stages} stages, "
        f"microbatches of {config.microbatch_size} samples, mean of {num_steps} steps"
    )
