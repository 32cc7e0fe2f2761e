"""The step of each screened setting on networks, from measured compute and messages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from raysim.config import RunConfig
from raysim.config.identity import DENSE, Setting
from raysim.forecast.forecast import Forecast, forecast
from raysim.forecast.gains import recoded, silent
from raysim.forecast.link_costs import SEEDED, LinkCost, link_costs
from raysim.forecast.replica_costs import ReplicaCost
from raysim.network.collectives import as_transfers, whole_bytes
from raysim.network.presets import DEVICES
from raysim.network.profile import Profile
from raysim.network.topology import Network
from raysim.pipeline.groups import GroupAccount
from raysim.pipeline.plan import Plan
from raysim.probing.candidates import Measured
from raysim.probing.stopwatch import Seconds
from raysim.replication import parse_replica_method


class Prices:
    """Prices settings of a run with the compute of a datasheet or of a profile; raises ConfigError if they do not fit."""

    def __init__(
        self, config: RunConfig, plan: Plan, *, device: str | None, profile: str | Profile | None, transport: str
    ) -> None:
        self._plan = plan
        self.dense: Forecast = forecast(config, device=device, profile=profile, transport=transport)
        self.notes = [note.replace(SEEDED, "those of the screen's own tensors") for note in self.dense.notes]
        self._speed = None if device is None else DEVICES[device].codec_bytes_per_s

    def priced(self, setting: Setting, measured: Measured, accounts: Sequence[Sequence[GroupAccount]]) -> Forecast:
        """Return the forecast of a setting with its measured messages; `accounts`: by stage, the transfers of each replica."""
        dense = self.dense
        if setting == DENSE:
            return dense
        config = dense.config.changed(**setting.changes())
        links = [_as_sent(cost, measured) for cost in link_costs(config, self._plan.boundaries, self._speed, [])]
        costs = [self._cost(stage, setting.replica_gradient, each) for stage, each in enumerate(accounts)]
        return recoded(dense, config, links, costs)

    def shares(self, network: Network) -> dict[str, float]:
        """Return the share of the dense step that is saved if links, tied parameters or replicas sent nothing."""
        step_s = self.dense.step_s(network)
        return {name: 1 - plan.step_s(network) / step_s for name, plan in silent(self.dense).items()}

    def _cost(self, stage: int, method: str, accounts: Sequence[GroupAccount]) -> ReplicaCost:
        """Return the cost of a stage's measured average, by its slowest replica."""
        coded_bytes = max(account.coded_bytes for account in accounts)
        codec_s = max(account.codec_s for account in accounts)
        gradient_bytes = whole_bytes(accounts[0].dense_bytes, len(accounts))
        return ReplicaCost(
            stage=stage,
            method=method,
            part=0,
            dense_bytes=accounts[0].dense_bytes,
            wire_bytes=max(account.wire_bytes for account in accounts),
            rounds=accounts[0].num_rounds,
            method_s=codec_s if self._speed is None else coded_bytes / self._speed,
            coded_bytes=coded_bytes,
            transfers=as_transfers(transfer for account in accounts for transfer in account.transfers),
            bucketed_bytes=gradient_bytes if parse_replica_method(method).by_bucket else 0.0,
        )


def _as_sent(cost: LinkCost, measured: Measured) -> LinkCost:
    """Return the cost of a link with the mean bytes of its measured messages."""
    rows = [
        row
        for row in measured.links
        if (row.get("boundary"), row["direction"], row.get("tensor") or "")
        == (cost.boundary, cost.direction, cost.tensor)
    ]
    # Integers, a memory whose later messages differ, or gradients that were not measured.
    if not rows or cost.codec != rows[0]["codec"] or not rows[0]["packets"]:
        return cost
    return cost._replace(wire_bytes=round(rows[0]["wire_bytes"] / rows[0]["packets"]))


def measured_profile(plan: Plan, seconds: Mapping[tuple[int, str], Sequence[Seconds]]) -> Profile:
    """Return the profile of the screen's passes: the median of each stage's forwards and backwards."""
    shape = (1, plan.num_stages, 2, 1)
    wall, cpu = np.zeros(shape), np.zeros(shape)
    for (stage, op), spent in seconds.items():
        i = (0, stage, "FB".index(op), 0)
        wall[i] = statistics.median(each.wall for each in spent)
        cpu[i] = statistics.median(each.cpu for each in spent)
    config = plan.config
    profile = Profile(
        compute_s=wall,
        cpu_s=cpu,
        microbatch_samples=config.microbatch_size,
        source=f"median of the screen's passes here, {config.threads_per_stage} thread(s), without the optimiser's update",
    )
    return profile.split_backward(plan.weight_shares) if plan.weight_shares else profile
