"""A short campaign: every attack a few times, in this process where it can be."""

import os
import random

import pytest
from attacks import ATTACKS
from on_containers import GROUPS, Contained, in_containers
from on_servers import Blow, strike_runs, strike_sweeps

FEW = {
    "driver killed": 3,
    "stage killed": 3,
    "sweep killed": 2,
    "SIGTERM while Ray starts": 1,
    "SIGTERM while stages start": 1,
    "SIGTERM in an evaluation": 1,
    "SIGTERM in the compaction": 1,
    "sweep asked to end": 3,
    "files damaged": 40,
    "disk full": 3,
    "disk full under a sweep": 2,
    "inputs": 200,
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", FEW
)  # packets: tests/codecs/test_fuzz.py; operations on files: tests/training/test_orders.py
def test_no_attack_does_harm(tmp_path, name):
    attack, _, _ = ATTACKS[name]
    engine = "ray" if name == "stage killed" or name.startswith("SIGTERM") else "inline"
    found = attack(FEW[name], tmp_path, engine, random.Random(name))
    if found.harm and found.harm[0].startswith("no disk can be mounted"):
        pytest.skip("a disk of memory can be mounted by root alone")
    assert found.harm == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "blow",
    [
        Blow("the raylet", "stopped for good", "while Ray ends"),
        Blow("the GCS", "stopped for good", "while Ray ends"),
        Blow("the dashboard's agent", "killed", "in a step"),
        Blow("the dashboard's agent", "asked to end", "while stages start"),
        Blow("the GCS", "asked to end", "while stages start"),
        Blow("a stage", "stopped for a while", "in an evaluation"),
    ],
    ids=str,
)
def test_a_run_goes_on_or_says_how_whatever_hits_its_ray(tmp_path, blow):
    assert strike_runs([blow], tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sweep_goes_on_or_says_how_whatever_hits_its_ray(tmp_path):
    assert strike_sweeps([Blow("the raylet", "stopped for good", "while Ray ends")], tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.geteuid() != 0 or not (GROUPS / "memory").is_dir(), reason="needs root and cgroups of version 1")
@pytest.mark.parametrize(
    "plan",
    [
        Contained("256 MiB of memory", "train inline"),
        Contained("256 MiB of memory", "sweep inline"),
        Contained("a read-only root", "train inline"),
        Contained("1 MiB of /dev/shm", "train ray"),
    ],
    ids=str,
)
def test_a_container_works_or_says_why_not(tmp_path, plan):
    assert in_containers([plan], tmp_path) == []
