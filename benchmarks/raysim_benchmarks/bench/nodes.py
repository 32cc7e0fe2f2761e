"""A sweep over several Ray nodes on this machine: CPU seconds of each kind of process, by number of nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from rich.table import Table

from raysim.console import PlainConsole
from raysim.engine.connection import listen_on_loopback
from raysim.sweeps.trial_rows import Rows
from raysim_benchmarks.harness import FailedError
from raysim_benchmarks.processes import Spent, by_kind, cpu_seconds, per

STAGES = 4
CPUS = 20  # of all nodes in total: five trials at once
LOOK_S = 1.0  # between readings of the processes' CPU seconds


def bench_nodes(counts: list[int], *, trials: int = 64, steps: int = 10) -> list[dict[str, Any]]:
    """Measure and print; return a row of figures for each number of nodes.

    The total number of CPUs is the same for any number of nodes, so equally many trials run in parallel. The CPU seconds of a
    trial are those of all processes of a kind during the sweep, divided by the number of trials. Raises FailedError if the
    sweep fails.
    """
    cpus = max(CPUS, *counts)
    rows = []
    for nodes in counts:
        PlainConsole(stderr=True).print(f"{trials} trials of {STAGES} stages on {nodes} nodes")
        with tempfile.TemporaryDirectory(prefix="raysim-bench-") as name, _cluster(nodes, -(-cpus // nodes)) as address:
            rows.append({"nodes": nodes, "trials": trials, "steps": steps} | _sweep(Path(name), address, trials, steps))
    _show(rows)
    return rows


@contextmanager
def _cluster(nodes: int, cpus: int) -> Iterator[str]:
    """Start a head without CPUs and `nodes` nodes of `cpus` each on this machine; yield the head's address."""
    listen_on_loopback()
    os.environ["RAY_AUTH_MODE"] = "disabled"  # on loopback only
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(wait=False, num_cpus=cpus, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def _sweep(folder: Path, address: str, trials: int, steps: int) -> dict[str, Any]:
    """Run a sweep; return the seconds between trials, and the CPU seconds of a trial by kind of process."""
    study = {
        "base": "digits-cnn",
        "set": {"steps": steps, "num_stages": STAGES, "evaluate_every_steps": 0},
        "sampler": "random",
        "engine": "ray",
        "trials": trials,
        "objectives": ["loss_on", "wire_bytes"],
        "space": {"forward": ["TopK({density})"]},
        "symbols": {"density": {"low": 0.01, "high": 0.5}},
    }
    (folder / "bench.toml").write_text(tomli_w.dumps(study), encoding="utf-8")
    words = [sys.executable, "-m", "raysim.cli", "sweep", "bench.toml", "--out", "sweep", "--address", address]
    before = time.perf_counter()
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
        spent: Spent = {}
        start = cpu_seconds(driver.pid)
        while driver.poll() is None:
            spent |= cpu_seconds(driver.pid)
            time.sleep(LOOK_S)
    if driver.returncode:
        raise FailedError(f"the sweep failed: {(folder / 'log').read_text().strip()}")
    rows = Rows(folder / "sweep", "bench")
    rows.read()
    started = sorted(row.started_at.timestamp() for row in rows if row.started_at is not None)
    return {
        "seconds": time.perf_counter() - before,
        "seconds_between_trials": (started[-1] - started[0]) / (len(started) - 1),
        "cpu_s_of_a_trial": per(by_kind(start, spent), trials),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    kinds = sorted({kind for row in rows for kind in row["cpu_s_of_a_trial"]})
    table = Table(
        "nodes", "a trial every", *kinds, title=f"{rows[0]['trials']} trials: CPU seconds of a trial, by process"
    )
    for row in rows:
        spent = row["cpu_s_of_a_trial"]
        cells = [f"{spent.get(kind, 0.0):.2f}" for kind in kinds]
        table.add_row(str(row["nodes"]), f"{row['seconds_between_trials']:.2f} s", *cells)
    PlainConsole().print(table)
