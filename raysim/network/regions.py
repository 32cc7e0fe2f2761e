"""Measured links between cloud regions, by direction, in regions.csv.

Bandwidth is what iperf3 received over 64 connections from one virtual machine to another (m5.8xlarge, Standard_D32_v5,
n2-standard-32) on 2022-01-29; latency is half of the mean round trip of pings in April 2022. From the profiles of Skyplane (Jain et
al. 2023, NSDI; skyplane-project/skyplane at 87e32de8 and 945dca27, Apache-2.0), premium tier; pairs measured twice are averaged.
"""

from __future__ import annotations

import csv
import functools
from importlib import resources

Road = tuple[float, float]
"""Bandwidth in bit/s and latency in seconds, one way."""
CLOUDS = ("aws", "azure", "gcp", "clouds")


@functools.cache
def region_links() -> dict[tuple[str, str], Road]:
    """Return the link from each region to every other.

    >>> region_links()["aws:us-east-1", "aws:eu-west-1"]
    (4318000000.0, 0.04245)
    """
    text = resources.files("raysim.network").joinpath("regions.csv").read_text(encoding="utf-8")
    links = {}
    for row in csv.DictReader(text.splitlines()):
        source = row.pop("region")
        for target, cell in row.items():
            if cell:
                mbps, round_trip_ms = map(float, cell.split("/"))
                links[source, target] = (mbps * 1e6, round_trip_ms / 2e3)
    return links


def regions_of(cloud: str) -> tuple[str, ...]:
    """Return the measured regions of a cloud, or of all for "clouds"."""
    regions = dict.fromkeys(source for source, _ in region_links())
    return tuple(region for region in regions if cloud in ("clouds", region.partition(":")[0]))
