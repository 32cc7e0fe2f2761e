"""Networks as people describe them: sites with hosts, and links between sites.

    [sites.home]
    hosts = 2
    bandwidth = "1gbps"     # between hosts of the site; without it nothing limits them
    latency = "0.2ms"       # one way, as everywhere

    [sites.lab]
    hosts = 4
    bandwidth = "10gbps"

    [[links]]
    between = ["home", "lab"]
    bandwidth = "100mbps"
    latency = "20ms"

Workers are placed on the hosts in the order of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from raysim.network.topology import Network, read_notation
from raysim.notation import check_integer

SITE_KEYS = ("hosts", "bandwidth", "latency")
LINK_KEYS = ("between", "bandwidth", "latency")


def network_of_sites(content: Mapping[str, Any], name: str) -> Network:
    """Return the network of a file with `sites`; raises ValueError naming the site or the link that is wrong."""
    unknown = sorted(set(content) - {"sites", "links", "sharing"})
    if unknown:
        raise ValueError(f"Unknown field `{unknown[0]}` in a file with sites. Known: sites, links, sharing.")
    sites, links = content["sites"], content.get("links", [])
    if not isinstance(sites, dict) or not all(isinstance(site, dict) for site in sites.values()):
        raise ValueError("`sites` must be tables, such as [sites.home].")
    if not isinstance(links, list) or not all(isinstance(link, dict) for link in links):
        raise ValueError("`links` must be tables, each under [[links]].")
    roads: dict[frozenset[str], tuple[float, float]] = {}
    hosts: list[str] = []
    names: list[str] = []
    for site, values in sites.items():
        _check_keys(f"sites.{site}", values, SITE_KEYS)
        count = check_integer(f"sites.{site}.hosts", values.get("hosts", 1), 1)
        hosts += [site] * count
        names += [f"{site}-{number}" for number in range(count)]
        roads[frozenset([site])] = _road(f"sites.{site}", values)
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
        if frozenset(ends) in roads:
            raise ValueError(f"A link must be given once, but got {ends[0]} and {ends[1]} twice.")
        if "bandwidth" not in values:
            raise ValueError(f'`{where}.bandwidth` must be given, such as "100mbps".')
        roads[frozenset(ends)] = _road(where, values)
    for one, other in combinations(sites, 2):
        if frozenset([one, other]) not in roads:
            raise ValueError(f"`links` must hold one between {one} and {other}, but there is none.")
    if len(hosts) < 2:
        raise ValueError(f"`sites` must have two hosts or more, but got {len(hosts)}.")
    matrix = [[roads[frozenset([a, b])] for b in hosts] for a in hosts]
    return Network(
        tuple(tuple(bandwidth for bandwidth, _ in row) for row in matrix),
        tuple(tuple(latency for _, latency in row) for row in matrix),
        sharing=content.get("sharing", "pair"),
        host_names=tuple(names),
        host_sites=tuple(hosts),
        name=name,
    )


def _check_keys(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"Unknown field `{where}.{unknown[0]}`. Known: {', '.join(known)}.")


def _road(where: str, values: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bandwidth and the latency that a table writes as texts such as "100mbps" and "20ms"."""
    found = [math.inf, 0.0]
    for place, (key, prefix) in enumerate((("bandwidth", ""), ("latency", "free+"))):
        if key not in values:
            continue
        network = read_notation(f"{prefix}{values[key]}") if isinstance(values[key], str) else None
        plain = network is not None and not network.jitter_s and network.sharing == "pair"
        if network is None or not plain or (key == "bandwidth" and network.latency_s):
            example = "100mbps" if key == "bandwidth" else "20ms"
            raise ValueError(f"`{where}.{key}` must be a text such as {example!r}, but got {values[key]!r}.")
        value = (network.bandwidth_bps, network.latency_s)[place]
        assert isinstance(value, float)
        found[place] = value
    return found[0], found[1]
