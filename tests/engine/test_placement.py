"""Placement of workers on sites: never worse than in the order of addresses, and the best where all placements can be tried."""

import itertools
import json
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.config import ConfigError, read_config
from raysim.engine.nodes import Traffic, check_on_one_node, choose_sites, nodes_on_sites
from raysim.network.presets import parse_network
from raysim.network.sites import network_of_sites
from raysim.pipeline.prepare import prepare

SITES = {
    "sites": {
        "home": {"hosts": 2, "bandwidth": "1gbps"},
        "lab": {"hosts": 4, "bandwidth": "10gbps"},
        "far": {"hosts": 2},
    },
    "links": [
        {"between": ["home", "lab"], "bandwidth": "100mbps", "latency": "5ms"},
        {"between": ["home", "far"], "bandwidth": "20mbps", "latency": "50ms"},
        {"between": ["lab", "far"], "bandwidth": "50mbps", "latency": "20ms"},
    ],
}
NETWORK = network_of_sites(SITES, "three")


def pipelines(replicas, stages, activations, gradients):
    """Traffic of replicas of a pipeline, each stage averaged over all of them."""
    links = {(r * stages + s, r * stages + s + 1): activations for r in range(replicas) for s in range(stages - 1)}
    averages = {
        (a * stages + s, b * stages + s): gradients
        for s in range(stages)
        for a, b in itertools.combinations(range(replicas), 2)
    }
    sizes = {**links, **averages}
    return Traffic(sizes, dict.fromkeys(sizes, 4.0))


def all_placements(num_workers, capacity):
    for sites in itertools.product(NETWORK.sites, repeat=num_workers):
        if all(sites.count(site) <= capacity[site] for site in NETWORK.sites):
            yield list(sites)


@pytest.mark.parametrize("gradients", [1e3, 1e6, 1e9], ids=["activations-dominate", "alike", "gradients-dominate"])
@pytest.mark.parametrize("capacity", [(2, 2, 2), (4, 1, 1), (3, 3, 0)], ids=str)
@pytest.mark.parametrize(("replicas", "stages"), [(1, 6), (2, 3), (3, 2)])
def test_pipelines_are_placed_as_well_as_any_placement(replicas, stages, capacity, gradients):
    traffic, rooms = pipelines(replicas, stages, 1e6, gradients), dict(zip(NETWORK.sites, capacity, strict=True))
    chosen = traffic.seconds(NETWORK, choose_sites(traffic, NETWORK, rooms, 6, stages))
    assert chosen == pytest.approx(min(traffic.seconds(NETWORK, sites) for sites in all_placements(6, rooms)))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_placement_order_is_optimal(data):
    workers = data.draw(st.integers(2, 9))
    pairs = list(itertools.combinations(range(workers), 2))
    sizes = data.draw(st.lists(st.sampled_from([0.0, 1e3, 1e6, 1e8]), min_size=len(pairs), max_size=len(pairs)))
    traffic = Traffic(dict(zip(pairs, sizes, strict=True)), dict.fromkeys(pairs, 1.0))
    rooms = {site: data.draw(st.integers(1, workers)) for site in NETWORK.sites}
    if sum(rooms.values()) < workers:
        rooms["lab"] = workers
    sites = choose_sites(traffic, NETWORK, rooms, workers, 1)
    assert all(sites.count(site) <= rooms[site] for site in NETWORK.sites)
    in_order = [site for site in NETWORK.sites for _ in range(rooms[site])][:workers]
    assert traffic.seconds(NETWORK, sites) <= traffic.seconds(NETWORK, in_order)


def test_placement_minimises_bytes_on_slow_link():
    """Replicas share a site if activations are large, stages do if gradients are."""
    rooms = {"home": 0, "lab": 2, "far": 2}
    activations = choose_sites(pipelines(2, 2, 1e8, 1e5), NETWORK, rooms, 4, 2)
    gradients = choose_sites(pipelines(2, 2, 1e5, 1e8), NETWORK, rooms, 4, 2)
    assert activations[0] == activations[1] != activations[2] == activations[3]
    assert gradients[0] == gradients[2] != gradients[1] == gradients[3]


@pytest.fixture(scope="module")
def workload():
    return prepare(read_config("digits-cnn", ["steps=2", "num_stages=2", "num_replicas=2", "forward=Quantize(8)"]))


@pytest.mark.slow
def test_traffic_counts_packets_as_they_are_sent(workload):
    """A boundary's bytes are those of its packets; a link's dense gradient counts four bytes a value."""
    plan, traffic = workload.plan, Traffic.of(workload)
    (shape,) = plan.boundaries[0].shapes.values()
    forward, backward = plan.compressors[0][0][""]
    sizes = [method.array_bytes(shape, "float32") for method in (forward, backward)]
    assert traffic.num_bytes[0, 1] == plan.config.num_microbatches * sum(sizes)
    assert traffic.num_messages[0, 1] == 2 * plan.config.num_microbatches
    values = sum(parameter.numel() for parameter in workload.modules[0].parameters())
    assert traffic.num_bytes[0, 2] == 8 * values  # an all-reduce of two: half of the values there, and the sums back


@pytest.mark.parametrize(("dtype", "value_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_replica_traffic_is_counted_by_pair_and_step(dtype, value_bytes):
    """Of three: a third of the values to each other and a third of the sums back, in one of four steps by DiLoCo(4)."""
    changes = ["steps=4", "num_stages=2", "num_replicas=3", "batch_size=96", "replica_gradient=DiLoCo(4)"]
    workload = prepare(read_config("digits-cnn", [*changes, "forward=Nonzero", "num_microbatches=4", f"dtype={dtype}"]))
    traffic = Traffic.of(workload)
    values = sum(parameter.numel() for parameter in workload.modules[1].parameters())
    for a, b in ((1, 3), (1, 5), (3, 5)):
        assert traffic.num_bytes[a, b] == pytest.approx(2 * 2 * 4 * values / 3 / 4)
        assert traffic.num_messages[a, b] == 2 * 2 / 4
    (shape,) = workload.plan.boundaries[0].shapes.values()
    size = value_bytes * math.prod(shape)
    assert [traffic.num_bytes[2 * replica, 2 * replica + 1] for replica in range(3)] == [4 * 2 * size] * 3


def test_owners_of_a_tied_parameter_sum_its_values_alone():
    workload = prepare(read_config("topics-gpt", ["num_stages=2", "model.tied=true", "steps=2"]))
    (((stage, name), _),) = workload.plan.tied
    values, config = workload.modules[stage].get_parameter(name).numel(), workload.plan.config
    size = 2 * 4 * math.prod(workload.plan.boundaries[0].shapes[""])
    assert Traffic.of(workload).num_bytes[0, 1] == pytest.approx(config.num_microbatches * size + 2 * 4 * values)


def test_seconds_are_those_of_bits_and_of_each_message():
    """8 Mbit at 100 Mbit/s and four trips of 5 ms, and as much again within the lab at 10 Gbit/s."""
    pairs = [(0, 1), (1, 2)]
    traffic = Traffic(dict.fromkeys(pairs, 1e6), dict.fromkeys(pairs, 4.0))
    assert traffic.seconds(NETWORK, ["home", "lab", "lab"]) == pytest.approx(0.08 + 4 * 0.005 + 0.0008)
    assert traffic.seconds(NETWORK, ["home", "lab", "lab"], [(1, 2)]) == pytest.approx(0.0008)


def test_workers_of_a_site_are_spread_over_its_nodes(workload):
    network, capacity = parse_network("one-slow-replica"), {"a": 2, "b": 2, "c": 1, "d": 1}
    nodes = nodes_on_sites(workload, network, capacity, {"a": "", "b": "fast", "c": "slow", "d": "slow"})
    assert sorted(nodes) == ["b", "b", "c", "d"]


@pytest.mark.parametrize(
    ("capacity", "labels", "words"),
    [
        ({"a": 4}, {"a": "fast"}, "names the site 'slow', but no node .* --labels=site=slow"),
        (
            {"a": 1, "b": 2, "c": 9},
            {"a": "fast", "b": "slow", "c": ""},
            "must hold 4 workers, but can hold fast 1, slow 2",
        ),
    ],
)
def test_nodes_that_do_not_fit_the_sites_are_refused(workload, capacity, labels, words):
    with pytest.raises(ConfigError, match=words):
        nodes_on_sites(workload, parse_network("one-slow-replica"), capacity, labels)


def test_own_ray_has_no_sites():
    check_on_one_node("pack")
    with pytest.raises(ConfigError, match=r"needs a cluster .*RAY_ADDRESS"):
        check_on_one_node("sites.toml")


@pytest.mark.parametrize("value", ["near", "100mbps", "missing.toml"])
def test_placement_is_a_keyword_or_a_site_file(value):
    with pytest.raises(ConfigError, match=r"placement|missing\.toml"):
        read_config("digits-cnn", [f"placement={value}"])


SCRIPT = """
import json, os, sys
os.environ["RAY_AUTH_MODE"] = "disabled"  # a closed network of this machine
from ray.cluster_utils import Cluster
from raysim.config import read_config
from raysim.training.run import Training

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
sites = ["lab", "home", "lab", "home"]  # addresses in an order that the file does not have
nodes = {cluster.add_node(num_cpus=1, labels={"site": site}).node_id: site for site in sites}
os.environ["RAY_ADDRESS"] = cluster.address
try:
    training = Training(read_config("digits-cnn", json.loads(sys.argv[2])), out=sys.argv[1])
    for event in training.events():
        placed = training.engine._nodes
    print(json.dumps([nodes[node] for node in placed]))
finally:
    import ray
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_stages_follow_placement_file(tmp_path):
    file = tmp_path / "sites.toml"
    file.write_text(
        '[sites.home]\nhosts = 2\n[sites.lab]\nhosts = 2\n[[links]]\nbetween = ["home", "lab"]\nbandwidth = "20mbps"\n'
    )
    changes = ["steps=4", "num_stages=4", f"placement={file}", "checkpoint_every_steps=0"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "runs"), json.dumps(changes)],
        env={**os.environ, "RAY_TMPDIR": "/tmp/raysim-sites"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    first, *rest = json.loads(done.stdout.splitlines()[-1])
    assert rest == [first, *[{"home": "lab", "lab": "home"}[first]] * 2]  # one boundary crosses the slow link
