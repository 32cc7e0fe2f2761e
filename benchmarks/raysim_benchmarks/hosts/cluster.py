"""A Ray node on every host, joined to one cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from raysim.config import ConfigError
from raysim.engine.delivery import FAR_BYTES
from raysim.engine.ray_internals import RAY_SETTING
from raysim_benchmarks.hosts.namespaces import Hosts

PORT = 6379
START_S = 90.0  # for the start of a node
STARTED = "Ray runtime started."
STOP_S = 20.0
STORE_BYTES = 512 * 2**20  # object store of each node: all nodes share this machine's memory


class Cluster:
    """Ray nodes of one CPU each; the first host has the head."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._folder = Path(mkdtemp(prefix="rsv-", dir="/tmp"))  # paths of sockets must be short
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}  # by host, each with Ray's servers as children
        self.environment = {
            **os.environ,
            "RAY_ADDRESS": f"{hosts.address(0)}:{PORT}",
            "RAY_AUTH_MODE": "disabled",  # the network is closed
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # like the driver, as hosts run nothing else
            "RAY_TMPDIR": str(self._folder),
            "RAY_enable_metrics_collection": "false",
            "RAY_task_events_report_interval_ms": "0",
        }

    @classmethod
    @contextmanager
    def started(cls, hosts: Hosts) -> Iterator[Cluster]:
        """Start a node on every host; finally stop the nodes with all their processes, and remove their files."""
        cluster = cls(hosts)
        try:
            for host in range(hosts.count):
                cluster.start(host)
            yield cluster
        finally:
            cluster.stop(list(cluster.nodes))
            shutil.rmtree(cluster._folder, ignore_errors=True)

    def stop(self, hosts: Sequence[int]) -> None:
        """Stop the nodes of hosts with all their processes."""
        _stop([self.nodes[host] for host in hosts])

    @contextmanager
    def driver(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Run a Python program on the first host, with pipes to and from it, and finally stop it."""
        process = subprocess.Popen(
            self.hosts.inside(0, sys.executable, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        try:
            yield process
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=STOP_S)  # it ends when its input closes
        finally:
            _stop([process])

    def start(self, host: int) -> None:
        """Start or restart the node of a host; raises ConfigError if it does not start."""
        setting = json.dumps({RAY_SETTING: FAR_BYTES})
        where = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        where.append(f"--system-config={setting}")
        if host:
            where = [f"--address={self.hosts.address(0)}:{PORT}"]
        where += ["--include-log-monitor=false", f"--node-ip-address={self.hosts.address(host)}", "--num-cpus=1"]
        words = [*_ray(), "start", "--block", *where]
        log = self._folder / f"node-{host}.log"
        with log.open("wb") as output:
            node = subprocess.Popen(
                self.hosts.inside(host, *words, f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={k: v for k, v in self.environment.items() if k != "RAY_ADDRESS"},
                start_new_session=True,
            )
        self.nodes[host] = node
        deadline = time.monotonic() + START_S
        while STARTED not in log.read_text(encoding="utf-8", errors="replace"):
            if node.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise ConfigError(f"Ray did not start on host {host}: {lines[-1] if lines else 'it printed nothing'}.")
            time.sleep(0.1)


def _stop(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """End processes and their children."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ray() -> Sequence[str]:
    return [sys.executable, "-m", "ray.scripts.scripts"]
