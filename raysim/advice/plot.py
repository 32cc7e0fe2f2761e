"""A plot of utilisation over bandwidth."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raysim.advice.advise import Advice
from raysim.advice.bandwidth import LEVELS, free_s, steps_s
from raysim.network.topology import Network
from raysim.notation import InputError

MOST_LINES = 9
"""Ways that are drawn: one colour each."""
POINTS = 120


def draw(advice: Advice, path: Path) -> None:
    """Draw the ways that fit, dense first, over the bandwidths that the tables name; raises InputError without such a bandwidth."""
    if not advice.dense.needed:
        raise InputError("`--plot` draws over one bandwidth, but the network has several: give one such as 1gbps+20ms.")
    from matplotlib.figure import Figure

    rows = [row for row in advice.rows if row.fits or row is advice.dense]
    rows = sorted(rows, key=lambda row: (not row.way.dense, row.way.layout != advice.layout))[:MOST_LINES]
    ends = [level.bps for row in rows for level in (row.needed[0], row.needed[-1]) if np.isfinite(level.bps)]
    marked = [network.bandwidth_bps for network in advice.networks if isinstance(network.bandwidth_bps, float)]
    drawn = [bps for bps in marked if np.isfinite(bps)]
    template = advice.networks[0] if advice.networks else Network(1e9)
    bandwidths = np.geomspace(min([min(ends) / 10, *drawn]), max([max(ends), *drawn]), POINTS)
    networks = [Network(float(bps), template.latency_s, template.jitter_s, template.sharing) for bps in bandwidths]
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        shares = free_s(advice.job, row.way.layout) / steps_s(advice.job, row.way, networks)
        axes.plot(
            bandwidths / 1e9,
            100 * shares,
            label=f"{row.way.layout}: {row.way}",
            linewidth=2.4 if row is advice.dense else 1.3,
        )
    for level in LEVELS[1:3]:
        axes.axhline(100 * level, color="0.8", linewidth=0.8, zorder=0)
    for bps in drawn:
        axes.axvline(bps / 1e9, color="0.6", linestyle=":", zorder=0)
    axes.set_xscale("log")
    axes.set_ylim(0, 102)
    axes.set_xlabel("bandwidth between two hosts, Gbit/s")
    axes.set_ylabel("utilisation, %")
    axes.set_title(f"{advice.job.model.name} on {advice.job.fleet!r}")
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120, format="png")
