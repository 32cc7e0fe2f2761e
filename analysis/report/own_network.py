"""Prices on the reader's typed network, interpolated by the page between simulated networks.

The seconds of a step are interpolated linearly in latency and in seconds a bit. If the schedule alone orders every wire, a step is
the longest of paths that are linear in both, so the interpolation is never below the simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysim.analysis.data.folders import over
from raysim.analysis.report.blocks import Block, Cell, Column, Heading, Nodes, Section, Table, Text, Typed
from raysim.analysis.report.gather import mean_price, prices_of
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.runs.prices import dense_partners
from raysim.analysis.runs.results import Results
from raysim.network.topology import Network
from raysim.records import FINISHED

BANDWIDTHS_BPS = (*(step * 10.0**decade for decade in range(6, 11) for step in (1, 2, 5)), 1e11)
LATENCIES_S = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
GRID = {
    repr(network): network
    for network in (Network(bandwidth, latency) for bandwidth in BANDWIDTHS_BPS for latency in LATENCIES_S)
}
COLUMNS = (
    Column("setting"),
    *(Column(name, number=True) for name in ("step", "speed-up", "on", "off")),
    Column("verdict"),
)


def own_network_section(material: Material) -> Section:
    """Return a table per job, to be priced on the page: the settings named in figures, and all safe settings."""
    key, title = "typed-network", "A network of your own"
    jobs = [job for job in material.jobs if job.priced]
    if not jobs:
        return Section(key, title, absent="No trained run here can be priced.", interactive=True)
    results, partners = finished_runs(material)
    blocks: list[Block] = [
        Text(
            "Type a bandwidth and a latency, such as `300mbps+8ms`, at the top of the page. Its prices are interpolated between "
            f"{len(GRID)} simulated networks, from 1 Mbit/s to 100 Gbit/s and up to 300 ms. For an exact simulation, "
            "and for other kinds of networks, pass the network or its file to `raysim report --network`."
        )
    ]
    for job in jobs:
        blocks += [Heading(job.title)] if len(jobs) > 1 else []
        blocks.append(_table(job, material, results, partners))
    return Section(key, title, blocks, interactive=True)


def _table(job: Job, material: Material, results: Results, partners: Mapping[str, str]) -> Table:
    named = [setting for setting in job.named if setting.step_s]  # dense first
    settings = [*named, *(setting for setting in job.priced if setting.verdict == "safe" and setting not in named)]
    rows = []
    for setting in settings:
        nodes = nodes_of(setting, material, results, partners)
        rows.append(
            [
                Cell(setting.name, code=True),
                Cell(Typed(nodes, "step")),
                Cell("1" if setting.dense else Typed(nodes, "speedup") if nodes.speedup else "unknown"),
                *(Cell(job.metric.write(*setting.quality[mode][:2])) for mode in ("on", "off")),
                Cell(setting.verdict or ("baseline" if setting.dense else "no dense run")),
            ]
        )
    return Table(
        f"{job.key}-typed",
        f"The settings of {job.title} that are named in figures, and all safe settings, on the typed network "
        f"{over(job.transport)}. Step times and speed-ups over dense have 90 % intervals in brackets. Compute: {job.source}.",
        COLUMNS,
        rows,
        typed=True,
    )


def nodes_of(setting: SettingRuns, material: Material, results: Results, partners: Mapping[str, str]) -> Nodes:
    """Return the prices of a setting on all networks of `GRID`, in their order."""
    prices = prices_of(results, partners, GRID, material.options, setting.runs)
    price = mean_price(list(prices.values()), GRID)
    return Nodes(*(_listed(values) for values in price))


def finished_runs(material: Material) -> tuple[Results, dict[str, str]]:
    """Return the finished runs of a report, and the dense run to compare each with."""
    results = material.results.select(material.results.runs["status"].isin(FINISHED))
    return results, dense_partners(results)


def _listed(values: Mapping[str, Any]) -> list[Any]:
    """Return values in the order of the grid."""
    return [values[network] for network in GRID] if values else []
