"""Network files of sites: what is written is what is simulated, and what is wrong is named."""

import math

import pytest

from raysim.network.presets import parse_network
from raysim.network.sites import read_homes, read_links

HOME_AND_LAB = """
[sites.home]
hosts = 2
bandwidth = "1gbps"
latency = "0.2ms"

[sites.lab]
hosts = 1

[[links]]
between = ["home", "lab"]
bandwidth = "100mbps"
latency = "20ms"
"""


@pytest.fixture
def written(tmp_path):
    """Return the network of a text in a file."""

    def write(text):
        (tmp_path / "mine.toml").write_text(text)
        return parse_network(str(tmp_path / "mine.toml"))

    return write


def test_hosts_have_the_links_of_their_sites(written):
    network = written(HOME_AND_LAB)
    assert network.host_names == ("home-0", "home-1", "lab-0")
    assert repr(network) == "mine"
    assert network.bandwidths_bps([0, 0, 2], [1, 2, 1]).tolist() == [1e9, 1e8, 1e8]
    assert network.latencies_s([0, 0, 2], [1, 2, 1]).tolist() == [0.0002, 0.02, 0.02]
    free = written('[sites.one]\nhosts = 2\n[sites.two]\n[[links]]\nbetween = ["two", "one"]\nbandwidth = "1gbps"\n')
    assert free.bandwidths_bps([0, 0], [1, 2]).tolist() == [math.inf, 1e9]
    assert free.latencies_s([0, 0], [1, 2]).tolist() == [0, 0]


REGIONS = """
[sites.east]
region = "aws:us-east-1"

[sites.west]
region = "aws:us-west-2"

[sites.home]
hosts = 2
bandwidth = "200mbps"
upload = "20mbps"

[[links]]
between = ["east", "home"]
bandwidth = "200mbps"
latency = "20ms"

[[links]]
between = ["west", "home"]
bandwidth = "10mbps"
"""


def test_regions_have_measured_links_and_homes_slow_uploads(written):
    network = written(REGIONS)
    east_west, west_east = (
        read_links()[f"aws:us-{a}", f"aws:us-{b}"] for a, b in (("east-1", "west-2"), ("west-2", "east-1"))
    )
    assert network.bandwidths_bps([0, 1], [1, 0]).tolist() == [east_west[0], west_east[0]]
    assert network.latencies_s([0, 1], [1, 0]).tolist() == [east_west[1], west_east[1]]
    assert network.bandwidths_bps([0, 2, 2, 2, 1], [2, 0, 3, 1, 2]).tolist() == [2e8, 2e7, 2e7, 1e7, 1e7]
    given = REGIONS + '[[links]]\nbetween = ["west", "east"]\nbandwidth = "1gbps"\n'
    assert written(given).bandwidths_bps([0, 1], [1, 0]).tolist() == [1e9, 1e9]


HOMES = """
[sites.slow]
hosts = 2
home = "us:p10"

[sites.fast]
home = "us:p90"

[sites.abroad]
home = "de:p50"

[[links]]
between = ["fast", "abroad"]
bandwidth = "100mbps"
latency = "50ms"

[[links]]
between = ["slow", "abroad"]
bandwidth = "1mbps"
latency = "60ms"
"""


def test_homes_send_and_receive_at_their_percentile(written):
    slow, fast, abroad = (read_homes()[name] for name in ("us:p10", "us:p90", "de:p50"))
    network = written(HOMES)  # hosts 0 and 1 are slow, 2 fast, 3 abroad
    sent = network.bandwidths_bps([0, 0, 2, 2, 3, 3], [1, 2, 0, 3, 2, 0]).tolist()
    assert sent == [slow.upload_bps, slow.upload_bps, slow.download_bps, abroad.download_bps, abroad.upload_bps, 1e6]
    assert network.latencies_s([0, 0, 2, 3], [1, 2, 0, 2]).tolist() == [
        2 * slow.latency_s, *[slow.latency_s + fast.latency_s] * 2, 0.05,
    ]  # fmt: skip


def test_a_higher_percentile_is_better_in_every_direction():
    for name, home in read_homes().items():
        country, _, percentile = name.partition(":p")
        better = [
            each
            for other, each in read_homes().items()
            if other.startswith(f"{country}:p") and int(other[4:]) > int(percentile)
        ]
        assert all(each.download_bps > home.download_bps for each in better)
        assert all(each.upload_bps > home.upload_bps and each.latency_s < home.latency_s for each in better)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ('"us:p10"', '"us:p11"'),
            r"`sites.slow.home` must be a country \(au, .*, za\) and a percentile of p10, .*, but got 'us:p11'",
        ),
        (('"us:p10"', "3"), r"`sites.slow.home` must be a country .*, but got 3"),
        (('"us:p10"', '"us:p10"\nupload = "1mbps"'), r"`sites.slow.home` has bandwidths .*: leave out `upload`"),
        (('["fast", "abroad"]', '["slow", "fast"]'), r"`links` must hold one between fast and abroad"),
    ],
)
def test_wrong_homes_are_refused(written, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        written(HOMES.replace(*change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("us-west-2", "us-west-3"),
            r"`sites.west.region` must be a measured region, such as aws:us-west-\d, .*'aws:us-west-3'",
        ),
        (("aws:us-west-2", "aws:us-east-1"), r"`links` must hold one between east and west, but there is none"),
        (('"20mbps"', "20"), r"`sites.home.upload` must be a text such as '100mbps', but got 20"),
        (('"20mbps"', '"20mbps+1ms"'), r"`sites.home.upload` must be a text such as '100mbps', but got '20mbps\+1ms'"),
    ],
)
def test_wrong_regions_and_uploads_are_refused(written, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        written(REGIONS.replace(*change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"20ms"', "20"), r"`links\[0\].latency` must be a text such as '20ms', but got 20"),
        (('"100mbps"', '"fast"'), r"`links\[0\].bandwidth` must be a text such as '100mbps', but got 'fast'"),
        (('"lab"]', '"moon"]'), r"`links\[0\].between` must name sites of the file \(home, lab\), but got 'moon'"),
        (('["home", "lab"]', '["home", "home"]'), r"must name two sites"),
        (("[[links]]", "[[link]]"), r"Unknown field `link` in a file with sites"),
        (("hosts = 2", "hosts = 0"), r"`sites.home.hosts` must be an integer of at least 1"),
        (
            ("[sites.lab]", '[sites.lab]\nbandwidth = "1gbps"'),
            r"`sites.lab.bandwidth` is that between hosts of the site, which has one",
        ),
        (("[sites.lab]", "[sites.lab]\nspeed = 3"), r"Unknown field `sites.lab.speed`"),
        (
            ('[[links]]\nbetween = ["home", "lab"]\nbandwidth = "100mbps"\nlatency = "20ms"\n', ""),
            r"between home and lab",
        ),
    ],
)
def test_wrong_file_error_names_the_fault(written, change, sentence):
    assert change[0] in HOME_AND_LAB
    with pytest.raises(ValueError, match=sentence) as caught:
        written(HOME_AND_LAB.replace(*change))
    assert str(caught.value).endswith("mine.toml').")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aws:mars", r"^A network of cloud regions must name measured regions, such as aws:.*, but got 'aws:mars'\.$"),
        (
            "gcp:us-west1,aws:us-east1",
            r"must name measured regions, such as .*aws:us-east-1.*, but got 'aws:us-east1'\.$",
        ),
        (
            "aws:us-east-1",
            r"^A network of cloud regions must name two or more different ones, but got 'aws:us-east-1'\.$",
        ),
    ],
)
def test_misspelled_region_is_answered_with_regions(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_network(text)
