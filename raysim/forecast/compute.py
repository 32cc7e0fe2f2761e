"""Compute of a run that is priced and not measured: of a device's datasheet, or of a recorded profile, fit for its schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raysim.config import ConfigError, RunConfig
from raysim.network.profile import Profile
from raysim.schedules.arrays import OPS, make_table

EFFICIENCY = 0.4  # of a datasheet's peak that training is taken to reach


def datasheet_profile(
    config: RunConfig,
    device: str,
    flops_forward: Sequence[int],
    weight_shares: Sequence[float],
    efficiency: float = EFFICIENCY,
) -> Profile:
    """Return the compute of a run on `device`, from the operations of a microbatch's forward by stage; no packets.

    A backward is two forwards, and three if it computes the forward again. `weight_shares` are weight gradients' shares of
    it by stage, for schedules that run them separately. Raises ValueError on an unknown device.
    """
    profile = Profile.analytic(
        flops_forward,
        device=device,
        efficiency=efficiency,
        wire_bytes=0.0,
        backward_factor=3.0 if config.recompute else 2.0,
    )
    profile = _updates(config, profile)
    if not cuts_backward(config, profile.num_stages):
        return profile
    if any(map(math.isnan, weight_shares)):
        raise ConfigError(
            f"`schedule` = {config.schedule!r} runs weight gradients apart, whose share of the backward cannot be counted for this "
            "model: use a file of `raysim profile`."
        )
    return profile.split_backward([share * (2 / 3 if config.recompute else 1) for share in weight_shares])


def recorded_profile(config: RunConfig, recorded: Profile, num_stages: int) -> Profile:
    """Return the compute of a recorded profile, all microbatches alike, with its packets and codec seconds.

    Reading data, which is recorded as decoding where no packet is taken, becomes part of compute. Raises ConfigError if the
    profile is of another number of stages, of microbatches of another size, or of several replicas.
    """
    if recorded.num_stages != num_stages:
        raise ConfigError(f"`num_stages` must be that of the profile ({recorded.num_stages}), but got {num_stages}.")
    if recorded.num_replicas != 1:
        raise ConfigError(f"`profile` must be of one replica, but got {recorded.num_replicas}: record it again.")
    try:
        recorded.check_microbatches(config.microbatch_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    loading = np.zeros_like(recorded.decode_s)
    loading[:, 0, 0], loading[:, -1, 1] = recorded.decode_s[:, 0, 0], recorded.decode_s[:, -1, 1]
    whole = replace(recorded, compute_s=recorded.compute_s + loading, decode_s=recorded.decode_s - loading)
    profile = _updates(config, whole.mean_microbatch())
    if cuts_backward(config, num_stages) and profile.compute_s.shape[2] < len(OPS):
        raise ConfigError(
            f"`profile` times each backward as a whole, but {config.schedule!r} runs weight gradients apart: record it with "
            f"`raysim profile ... schedule={config.schedule!r}`, or set the share of the backward that is theirs: "
            "`Profile.load(FILE).split_backward(SHARE).save(FILE)`."
        )
    return profile


def _updates(config: RunConfig, profile: Profile) -> Profile:
    """Return the profile with as many updates a step as there are microbatches, if weights are updated after each."""
    if not config.weights.updates_each_microbatch:
        return profile
    return replace(profile, update_s=config.num_microbatches * profile.update_s)


def cuts_backward(config: RunConfig, num_stages: int) -> bool:
    """Return whether the schedule has backwards in two parts; raises ValueError if it does not fit the run."""
    table = make_table(config.executed_schedule, num_stages, config.num_microbatches)
    return int(table.op.max()) == OPS.index("W")
