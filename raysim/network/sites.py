"""Networks of sites: hosts with equal links within a site, and links between sites, given or measured between cloud regions.

The measured links are in regions.csv, by direction. Bandwidth is what iperf3 received over 64 connections from one virtual machine to
another (m5.8xlarge, Standard_D32_v5, n2-standard-32) on 2022-01-29; latency is half of the mean round trip of pings in April 2022. From
the profiles of Skyplane (Jain et al. 2023, NSDI; skyplane-project/skyplane at 87e32de8 and 945dca27, Apache-2.0), premium tier; pairs
measured twice are averaged.

The links of homes are in homes.csv: percentiles of one-connection downloads, uploads and least round trips to a near server, over all
tests of M-Lab's NDT of October 2025, in countries with a million tests each way (m-lab/iqb at dbd7401d, Apache-2.0). At `p10` nine
tests in ten are better. A file of sites:

[sites.home]
hosts = 4
home = "us:p25"

[sites.cloud]
hosts = 2
bandwidth = "10gbps"
region = "aws:us-east-1"

[[links]]
between = ["home", "cloud"]
bandwidth = "200mbps"
latency = "20ms"
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

from raysim.network.notation import read_window
from raysim.network.topology import Network, read_notation
from raysim.notation import check_integer, shown

Road = tuple[float, float]
"""Bandwidth in bit/s and latency in seconds, one way."""
CLOUDS = ("aws", "azure", "gcp", "clouds")


@functools.cache
def read_links(name: str = "regions.csv") -> dict[tuple[str, str], Road]:
    """Return the link from each region to every other, from a file of Mbit/s and round-trip milliseconds.

    >>> read_links()["aws:us-east-1", "aws:eu-west-1"]
    (4318000000.0, 0.04245)
    """
    text = resources.files("raysim.network").joinpath(name).read_text(encoding="utf-8")
    links = {}
    for row in csv.DictReader(text.splitlines()):
        source = row.pop("region")
        for target, cell in row.items():
            if cell:
                mbps, round_trip_ms = map(float, cell.split("/"))
                links[source, target] = (mbps * 1e6, round_trip_ms / 2e3)
    return links


class Home(NamedTuple):
    """The link of a home."""

    download_bps: float
    upload_bps: float
    latency_s: float
    """One way, to a near server."""


@functools.cache
def read_homes() -> dict[str, Home]:
    """Return the links of homes by country and percentile.

    >>> read_homes()["us:p50"]
    Home(download_bps=121100000.0, upload_bps=28990000.0, latency_s=0.007485)
    """
    text = resources.files("raysim.network").joinpath("homes.csv").read_text(encoding="utf-8")
    homes = {}
    for row in csv.DictReader(text.splitlines()):
        country = row.pop("country")
        for percentile, cell in row.items():
            download, upload, round_trip_ms = map(float, cell.split("/"))
            homes[f"{country}:{percentile}"] = Home(download * 1e6, upload * 1e6, round_trip_ms / 2e3)
    return homes


def regions_of(cloud: str) -> tuple[str, ...]:
    """Return the measured regions of a cloud, or of all for "clouds"."""
    regions = dict.fromkeys(source for source, _ in read_links())
    return tuple(region for region in regions if cloud in ("clouds", region.partition(":")[0]))


def check_region(region: object, rule: str) -> None:
    """Raise ValueError with the rule and the nearest names unless the region was measured."""
    if region not in regions_of("clouds"):
        close = get_close_matches(str(region), regions_of("clouds"), 3, 0.5) or ["aws:us-east-1"]
        raise ValueError(f"{rule}, such as {', '.join(close)}, but got {shown(region)}.")


def matrix_network(matrix: Sequence[Sequence[tuple[float, float]]], **rest: Any) -> Network:
    """Return the network of a (bandwidth, latency) matrix by source and target."""
    bandwidth, latency = (tuple(tuple(link[i] for link in row) for row in matrix) for i in (0, 1))
    return Network(bandwidth, latency, **rest)


SITES_FIELDS = ("sites", "links", "sharing", "window")
SITE_KEYS = ("hosts", "bandwidth", "latency", "upload", "region", "home")
OF_HOME = ("bandwidth", "latency", "upload", "region")
"""Keys that `home` replaces."""
LINK_KEYS = ("between", "bandwidth", "latency")


def network_of_sites(content: Mapping[str, Any], name: str) -> Network:
    """Return the network of a file with `sites`; raises ValueError naming the invalid site or link."""
    unknown = sorted(set(content) - set(SITES_FIELDS))
    if unknown:
        raise ValueError(f"Unknown field `{unknown[0]}` in a file with sites. Known: {', '.join(SITES_FIELDS)}.")
    sites, links = content["sites"], content.get("links", [])
    if not isinstance(sites, dict) or not all(isinstance(site, dict) for site in sites.values()):
        raise ValueError("`sites` must be tables, such as [sites.home].")
    if not isinstance(links, list) or not all(isinstance(link, dict) for link in links):
        raise ValueError("`links` must be tables, each under [[links]].")
    roads: dict[tuple[str, str], Road] = {}
    hosts: list[str] = []
    names: list[str] = []
    for site, values in sites.items():
        _check_keys(f"sites.{site}", values, SITE_KEYS)
        count = check_integer(f"sites.{site}.hosts", values.get("hosts", 1), 1)
        hosts += [site] * count
        names += [f"{site}-{number}" for number in range(count)]
        if idle := [key for key in ("bandwidth", "latency") if count == 1 and key in values]:
            raise ValueError(
                f"`sites.{site}.{idle[0]}` is that between hosts of the site, which has one. Use `upload`, or the site's `links`."
            )
        roads[site, site] = _road(f"sites.{site}", values)
    homes = {site: _home(f"sites.{site}", values) for site, values in sites.items() if "home" in values}
    between_homes = {
        (site, other): (math.inf, homes[site].latency_s + homes[other].latency_s)
        for site, other in product(homes, repeat=2)
        if _country(sites[site]) == _country(sites[other])
    }
    roads |= between_homes | _measured(sites) | _given(sites, links)
    for site, other in combinations(sites, 2):
        if (site, other) not in roads:
            raise ValueError(f"`links` must hold one between {site} and {other}, but there is none.")
    uploads = {site: _bandwidth(f"sites.{site}.upload", values.get("upload")) for site, values in sites.items()}
    uploads |= {site: home.upload_bps for site, home in homes.items()}
    downloads = {site: home.download_bps for site, home in homes.items()}
    roads = {
        (site, other): (min(bps, uploads[site], downloads.get(other, math.inf)), latency)
        for (site, other), (bps, latency) in roads.items()
    }
    if len(hosts) < 2:
        raise ValueError(f"`sites` must have at least two hosts, but got {len(hosts)}.")
    matrix = [[roads[a, b] for b in hosts] for a in hosts]
    return matrix_network(
        matrix,
        sharing=content.get("sharing", "pair"),
        **_window(content["window"]) if "window" in content else {},
        host_sites=tuple(hosts),
        host_names=tuple(names),
        name=name,
    )


def _given(sites: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Road]:
    """Return the links of a file, both ways."""
    roads: dict[tuple[str, str], Road] = {}
    for number, values in enumerate(links):
        where = f"links[{number}]"
        _check_keys(where, values, LINK_KEYS)
        ends = values.get("between")
        if not isinstance(ends, list) or len(ends) != 2 or len(set(map(str, ends))) != 2:
            raise ValueError(f"`{where}.between` must name two sites, but got {ends!r}.")
        missing = [end for end in ends if end not in sites]
        if missing:
            raise ValueError(
                f"`{where}.between` must name sites of the file ({', '.join(sites)}), but got {missing[0]!r}."
            )
        if (ends[0], ends[1]) in roads:
            raise ValueError(f"A link must be given once, but got {ends[0]} and {ends[1]} twice.")
        if "bandwidth" not in values:
            raise ValueError(f'`{where}.bandwidth` must be given, such as "100mbps".')
        roads[ends[0], ends[1]] = roads[ends[1], ends[0]] = _road(where, values)
    return roads


def _measured(sites: Mapping[str, Any]) -> dict[tuple[str, str], Road]:
    """Return the measured links between sites in different cloud regions."""
    placed = {site: values["region"] for site, values in sites.items() if "region" in values}
    for site, region in placed.items():
        check_region(region, f"`sites.{site}.region` must be a measured region")
    return {
        (site, other): read_links()[placed[site], placed[other]]
        for site, other in permutations(placed, 2)
        if placed[site] != placed[other]
    }


def _home(where: str, values: Mapping[str, Any]) -> Home:
    """Return the measured link of a site's `home`."""
    if given := [key for key in OF_HOME if key in values]:
        raise ValueError(f"`{where}.home` has bandwidths and a latency of its own: leave out `{given[0]}`.")
    homes, name = read_homes(), values["home"]
    if not isinstance(name, str) or name not in homes:
        countries = ", ".join(dict.fromkeys(each.partition(":")[0] for each in homes))
        raise ValueError(
            f"`{where}.home` must be a country ({countries}) and a percentile of p10, p25, p50, p75 and p90, such as us:p25, "
            f"but got {shown(name)}."
        )
    return homes[name]


def _country(values: Mapping[str, Any]) -> str:
    return str(values["home"]).partition(":")[0]


def _window(text: object) -> dict[str, Any]:
    window = read_window(text) if isinstance(text, str) else None
    if window is None:
        raise ValueError(f'`window` must be bytes, such as "4MiB", or "2x4MiB" for two streams, but got {text!r}.')
    return window


def _check_keys(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"Unknown field `{where}.{unknown[0]}`. Known: {', '.join(known)}.")


def _road(where: str, values: Mapping[str, Any]) -> Road:
    """Parse a table's bandwidth and latency, written as "100mbps" and "20ms"."""
    bandwidth, latency = values.get("bandwidth"), values.get("latency")
    network = read_notation(f"free+{latency}") if isinstance(latency, str) else None
    if latency is not None and (network is None or not _is_plain(network)):
        raise ValueError(f"`{where}.latency` must be a text such as '20ms', but got {latency!r}.")
    return _bandwidth(f"{where}.bandwidth", bandwidth), 0.0 if network is None else float(network.latencies_s(0, 1))


def _bandwidth(where: str, text: object) -> float:
    """Parse a bandwidth, written as "100mbps"; infinite if None."""
    if text is None:
        return math.inf
    network = read_notation(text) if isinstance(text, str) else None
    if network is None or not _is_plain(network) or network.latency_s:
        raise ValueError(f"`{where}` must be a text such as '100mbps', but got {text!r}.")
    return network.slowest_bps


def _is_plain(network: Network) -> bool:
    return not network.jitter_s and network.sharing == "pair"
