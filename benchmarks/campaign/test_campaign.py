"""A short campaign: every attack a few times, in this process where it can be."""

import os
import random

import pytest
from attacks import ATTACKS
from folder_orders import POWER, Plan, answers, harms
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
@pytest.mark.parametrize("name", FEW)  # packets: tests/codecs/test_fuzz.py
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


ORDERS = [
    Plan("nothing", "train", "resume", 8),  # the second is there before the first has a row
    Plan("broken", "resume", "resume", 3),  # the first has looked, and the second ends the run
    Plan("broken", "resume", "resume", 60),
    Plan("unmerged", "load", "resume", 24),  # tables that the first has listed are gone
    Plan("nothing", "train", None, 100, "kill"),
    *(Plan("broken", "resume", None, at, "EIO") for at in range(58, 64)),  # some of them cannot fail
    Plan("broken", "resume", "load", 60, then=20),
    *(Plan("whole", "pack", None, at, POWER) for at in range(0, 30, 3)),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_order_of_file_operations_loses_a_step():
    verdicts = answers(ORDERS)
    assert harms(ORDERS, verdicts) == []
    assert all(one.met for plan, one in zip(ORDERS, verdicts, strict=True) if plan.mode in ("hold", "kill"))
    assert any(one.met for plan, one in zip(ORDERS, verdicts, strict=True) if plan.mode == "EIO")
