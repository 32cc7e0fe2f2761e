"""Named networks, networks from files, the parser of `--network`, and GPUs by their datasheets."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from raysim.network.notation import read_window
from raysim.network.sites import CLOUDS, Road, check_region, matrix_network, network_of_sites, read_links, regions_of
from raysim.network.topology import Network, read_notation
from raysim.notation import shown
from raysim.storage.files import read_text
from raysim.storage.texts import parse_toml

LEVELS = ("8mbps", "80mbps", "100mbps", "200mbps", "500mbps", "1gbps", "10gbps", "25gbps", "100gbps")
"""Bandwidths quoted in papers, without latency; add one as in `200mbps+50ms`."""

ONE_SLOW: dict[str, Any] = {  # two replicas of two stages; the second replica has a slow link between its stages
    "sites": {"fast": {"hosts": 2, "bandwidth": "1gbps"}, "slow": {"hosts": 2, "bandwidth": "20mbps"}},
    "links": [{"between": ["fast", "slow"], "bandwidth": "100mbps", "latency": "20ms"}],
}


def _regions(name: str, sizes: Sequence[int], inside: Road, across: Road | None = None) -> Network:
    """Return one of DT-FM's cases: hosts grouped in regions; links `across` two of them are by default those of dt-fm.csv.

    Yuan et al. 2022 (2206.01288; `scheduler/generate_sim_com_matrices.py`, MIT). Milliseconds are taken as one-way latencies, as in
    their cost model, although they look like public round-trip times; kept for comparability.
    """
    links = read_links("dt-fm.csv")
    cities = [*dict.fromkeys(city for city, _ in links if city.startswith(f"{name}:"))]
    region = [index for index, size in enumerate(sizes) for _ in range(size)]
    matrix = [[inside if a == b else across or links[cities[a], cities[b]] for b in region] for a in region]
    return matrix_network(matrix, host_sites=tuple(f"{name}-{index}" for index in region), name=name)


def _of_regions(regions: Sequence[str], name: str) -> Network:
    """Return a host in each of these cloud regions, with their measured links."""
    links = read_links()
    matrix = [[links.get((a, b), (math.inf, 0.0)) for b in regions] for a in regions]
    return matrix_network(matrix, host_sites=tuple(regions), host_names=tuple(regions), name=name)


@functools.cache
def presets() -> dict[str, Network]:
    """Return the named networks: the levels, `free`, DT-FM's cases 1 to 5 of 64 hosts each, `one-slow-replica`, and clouds.

    `aws`, `azure` and `gcp` have a host in each measured region of the cloud, `clouds` in all, see `raysim.network.sites`.

    >>> presets()["worldwide"].notation()
    '<64 hosts, 335mbps to 2gbps, 10ms to 238ms>'
    """
    named = [
        _regions("data-centre", [8] * 8, (100e9, 0.0), (3.125e9, 0.0)),
        _regions("spot", [4] * 8 + [1] * 32, (100e9, 0.0), (1.25e9, 0.0)),
        _regions("two-universities", [32] * 2, (5e9, 0.001), (1.12e9, 0.011)),
        _regions("four-regions", [16] * 4, (2e9, 0.01)),
        _regions("worldwide", [8] * 8, (2e9, 0.01)),
        *(_of_regions(regions_of(cloud), cloud) for cloud in CLOUDS),
    ]
    levels = {level: network for level in (*LEVELS, "free") if (network := read_notation(level)) is not None}
    return levels | {network.name: network for network in [*named, network_of_sites(ONE_SLOW, "one-slow-replica")]}


def parse_network(text: str) -> Network:
    """Parse a network: a preset, a notation such as "100mbps+20ms", cloud regions separated by commas, or a .toml or .csv file.

    A network without a TCP window may end in one.

    >>> parse_network("100mbps+20ms").latency_s, parse_network("1 Gbit/s + 20 ms"), parse_network("1gbps+50ms/2x4MB")
    (0.02, 1gbps+20ms, 1gbps+50ms/2x4MB)
    >>> parse_network("aws:us-east-1,gcp:us-west1").notation()
    '<2 hosts, 4.417gbps to 5.96gbps, 31.5ms to 31.55ms>'
    """
    name = text.strip()
    wires, slash, last = name.rpartition("/")
    if slash and (window := read_window(last)) is not None:
        plain = parse_network(wires)
        if plain.window_bytes is not None:
            raise ValueError(f"{wires} has a TCP window of its own, but got another, {last}: leave one of them out.")
        return replace(plain, name=f"{plain.name}/{last}" if plain.name else "", **window)
    if name in presets():
        return presets()[name]
    network = read_notation(name)
    if network is not None:
        return network
    regions = [part.strip() for part in name.split(",")]
    if any(region.startswith(tuple(f"{cloud}:" for cloud in CLOUDS)) for region in regions):
        for region in regions:
            check_region(region, "A network of cloud regions must name measured regions")
        if len(set(regions)) < max(len(regions), 2):
            raise ValueError(f"A network of cloud regions must name two or more different ones, but got {shown(text)}.")
        return _of_regions(regions, name)
    if Path(name).suffix in (".toml", ".csv"):
        return load_network(Path(name))
    known = ", ".join(presets())
    raise ValueError(
        f"A network is a preset, text such as '100mbps+20ms', or a .toml or .csv file, but got {shown(text)}. Known: {known}."
    )


def parse_bandwidths(text: str) -> list[Network]:
    """Parse a range of bandwidths into networks in steps of 1, 2, 5; other properties are the highest one's.

    >>> parse_bandwidths("10mbps..100mbps+20ms")
    [10mbps+20ms, 20mbps+20ms, 50mbps+20ms, 100mbps+20ms]
    """
    networks = [read_notation(end) for end in text.split("..")]
    ends = [end.bandwidth_bps for end in networks if end is not None and isinstance(end.bandwidth_bps, float)]
    if len(networks) != 2 or len(ends) != 2 or not ends[0] < ends[1] < math.inf:
        raise ValueError(
            f"A range of bandwidths must look like 10mbps..10gbps, or 10mbps..10gbps+20ms, but got {text!r}."
        )
    (lowest, highest), (low, high) = ends, networks
    assert high is not None
    if low not in (Network(lowest), replace(high, bandwidth_bps=lowest)):
        raise ValueError(
            f"A range of bandwidths has one latency, written at its end: 10mbps..10gbps+20ms, but got {text!r}."
        )
    decades = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    between = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    inside = sorted({lowest, highest, *(bps for bps in between if lowest < bps < highest)})
    return [replace(high, bandwidth_bps=bps, name="") for bps in inside]


def load_network(path: Path) -> Network:
    """Read a network from a file; raises ValueError naming the file and the error.

    TOML has sites and the links between them, see `raysim.network.sites`, or the fields of `Network` by name. CSV has one line
    per link with columns source, target, bandwidth_bps and latency_s; a link given in one direction only applies to both.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"The network file {str(path)!r} cannot be read: {error.strerror}.") from None
    try:
        return _from_csv(text, path.stem) if path.suffix == ".csv" else _from_toml(text, path.stem)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{str(error).rstrip('.')} (in {str(path)!r}).") from None


def _from_toml(text: str, name: str) -> Network:
    values = parse_toml(text)
    if "sites" in values:
        return network_of_sites(values, name)
    known = [item.name for item in fields(Network)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"Unknown field `{unknown[0]}`. Known: {', '.join(known)}.")
    if "bandwidth_bps" not in values:
        raise ValueError("`bandwidth_bps` must be given.")
    return Network(**({"name": name} | values))


def _from_csv(text: str, name: str) -> Network:
    columns = ("source", "target", "bandwidth_bps", "latency_s")
    reader = csv.DictReader(text.splitlines())
    if set(reader.fieldnames or ()) != set(columns):
        raise ValueError(f"The columns must be {', '.join(columns)}, but got {', '.join(reader.fieldnames or ())}.")
    links: dict[tuple[int, int], tuple[float, float]] = {}
    for line in reader:
        try:
            ends, (bandwidth, latency) = (
                (int(line["source"]), int(line["target"])),
                (float(line["bandwidth_bps"]), float(line["latency_s"])),
            )
            if None in line:
                raise ValueError("more than four cells")
        except (TypeError, ValueError):
            raise ValueError(
                f"A line must hold the numbers of two hosts, a bandwidth and a latency, but got {list(line.values())!r}."
            ) from None
        if ends in links:
            raise ValueError(f"A link must be given once, but got {ends[0]} to {ends[1]} twice.")
        links[ends] = (bandwidth, latency)
    size = max((max(ends) for ends in links), default=-1) + 1
    if size < 2 or min(min(ends) for ends in links) < 0:
        raise ValueError(f"The links must join hosts 0, 1, ..., but got {sorted(links)[:3]}.")
    pairs = (
        (low, high) for high in range(size) for low in range(high)
    )  # searched up to the first gap: a host may be 10^9
    gap = next((pair for pair in pairs if pair not in links and pair[::-1] not in links), None)
    if gap is not None:
        raise ValueError(f"Every pair of hosts must have a link, but got none between {gap[0]} and {gap[1]}.")
    matrix = [[links.get((a, b)) or links[b, a] if a != b else (0.0, 0.0) for b in range(size)] for a in range(size)]
    return matrix_network(matrix, name=name)


class Device(NamedTuple):
    """A device by its datasheet."""

    peak_flops: float
    """Dense (no sparsity) tensor-core FLOP/s at 16 bits."""
    memory_bytes: int
    memory_bytes_per_s: float

    @property
    def codec_bytes_per_s(self) -> float:
        """Assumed dense bytes per second of codecs: limited by memory bandwidth, with `CODEC_PASSES` passes.

        Kernel launches, which dominate for small tensors, are not included.
        """
        return self.memory_bytes_per_s / CODEC_PASSES


CODEC_PASSES = 8
"""Reads and writes of a dense tensor in one encode or decode, such as a TopK's: find the range, select, move, write."""


# From vendors' datasheets, none measured by us. Figures quoted with sparsity are halved. Consumer cards: 16-bit inputs, 32-bit
# accumulation. "A100" and "V100" are the variants with more memory; H800 and A800 are H100 and A100 with slower links between cards.
DEVICES: dict[str, Device] = {
    "T4": Device(65e12, 16 * 10**9, 300e9),
    "V100": Device(125e12, 32 * 10**9, 900e9),
    "V100-16GB": Device(125e12, 16 * 10**9, 900e9),
    "A10G": Device(70e12, 24 * 10**9, 600e9),
    "A40": Device(150e12, 48 * 10**9, 696e9),
    "L4": Device(121e12, 24 * 10**9, 300e9),
    "L40S": Device(362e12, 48 * 10**9, 864e9),
    "RTX3090": Device(71e12, 24 * 10**9, 936e9),
    "RTX4090": Device(165e12, 24 * 10**9, 1008e9),
    "RTX5090": Device(210e12, 32 * 10**9, 1792e9),
    "A6000": Device(155e12, 48 * 10**9, 768e9),
    "A100": Device(312e12, 80 * 10**9, 2039e9),
    "A100-40GB": Device(312e12, 40 * 10**9, 1555e9),
    "H20": Device(148e12, 96 * 10**9, 4000e9),
    "H100": Device(989e12, 80 * 10**9, 3350e9),
    "H200": Device(989e12, 141 * 10**9, 4800e9),
    "B200": Device(2250e12, 180 * 10**9, 8000e9),
    "MI250X": Device(383e12, 128 * 10**9, 3277e9),
    "MI300X": Device(1307e12, 192 * 10**9, 5300e9),
}
