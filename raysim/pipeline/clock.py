"""What adaptive methods know of time: what the last step took here, or what it would have taken on a named network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim.config import ConfigError
from raysim.network.devices import DEVICES
from raysim.network.exchange import tied_s
from raysim.network.network import Network
from raysim.network.placement import Placement
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.simulate import simulate
from raysim.network.table import make_table
from raysim.network.transport import parse_transport
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import StepReport

EFFICIENCY = 0.4  # of a datasheet's peak, as `raysim simulate` assumes


class Clock:
    """Says what a step took. Simulated, it depends on packets alone: compute is of a frozen profile, so that runs repeat.

    Raises ConfigError where there is no such profile, or it is of another pipeline.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network = None if plan.config.clock == "measured" else parse_network(plan.config.clock)
        if self.network is not None:
            self._profile = _frozen_profile(plan)

    def step_s(self, reports: Sequence[StepReport], seconds: float) -> float:
        """Return the seconds of a step that took `seconds` here: these, or those of its packets on the network.

        The packets of a link are taken as alike within a step. Time that codecs take is the frozen profile's, if it has any.
        """
        if self.network is None:
            return seconds
        plan = self.plan
        replicas, stages = plan.num_replicas, plan.num_stages
        wire_bytes = np.zeros((replicas, stages, self._profile.compute_s.shape[2], 1))
        sent_bytes, rounds = np.zeros(stages), np.zeros(stages)
        for report in reports:
            for link in report.links:
                if link.sender and link.packets:
                    forward = link.direction == "forward"
                    source = link.boundary if forward else link.boundary + 1
                    wire_bytes[report.replica, source, 0 if forward else 1] = link.wire_bytes / link.packets
            for group in report.groups:
                if not group.tied:
                    sent_bytes[group.stage] = max(sent_bytes[group.stage], group.wire_bytes)
                    rounds[group.stage] = max(rounds[group.stage], group.num_rounds)
        frozen: dict[str, Any] = {
            name: np.broadcast_to(getattr(self._profile, name), wire_bytes.shape)
            for name in ("compute_s", "cpu_s", "encode_s", "decode_s", "dense_bytes")
        }
        frozen["transport"] = parse_transport(plan.config.transport)
        profile = replace(self._profile, **frozen, wire_bytes=wire_bytes, sent_bytes=sent_bytes, rounds=rounds)
        timeline = simulate(
            plan.config.parsed_schedule,
            profile,
            self.network,
            num_microbatches=plan.config.num_microbatches,
            num_replicas=replicas,
        )
        return timeline.step_s + self._tied_s(self.network, reports)

    def _tied_s(self, network: Network, reports: Sequence[StepReport]) -> float:
        """Return the seconds in which owners of tied parameters sum their gradients, one parameter after the other."""
        plan = self.plan
        hosts = Placement.spread(plan.num_replicas * len(plan.rows), network.num_hosts).hosts
        total, fused = 0.0, plan.config.fused_embedding
        for place in range(len(plan.tied)):
            stages = [stage for stage, _ in plan.tied[place]]
            accounts = [group for report in reports for group in report.groups if group.tied and group.stage in stages]
            sent, rounds = max(one.wire_bytes for one in accounts), max(one.num_rounds for one in accounts)
            owners = [plan.owners[stage] for stage in stages]
            total += tied_s(network, hosts, plan.num_replicas, owners, sent, rounds, fused=fused)
        return total


def _frozen_profile(plan: Plan) -> Profile:
    """Return what compute costs: of a device's datasheet and counted operations, or of a file of `raysim profile`."""
    config = plan.config
    source = config.profile
    if source is None:
        raise ConfigError(
            f"`profile` is needed with `clock` = {config.clock!r}: a device ({', '.join(DEVICES)}) or a file of `raysim profile`."
        )
    if source in DEVICES:
        profile = Profile.analytic(
            plan.flops_forward,
            device=source,
            efficiency=EFFICIENCY,
            wire_bytes=0.0,
            backward_factor=3.0 if config.recompute else 2.0,
        )
    elif not Path(source).is_file():
        raise ConfigError(
            f"`profile` must be a device ({', '.join(DEVICES)}) or a file of `raysim profile`, but got {source!r}."
        )
    else:
        try:
            profile = Profile.load(source).mean_microbatch()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if profile.num_stages != plan.num_stages or profile.num_replicas != 1 or profile.compute_s.shape[2] != 2:
            raise ConfigError(
                f"`profile` must hold forwards and joint backwards of one replica of {plan.num_stages} stages, "
                f"but {source!r} holds others."
            )
    table = make_table(config.parsed_schedule, plan.num_stages, config.num_microbatches)
    return profile.split_backward() if int(table.op.max()) == 2 else profile
