"""Signals of the last step for adaptive methods: step time (measured or simulated), fidelity floors, sensitivities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raysim.compressors.controller import Way, floors
from raysim.config import ConfigError
from raysim.forecast.compute import datasheet_profile, recorded_profile
from raysim.network.collectives import as_transfers, whole_bytes
from raysim.network.presets import DEVICES, parse_network
from raysim.network.prices import after_pipelines, overlapped, without_exchange
from raysim.network.profile import Profile
from raysim.network.simulate import simulate
from raysim.network.topology import Network, Placement
from raysim.network.transport import parse_transport
from raysim.pipeline.link import DIRECTIONS, LinkAccount
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
        """Return the seconds of a step: the measured `seconds`, or those of its simulation on the network.

        The simulation assumes equal packets on a link within a step, and codecs at `codec_speed`.
        """
        network = self.network
        if network is None:
            return seconds
        profile = self.profile(reports)
        if self.plan.config.exchange_delay:
            profile = after_pipelines(profile)
        quiet, instant, config = without_exchange(profile), network.without_latency, self.plan.config

        def simulated_s(exchanging: bool, latent: bool) -> float:
            return simulate(
                config.executed_schedule,
                profile if exchanging else quiet,
                network if latent else instant,
                num_microbatches=config.num_microbatches,
                num_replicas=config.num_replicas,
            ).step_s

        method_s = float(profile.method_s.max())
        return overlapped(simulated_s, method_s, config.exchange_delay, config.exchange_interval)

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
    """Return compute costs from a device's datasheet and counted operations, or from a file of `raysim profile`."""
    config = plan.config
    source = config.profile
    if source is None:
        raise ConfigError(
            f"`profile` is needed with `clock` = {config.clock!r}: a device ({', '.join(DEVICES)}) or a file of `raysim profile`."
        )
    if source in DEVICES:
        return datasheet_profile(config, source, plan.flops_forward, plan.weight_shares)
    if not is_file(source):
        raise ConfigError(
            f"`profile` must be a device ({', '.join(DEVICES)}) or a file of `raysim profile`, but got {source!r}."
        )
    try:
        return recorded_profile(config, Profile.load(source), plan.num_stages)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


EVEN = Network(bandwidth_bps=1e9)  # for a run without a known network: seconds proportional to bytes


class Budgets:
    """Divides the budgets of a run among its links, one budget per direction and replica.

    `network`: the network between the workers, which are spread over its hosts in order. None if unknown: then the
    seconds of a message are proportional to its bytes. Raises ConfigError if links of one direction name different budgets.
    """

    def __init__(self, plan: Plan, network: Network | None) -> None:
        self.plan = plan
        self._budgets = {direction: _budget(plan, direction) for direction in DIRECTIONS}
        self._network = network or EVEN
        self._hosts = Placement.spread(plan.num_replicas * len(plan.rows), self._network.num_hosts).hosts

    def floors(self, reports: Sequence[StepReport]) -> dict[str, float]:
        """Return the fidelity that each link with a budget must keep after this step, by `link_name`."""
        of_links: dict[str, float] = {}
        for direction, budget in self._budgets.items():
            if budget is None:
                continue
            for replica in range(self.plan.num_replicas):
                accounts = [
                    account
                    for report in reports
                    if report.replica == replica
                    for account in report.links
                    if account.direction == direction and any(decision.offers for decision in account.decisions)
                ]
                accounts.sort(key=lambda account: (account.boundary, account.tensor))
                names = [link_name(replica, account.boundary, direction, account.tensor) for account in accounts]
                ways = [self._ways(replica, account) for account in accounts]
                of_links |= floors(dict(zip(names, ways, strict=True)), budget)
        return of_links

    def _ways(self, replica: int, account: LinkAccount) -> list[Way]:
        """Return a link's options for sending its messages, each with its network seconds."""
        ends = account.boundary, account.boundary + 1
        first = replica * len(self.plan.rows)
        source, target = (self._hosts[first + self.plan.owners[stage]] for stage in ends)
        if account.direction == "backward":
            source, target = target, source
        dense_bytes = account.dense_bytes / account.packets
        offers = [(1.0, 1.0), *account.decisions[-1].offers]
        return [Way(fidelity, self._network.p2p_s(source, target, dense_bytes / factor)) for fidelity, factor in offers]


def sensitivities(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return the sensitivities measured by stages in this step, by `link_name`."""
    return {
        link_name(report.replica, boundary, "forward"): measured
        for report in reports
        for boundary, measured in report.sensitivities.items()
    }


def _budget(plan: Plan, direction: str) -> float | None:
    """Return the common budget of the links of a direction, or None if they have none."""
    pairs = [pair for replica in plan.compressors for link in replica for pair in link.values()]
    methods = [pair[DIRECTIONS.index(direction)] for pair in pairs]
    budgets = {method.shared_budget for method in methods if method.shared_budget is not None}
    if len(budgets) > 1:
        named = " and ".join(f"{budget:g}" for budget in sorted(budgets))
        raise ConfigError(f"`{direction}` must give its links one `budget`, which they share, but got {named}.")
    return next(iter(budgets), None)
