"""Steps to simulate: a recording's bytes with the seconds of its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raysim.analysis.data.recording import Recording
from raysim.analysis.data.work import NO_KIND
from raysim.analysis.pricing.estimates import RESAMPLES
from raysim.analysis.pricing.job_costs import Costs
from raysim.network.profile import Profile
from raysim.network.transport import Transport


def priced_profiles(recording: Recording, costs: Costs, transport: Transport, num_workers: int) -> dict[int, Profile]:
    """Return the profile of each priced step over a transport: its own bytes, and its job's seconds for each kind of work."""
    work, recorded = recording.work, list(recording.profiles.values())
    seconds = costs.seconds(work.kinds)[0]
    profiles = {}
    for step, i in recording.priced_steps.items():
        compute, encode, decode = (
            np.where(codes[i] == NO_KIND, 0.0, seconds[codes[i]]) for codes in (work.compute, work.encode, work.decode)
        )
        averages = recording.average_kinds(step)
        method_s = np.zeros(recording.num_stages)
        if averages:
            method_s[list(averages)] = costs.seconds(list(averages.values()))[0]
        own = replace(
            recorded[i],
            compute_s=compute,
            encode_s=encode,
            decode_s=decode,
            update_s=costs.updates()[0],
            method_s=method_s,
            transfers=recording.transfers(step),
            **recording.averaged_bytes(step),
        )
        profiles[step] = own.over(transport, num_workers)
    return profiles


def resampled_profiles(
    recording: Recording, costs: Costs, mean: Profile, overheads: dict[str, float], steps: Sequence[int]
) -> list[Profile]:
    """Return the mean step at the estimate, then at each resample of the prices; `overheads` are a host's seconds by name."""
    work = recording.work
    seconds = costs.seconds(work.kinds)
    compute, encode, decode = (
        np.mean(np.where(codes == NO_KIND, 0.0, seconds[:, codes]), axis=1)
        for codes in (work.compute, work.encode, work.decode)
    )
    averages = np.zeros((1 + RESAMPLES, recording.num_stages))
    for kinds in [recording.average_kinds(step) for step in steps]:
        for stage, kind in kinds.items():
            averages[:, stage] += costs.seconds([kind])[:, 0] / len(steps)
    drawn = {name: value * costs.host_factors() for name, value in overheads.items()}
    drawn["update_s"] = np.broadcast_to(costs.updates()[:, None], averages.shape)
    return mean.at_seconds(compute_s=compute, encode_s=encode, decode_s=decode, method_s=averages, **drawn)
