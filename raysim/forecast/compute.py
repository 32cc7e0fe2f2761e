"""Compute of a run that is priced and not measured: of a device's datasheet, or of a recorded profile, fit for its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raysim.config import ConfigError, RunConfig
from raysim.network.profile import Profile
from raysim.schedules.arrays import OPS, make_table

EFFICIENCY = 0.4  # of a datasheet's peak that training is taken to reach


def datasheet_profile(
    config: RunConfig, device: str, flops_forward: Sequence[int], efficiency: float = EFFICIENCY
) -> Profile:
    """Return the compute of a run on `device`, from the operations of a microbatch's forward by stage; no packets.

    A backward is two forwards, and three where it computes the forward again. Raises ValueError on an unknown device.
    """
    profile = Profile.analytic(
        flops_forward,
        device=device,
        efficiency=efficiency,
        wire_bytes=0.0,
        backward_factor=3.0 if config.recompute else 2.0,
    )
    return fit_schedule(config, profile)


def recorded_profile(config: RunConfig, recorded: Profile, num_stages: int) -> Profile:
    """Return the compute of a recorded profile, all microbatches alike, with its packets and codec seconds.

    Reading data, which is recorded as decoding where no packet is taken, becomes part of compute. Raises ConfigError where the
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
    return fit_schedule(config, whole.mean_microbatch())


def fit_schedule(config: RunConfig, profile: Profile) -> Profile:
    """Return the profile with backwards in two parts where the schedule has them so: for inputs, and for weights.

    They take equally long; a forward that is computed again is part of the first. Where weights are updated after each
    microbatch, a step has as many updates.
    """
    if config.weights.updates_each_microbatch:
        profile = replace(profile, update_s=config.num_microbatches * profile.update_s)
    if not cuts_backward(config, profile.num_stages) or profile.compute_s.shape[2] == len(OPS):
        return profile
    return profile.split_backward(1 / 3 if config.recompute else 1 / 2)


def cuts_backward(config: RunConfig, num_stages: int) -> bool:
    """Return whether the schedule has backwards in two parts; raises ValueError where it does not fit the run."""
    table = make_table(config.executed_schedule, num_stages, config.num_microbatches)
    return int(table.op.max()) == OPS.index("W")
