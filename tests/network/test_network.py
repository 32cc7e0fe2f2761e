"""Networks as data: costs of messages and collectives, the notation, presets and files."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.network.exchanges import all_reduce_s
from raysim.network.presets import CLOUDS, LEVELS, load_network, parse_bandwidths, parse_network, presets
from raysim.network.sites import read_links, regions_of
from raysim.network.topology import Network, Placement

DTFM = ("data-centre", "spot", "two-universities", "four-regions", "worldwide")


# Costs.


def test_point_to_point() -> None:
    assert Network(100e6, 0.02).p2p_s(0, 1, 1_250_000) == pytest.approx(0.12)
    assert Network(100e6, 0.02, framing=1.04).p2p_s(0, 1, 1_250_000) == pytest.approx(0.124)
    assert Network(100e6, 0.02).p2p_s(3, 3, 1_250_000) == 0.0
    assert Network(math.inf, 0.5).p2p_s(0, 1, 10**12) == 0.5


@given(st.integers(1, 9), st.floats(0, 1), st.floats(1e3, 1e10), st.floats(0, 1e9))
def test_collectives_by_alpha_beta(ranks: int, latency: float, bandwidth: float, size: float) -> None:
    network, hosts = Network(bandwidth, latency), list(range(ranks))
    wire = 8 * size / bandwidth
    assert all_reduce_s(size, hosts, network) == pytest.approx(
        2 * (ranks - 1) * latency + 2 * wire * (ranks - 1) / ranks if ranks > 1 else 0.0
    )
    both = 2 if ranks > 1 else 0
    assert all_reduce_s(size, hosts, network, "server") == pytest.approx(both * (latency + wire * (ranks - 1)))
    assert all_reduce_s(size, hosts, network, "chain") == pytest.approx(both * ((ranks - 1) * latency + wire))
    if math.log2(ranks).is_integer():
        rounds = math.log2(ranks)
        assert all_reduce_s(size, hosts, network, "tree") == pytest.approx(2 * latency * rounds + 2 * wire * rounds)


def test_ring_runs_at_slowest_link() -> None:
    bandwidth = ((0.0, 8.0, 4.0), (8.0, 0.0, 2.0), (4.0, 2.0, 0.0))
    assert all_reduce_s(3.0, [0, 1, 2], Network(bandwidth)) == 2 * 2 * (8 * 1.0 / 2.0)
    assert all_reduce_s(2.0, [0, 1], Network(bandwidth)) == 2 * (8 * 1.0 / 8.0)
    with pytest.raises(
        ValueError, match=r"^`algorithm` must be one of direct, ring, tree, sites, server, chain, but got 'star'\.$"
    ):
        all_reduce_s(1.0, [0, 1], Network(1.0), "star")


def test_ports_are_as_fast_as_the_fastest_link() -> None:
    matrix = ((0.0, 8.0, 4.0), (1.0, 0.0, 2.0), (3.0, 5.0, 0.0))
    assert Network(matrix, sharing="port").ports_bps(3).tolist() == [[8.0, 2.0, 5.0], [3.0, 8.0, 4.0]]
    assert Network(matrix, sharing="half").ports_bps(3).tolist() == [[8.0, 8.0, 5.0]] * 2
    assert Network(matrix, sharing="port", port_bps=6.0).ports_bps(2).tolist() == [[6.0, 6.0]] * 2
    assert Network(matrix).ports_bps(2).tolist() == [[8.0, 2.0], [3.0, 8.0]]


def test_average_over_slow_uploads_takes_as_long_as_the_bytes_of_a_port() -> None:
    """Of 6 bytes among 4 hosts each sends 3 x 1.5 bytes a round, out at 2 bit/s and in at 100."""
    uploads = tuple(tuple(0.0 if a == b else 2.0 for b in range(4)) for a in range(4))
    downloads = tuple(tuple(100.0 if b else 2.0 for b in range(4)) for _ in range(4))
    assert all_reduce_s(6.0, range(4), Network(uploads), "direct") == 2 * (8 * 3 * 1.5 / 2.0)
    assert all_reduce_s(6.0, range(4), Network(downloads), "direct") == 2 * (8 * 3 * 1.5 / 2.0)


# TCP's window.


@given(
    st.floats(1e3, 1e11),
    st.just(0.0) | st.floats(1e-6, 1),
    st.floats(1, 1e9),
    st.integers(1, 16),
    st.floats(1, 1.2),
)
def test_window_caps_payload_per_round_trip(
    bandwidth: float, latency: float, window: float, streams: int, framing: float
) -> None:
    plain = Network(bandwidth, latency, framing=framing)
    capped = Network(bandwidth, latency, framing=framing, window_bytes=window, streams=streams)
    payload = 8 * streams * window / (2 * latency) if latency else math.inf
    size = 1e6
    expected = latency + 8 * size / min(bandwidth / framing, payload)
    assert capped.p2p_s(0, 1, size) == pytest.approx(expected)
    assert capped.p2p_s(0, 0, size) == 0.0
    assert capped.p2p_s(0, 1, size) >= plain.p2p_s(0, 1, size) * (1 - 1e-12)
    wider = Network(bandwidth, latency, framing=framing, window_bytes=2 * window, streams=streams)
    double = Network(bandwidth, latency, framing=framing, window_bytes=window, streams=2 * streams)
    assert wider.p2p_s(0, 1, size) == double.p2p_s(0, 1, size) <= capped.p2p_s(0, 1, size)
    instant = capped.without_latency
    assert instant.p2p_s(0, 1, size) == pytest.approx(expected - latency, abs=1e-8)


def test_round_trip_of_a_window_is_there_and_back() -> None:
    """Latencies of 10 and 30 ms make a round trip of 40 ms in either direction; ports keep their own bandwidth."""
    network = Network(((0, 1e9), (1e9, 0)), ((0, 0.01), (0.03, 0)), window_bytes=1e6)
    cap = 8e6 / 0.04
    assert network.bandwidths_bps([0, 1, 0], [1, 0, 0]).tolist() == pytest.approx([cap, cap, math.inf])
    assert network.ports_bps(2).tolist() == [[1e9, 1e9]] * 2
    assert network.without_latency.bandwidths_bps(0, 1) == pytest.approx(cap)
    hosts = range(5)
    window = parse_network("1gbps+20ms/1MB")
    assert all_reduce_s(1e6, hosts, window, "direct") == pytest.approx(
        2 * (0.02 + max(8 * 2e5 / 2e8, 4 * 8 * 2e5 / 1e9))
    )
    assert all_reduce_s(1e6, hosts, window, "ring") == pytest.approx(8 * (0.02 + 8 * 2e5 / 2e8))


@pytest.mark.parametrize(
    "text", ["1gbps+50ms/9.7MB", "1gbps+50ms~1ms/port/2x4MB", "free+20ms/64kB", "100mbps/2x4MiB", "100mbps/3B"]
)
def test_window_notation(text: str) -> None:
    network = parse_network(text)
    assert repr(network) == text
    assert parse_network(repr(network)) == network
    assert network != parse_network(text.rpartition("/")[0])


def test_windows_of_presets_and_files(tmp_path: Path) -> None:
    file = tmp_path / "sites.toml"
    sites = '[sites.a]\n[sites.b]\n[[links]]\nbetween = ["a", "b"]\nbandwidth = "1gbps"\nlatency = "20ms"\n'
    file.write_text(f'window = "2x4MiB"\n{sites}')
    expected = {"window_bytes": 2**22, "streams": 2}
    assert {name: getattr(load_network(file), name) for name in expected} == expected
    file.write_text(sites)
    assert parse_network(f"{file}/2x4MiB").bandwidths_bps(0, 1) == 1e9
    assert parse_network(f"{file}/1MiB").bandwidths_bps(0, 1) == pytest.approx(8 * 2**20 / 0.04)
    worldwide = parse_network("worldwide/1MB")
    assert (repr(worldwide), worldwide.bandwidths_bps(0, 63)) == ("worldwide/1MB", pytest.approx(8e6 / 0.248))
    for text in ("9.7", "4 apples", 4):
        file.write_text(f"window = {text!r}\n{sites}")
        with pytest.raises(ValueError, match="`window` must be bytes, such as "):
            load_network(file)


# Notation.


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("100mbps", Network(100e6)),
        ("1gbps", Network(1e9)),
        ("2.5gbps+0.5ms", Network(2.5e9, 0.0005)),
        (" 100Mbps+20ms ", Network(100e6, 0.02)),
        ("8mbps+1s~250ms", Network(8e6, 1.0, 0.25)),
        ("200mbps+50ms/inbound", Network(200e6, 0.05, sharing="inbound")),
        ("56kbps/half", Network(56e3, sharing="half")),
        ("free", Network(math.inf)),
        ("free+20ms", Network(math.inf, 0.02)),
        ("200 Mbit/s", Network(200e6)),  # as pages write them
        ("1 Gbit/s + 20 ms", Network(1e9, 0.02)),
        ("56kbit/s/half", Network(56e3, sharing="half")),
        ("100 mbps", Network(100e6)),
        ("200MBPS", Network(200e6)),
    ],
)
def test_notation(text: str, network: Network) -> None:
    assert parse_network(text) == network
    assert parse_network(repr(network)) == network


@given(
    st.integers(1, 10**6).map(lambda n: n * 1e5),
    st.integers(0, 10**6).map(lambda n: n / 1e6),
    st.sampled_from(["pair", "port", "half", "inbound"]),
)
def test_notation_round_trip(bandwidth: float, latency: float, sharing: str) -> None:
    network = Network(bandwidth, latency, latency / 2, sharing)
    again = parse_network(repr(network))
    assert again.bandwidth_bps == pytest.approx(network.bandwidth_bps, rel=1e-11)
    assert again.latency_s == pytest.approx(network.latency_s, rel=1e-11)
    assert (again.sharing, repr(again)) == (sharing, repr(network))


@pytest.mark.parametrize("text", ["", "fast", "100", "100mbps+", "100mbps+20", "-1mbps", "1e3mbps", "mbps", "1 00mbps"])
def test_wrong_notation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("but got") + ".*Known: 8mbps, .*worldwide"):
        parse_network(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bandwidth_bps": 0}, r"^`bandwidth_bps` must be in \(0, inf\], but got 0\.$"),
        ({"bandwidth_bps": "fast"}, r"^`bandwidth_bps`"),
        ({"bandwidth_bps": 1e6, "latency_s": -1}, r"^`latency_s` must be in \[0, inf\], but got -1\.$"),
        ({"bandwidth_bps": 1e6, "latency_s": math.nan}, r"^`latency_s` must be in"),
        ({"bandwidth_bps": 1e6, "window_bytes": 0}, r"^`window_bytes` must be in \(0, inf\], but got 0\.$"),
        ({"bandwidth_bps": 1e6, "streams": 2}, r"^`streams` share a link by their windows: give `window_bytes` with 2"),
        (
            {"bandwidth_bps": 1e6, "jitter_s": 0.1},
            r"^`jitter_s` must be at most the lowest latency \(0 s\), but got 0\.1\.$",
        ),
        (
            {"bandwidth_bps": 1e6, "sharing": "bus"},
            r"^`sharing` must be one of pair, port, half, inbound, but got 'bus'\.$",
        ),
        (
            {"bandwidth_bps": 1e6, "port_bps": 1e6},
            r"^`port_bps` needs `sharing` \"port\" or \"half\", but got 'pair'",
        ),
        ({"bandwidth_bps": 1e6, "framing": 0.9}, r"^`framing` must be in \[1, inf\], but got 0\.9"),
        ({"bandwidth_bps": 1e6, "burst_bytes": 1, "sharing": "inbound"}, r"^`burst_bytes` must be 0 with"),
        ({"bandwidth_bps": [[0, 1.0]]}, r"^`bandwidth_bps` must be a square matrix, but got rows of \[2\] numbers\.$"),
        ({"bandwidth_bps": [[0, 1.0], [0.0, 0]]}, r"^`bandwidth_bps\[1\]\[0\]` must be in \(0, inf\], but got 0\.0\.$"),
        (
            {"bandwidth_bps": [[0, 1.0], [1.0, 0]], "latency_s": [[0.0] * 3] * 3},
            r"^`latency_s` must have the size of `bandwidth_bps`, but got sizes \[2, 3\]\.$",
        ),
    ],
)
def test_wrong_networks_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network(**arguments)  # type: ignore[arg-type]


def test_networks_compare_by_what_they_are() -> None:
    assert Network(1e6, name="a") == Network(1e6)
    assert hash(Network(1e6, name="a")) == hash(Network(1e6))
    assert Network([[0, 5.0], [6.0, 0]]) == Network(np.array([[1.0, 5.0], [6.0, 2.0]]))  # type: ignore[arg-type]


# Presets.


def test_presets_parse_by_name() -> None:
    assert set(presets()) == {*LEVELS, "free", *DTFM, "one-slow-replica", *CLOUDS}
    for name, network in presets().items():
        assert parse_network(name) is network
        assert parse_network(repr(network)) == network


def test_clouds_have_a_host_in_each_measured_region() -> None:
    assert [presets()[name].num_hosts for name in CLOUDS] == [20, 13, 27, 60]
    network = presets()["clouds"]
    names = network.host_names or ()
    assert names == regions_of("clouds") == network.host_sites
    for source, target in (("gcp:us-east1", "gcp:europe-west4"), ("gcp:europe-west4", "gcp:us-east1")):
        road = network.between_sites(source, target)
        assert road == read_links()[source, target]
        assert 0.04 < road[1] < 0.06
    assert len(read_links()) == 60 * 59


@pytest.mark.parametrize("name", DTFM)
def test_dtfm_cases_are_symmetric_and_of_64_hosts(name: str) -> None:
    network = presets()[name]
    assert network.num_hosts == 64
    bandwidth, latency = np.array(network.bandwidth_bps), np.array(network.latency_s)
    assert (bandwidth == bandwidth.T).all()
    assert (latency == latency.T).all()


def link(name: str, a: int, b: int) -> tuple[float, float]:
    network = presets()[name]
    return round(float(network.latencies_s(a, b)) * 1e3, 9), round(float(network.bandwidths_bps(a, b)) / 1e9, 9)


def test_dtfm_cases_by_their_links() -> None:
    assert (link("data-centre", 0, 7), link("data-centre", 7, 8)) == ((0, 100), (0, 3.125))
    assert (link("spot", 28, 31), link("spot", 31, 32), link("spot", 40, 41)) == ((0, 100), (0, 1.25), (0, 1.25))
    assert (link("two-universities", 0, 31), link("two-universities", 31, 32)) == ((1, 5), (11, 1.12))
    four = {
        (0, 1): (67, 1.15),
        (0, 2): (59, 1.05),
        (0, 3): (11, 1.12),
        (1, 2): (12, 1.25),
        (1, 3): (49, 1.10),
        (2, 3): (52, 1.02),
    }
    assert {pair: link("four-regions", 16 * pair[0], 16 * pair[1]) for pair in four} == four
    assert link("four-regions", 0, 15) == link("worldwide", 0, 7) == (10, 2)


def test_worldwide_by_its_links_and_medians() -> None:
    cities = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
    place = {city: 8 * index for index, city in enumerate(cities)}
    for a, b, expected in (
        ("Oregon", "Virginia", (67, 0.79)),
        ("Seoul", "London", (238, 0.342)),
        ("Seoul", "Ireland", (228, 0.335)),
        ("Ireland", "Frankfurt", (24, 1.08)),
        ("Virginia", "London", (76, 1.16)),
        ("Tokyo", "Ohio", (130, 0.694)),
    ):
        assert link("worldwide", place[a], place[b]) == expected
    across = [link("worldwide", 8 * a, 8 * b) for a in range(8) for b in range(a)]
    assert np.median([ms for ms, _ in across]) == 111.5
    assert np.median([gbps for _, gbps in across]) == pytest.approx(0.61, abs=0.005)
    assert (min(across)[0], max(across)[0]) == (11, 238)
    assert sorted(gbps for _, gbps in across)[:: len(across) - 1] == [0.335, 1.16]


# Files.


def test_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('bandwidth_bps = [[0, 1e9], [2e9, 0]]\nlatency_s = 0.001\nsharing = "port"\n')
    network = parse_network(str(path))
    assert network == Network(((0.0, 1e9), (2e9, 0.0)), 0.001, sharing="port")
    assert network.name == "lab"


def test_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.csv"
    path.write_text("source,target,bandwidth_bps,latency_s\n0,1,1e9,0.01\n1,0,5e8,0.02\n0,2,1e8,0\n1,2,2e8,0.5\n")
    network = load_network(path)
    assert network.bandwidth_bps == ((0.0, 1e9, 1e8), (5e8, 0.0, 2e8), (1e8, 2e8, 0.0))
    assert network.latency_s == ((0.0, 0.01, 0.0), (0.02, 0.0, 0.5), (0.0, 0.5, 0.0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "bandwidth = 5", r"^Unknown field `bandwidth`\. Known: bandwidth_bps, .* \(in '.*a\.toml'\)\.$"),
        ("a.toml", "latency_s = 5", r"^`bandwidth_bps` must be given \(in "),
        ("a.toml", "bandwidth_bps = -5", r"^`bandwidth_bps` must be in \(0, inf\], but got -5 \(in "),
        ("a.toml", "= 5", r"\(in '.*a\.toml'\)\.$"),
        (
            "a.csv",
            "source,target\n0,1\n",
            r"^The columns must be source, target, bandwidth_bps, latency_s, but got source, target",
        ),
        (
            "a.csv",
            "source,target,bandwidth_bps,latency_s\n0,x,1,1\n",
            r"^A line must hold the numbers of two hosts, a bandwidth and a latency",
        ),
        (
            "a.csv",
            "source,target,bandwidth_bps,latency_s\n0,1,1\n",
            r"^A line must hold the numbers of two hosts, a bandwidth and a latency",
        ),
        (
            "a.csv",
            "source,target,bandwidth_bps,latency_s\n0,1,1,000,000,0.01\n",  # with commas for thousands
            r"^A line must hold the numbers of two hosts, a bandwidth and a latency",
        ),
        (
            "a.csv",
            "source,target,bandwidth_bps,latency_s\n0,1,1,0\n0,1,2,0\n",
            r"^A link must be given once, but got 0 to 1 twice",
        ),
        (
            "a.csv",
            "source,target,bandwidth_bps,latency_s\n0,2,1,0\n",
            r"^Every pair of hosts must have a link, but got none",
        ),
        ("a.csv", "source,target,bandwidth_bps,latency_s\n", r"^The links must join hosts 0, 1, \.\.\., but got \[\]"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_network(str(path))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^The network file '.*none\.csv' cannot be read: No such file or directory\.$"
    ):
        parse_network(str(tmp_path / "none.csv"))


# Placement.


def test_placement() -> None:
    assert Placement.spread(3).hosts == (0, 1, 2)
    assert Placement.spread(8, 4).hosts == (0, 0, 1, 1, 2, 2, 3, 3)
    assert Placement.spread(4, 64).hosts == (0, 16, 32, 48)
    assert Placement((0, 2)).num_hosts == 3
    with pytest.raises(ValueError, match=r"^`hosts` must be an integer of at least 0, but got -1\.$"):
        Placement((0, -1))
    with pytest.raises(ValueError, match=r"^`cores` must be given for 3 hosts, but got 1 numbers\.$"):
        Placement((0, 2), cores=(1.0,))
    with pytest.raises(ValueError, match=r"^`cores` must be in \(0, inf\], but got 0\.$"):
        Placement((0,), cores=(0,))
    with pytest.raises(ValueError, match=r"^`threads` must be an integer of at least 1, but got 0\.$"):
        Placement((0,), threads=0)


def test_equal_networks_have_one_hash_which_no_other_process_gets() -> None:
    import pickle

    one, other = (Network(1e6, 0.01, name=name) for name in ("a", "b"))
    assert hash(one) == hash(other) == hash(one)
    assert hash(Network(2e6, 0.01)) != hash(one)
    again = pickle.loads(pickle.dumps(one))
    assert "_hash" not in again.__dict__
    assert again == one
    assert hash(again) == hash(one)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("200MBps", "'200MBps' has bytes: write 1600mbps, or 200mbps if bits were meant"),
        ("1.5 GB/s+30ms", "write 12gbps, or 1.5gbps if bits were meant"),
        ("64kB/s", "write 512kbps, or 64kbps if bits were meant"),
        ("10mbps..25MByte/s", "write 200mbps"),
        (
            "10mbps+20ms..1gbps",
            "has one latency, written at its end: 10mbps..10gbps+20ms, but got '10mbps+20ms..1gbps'",
        ),
        ("10mbps+20ms..1gbps+5ms", "has one latency"),
    ],
)
def test_ambiguous_bandwidth_is_refused_with_its_meanings(text, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_bandwidths(text) if ".." in text else parse_network(text)
