"""Budgets of links: the driver works out each link's floor of fidelity from the reports of the step before."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.compressors.controller import Way, floors
from raysim.config import ConfigError
from raysim.network.topology import Network, Placement
from raysim.pipeline.link import LinkAccount
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import StepReport, link_name

DIRECTIONS = ("forward", "backward")
EVEN = Network(bandwidth_bps=1e9)  # for a run without a known network: seconds in proportion to bytes


class Budgets:
    """Shares out the budgets of a run's links: one a direction and replica.

    `network`: the network between the workers, which are spread over its hosts in order. None if it is not known: then the
    seconds of a message are in proportion to its bytes. Raises ConfigError if links of one direction name several budgets.
    """

    def __init__(self, plan: Plan, network: Network | None) -> None:
        self.plan = plan
        self._budgets = {direction: _budget(plan, direction) for direction in DIRECTIONS}
        self._network = network or EVEN
        self._hosts = Placement.spread(plan.num_replicas * len(plan.rows), self._network.num_hosts).hosts

    def floors(self, reports: Sequence[StepReport]) -> dict[str, float]:
        """Return the fidelity that each link on a budget must keep after a step of these reports, by `link_name`."""
        found: dict[str, float] = {}
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
                ways = {
                    link_name(replica, one.boundary, direction, one.tensor): self._ways(replica, one)
                    for one in accounts
                }
                found |= floors(ways, budget)
        return found

    def _ways(self, replica: int, account: LinkAccount) -> list[Way]:
        """Return the ways in which a link could send its messages, each with its seconds on the wire."""
        ends = account.boundary, account.boundary + 1
        first = replica * len(self.plan.rows)
        here, there = (self._hosts[first + self.plan.owners[stage]] for stage in ends)
        if account.direction == "backward":
            here, there = there, here
        dense_bytes = account.dense_bytes / account.packets
        offers = [(1.0, 1.0), *account.decisions[-1].offers]
        return [Way(fidelity, self._network.p2p_s(here, there, dense_bytes / factor)) for fidelity, factor in offers]


def sensitivities(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return the sensitivities that stages measured in a step of these reports, by `link_name`."""
    return {
        link_name(report.replica, boundary, "forward"): measured
        for report in reports
        for boundary, measured in report.sensitivities.items()
    }


def _budget(plan: Plan, direction: str) -> float | None:
    """Return the common budget of the links of a direction, None if they have none."""
    pairs = [pair for links in plan.compressors for each in links for pair in each.values()]
    methods = [pair[DIRECTIONS.index(direction)] for pair in pairs]
    budgets = {method.shared_budget for method in methods if method.shared_budget is not None}
    if len(budgets) > 1:
        named = " and ".join(f"{budget:g}" for budget in sorted(budgets))
        raise ConfigError(f"`{direction}` must give its links one `budget`, which they share, but got {named}.")
    return next(iter(budgets), None)
