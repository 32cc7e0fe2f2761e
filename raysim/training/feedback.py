"""Signals of the last step for adaptive methods: step time (measured or simulated), sensitivities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raysim.config import ConfigError
from raysim.forecast.compute import datasheet_profile, recorded_profile
from raysim.network.collectives import as_transfers, whole_bytes
from raysim.network.presets import DEVICES, parse_network
from raysim.network.profile import Profile
from raysim.network.timed_step import TimedStep
from raysim.network.transport import parse_transport
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import StepReport, link_name
from raysim.storage.files import is_file


class Clock:
    """Provides the seconds of a step, measured or simulated.

    Simulated seconds depend only on the packets: compute comes from a frozen profile, so that runs are reproducible.

    Raises ConfigError if there is no such profile, or it belongs to a different pipeline.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network = None if plan.config.clock == "measured" else parse_network(plan.config.clock)
        if self.network is not None:
            self._profile = _frozen_profile(plan)
            self.codec_speed = _codec_speed(plan, self._profile)

    def __str__(self) -> str:
        """Describe the source of the seconds."""
        if self.network is None:
            return "the step as it passes"
        config = self.plan.config
        codecs = f", codecs at {self.codec_speed / 1e9:.3g} GB/s" if math.isfinite(self.codec_speed) else ""
        return f"{self.network!r} with the compute of {config.profile}{codecs}, transport {config.transport}"

    def step_s(self, reports: Sequence[StepReport], seconds: float) -> float:
        """Return the seconds of a step: the measured `seconds`, or simulated ones on the network.

        The simulation assumes equal packets on a link within a step, and codecs at `codec_speed`.
        """
        network = self.network
        if network is None:
            return seconds
        config = self.plan.config
        return TimedStep(
            [(1.0, self.profile(reports))],
            config.executed_schedule,
            config.num_microbatches,
            config.num_replicas,
            averaging_delay=config.exchange_delay,
            interval=config.exchange_interval,
        ).step_s(network)

    def profile(self, reports: Sequence[StepReport]) -> Profile:
        """Return the costs of a step under a simulated clock: frozen compute, and the reported transfers and codec work."""
        shape = (self.plan.num_replicas, self.plan.num_stages, self._profile.compute_s.shape[2], 1)
        wire_bytes, encode_s, decode_s = np.zeros((3, *shape))
        method_s, tied_s, gradient_bytes, bucketed_bytes = np.zeros((4, self.plan.num_stages))
        for report in reports:
            for link in report.links:
                if link.packets:
                    op = 0 if link.direction == "forward" else 1
                    stage = link.boundary if link.sender == (op == 0) else link.boundary + 1
                    if link.sender:
                        wire_bytes[report.replica, stage, op] += link.wire_bytes / link.packets
                    seconds = encode_s if link.sender else decode_s
                    seconds[report.replica, stage, op] += link.coded_bytes / link.packets / self.codec_speed
            for group in report.groups:
                seconds = tied_s if group.tied else method_s
                seconds[group.stage] = max(seconds[group.stage], group.coded_bytes / self.codec_speed)
                if not group.tied:
                    method = self.plan.replica_methods[group.stage]
                    size = whole_bytes(group.dense_bytes, self.plan.num_replicas) if group.num_rounds else 0.0
                    gradient_bytes[group.stage] = 0.0 if method.compresses else size
                    bucketed_bytes[group.stage] = size if method.by_bucket else 0.0
        frozen: dict[str, Any] = {
            name: np.broadcast_to(getattr(self._profile, name), shape) for name in ("compute_s", "cpu_s", "dense_bytes")
        }
        coded: dict[str, Any] = {"encode_s": encode_s, "decode_s": decode_s, "method_s": method_s}
        coded["update_s"] = self._profile.update_s + tied_s * self.plan.config.tied_gradient.compresses
        averaged: dict[str, Any] = {"gradient_bytes": gradient_bytes, "bucketed_bytes": bucketed_bytes}
        transfers = as_transfers(
            sorted(transfer for report in reports for group in report.groups for transfer in group.transfers)
        )
        profile = replace(self._profile, **frozen, **coded, **averaged, wire_bytes=wire_bytes, transfers=transfers)
        # The transport without this machine's calibration, so that decisions are the same everywhere.
        return profile.over(parse_transport(self.plan.config.transport), len(self.plan.rows) * self.plan.num_replicas)


def _codec_speed(plan: Plan, profile: Profile) -> float:
    """Return the codecs' dense bytes per second: as configured, else the device's, else that in the profile file."""
    config = plan.config
    if config.codec_speed is not None:
        return config.codec_speed
    device = DEVICES.get(config.profile or "")
    if device is not None:
        return device.codec_bytes_per_s
    if profile.codec_bytes_per_s:
        return profile.codec_bytes_per_s
    if plan.compresses or any(method.compresses for method in (*plan.replica_methods, config.tied_gradient)):
        raise ConfigError(
            f"`codec_speed` must be given, since the profile {config.profile!r} was recorded without compression: the dense bytes "
            "a second that codecs encode or decode."
        )
    return math.inf


def _frozen_profile(plan: Plan) -> Profile:
    """Return compute costs from a device's datasheet and counted operations, or from a file written by `raysim profile`."""
    config = plan.config
    source = config.profile
    if source is None:
        raise ConfigError(
            f"`profile` is needed with `clock` = {config.clock!r}: a device ({', '.join(DEVICES)}) or a file written by "
            "`raysim profile`."
        )
    if source in DEVICES:
        return datasheet_profile(config, source, plan.flops_forward, plan.weight_shares)
    if not is_file(source):
        raise ConfigError(
            f"`profile` must be a device ({', '.join(DEVICES)}) or a file written by `raysim profile`, but got {source!r}."
        )
    try:
        return recorded_profile(config, Profile.load(source), plan.boundaries)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def sensitivities(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return the sensitivities measured by stages in this step, by `link_name`."""
    return {
        link_name(report.replica, boundary, "forward"): measured
        for report in reports
        for boundary, measured in report.sensitivities.items()
    }
