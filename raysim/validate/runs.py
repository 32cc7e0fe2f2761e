"""Runs on a cluster of shaped hosts, whose links change from step to step."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysim.network.presets import parse_network
from raysim.records import Run
from raysim.validate.cluster import Cluster
from raysim.validate.hosts import Hosts


class FailedError(RuntimeError):
    """A run did not come to its end."""


class Driver:
    """The process that drives runs from the first host (see `driver`), seen from outside."""

    def __init__(self, hosts: Hosts, process: subprocess.Popen[str]) -> None:
        self._hosts = hosts
        self._process = process

    def train(self, config: Mapping[str, Any], folder: Path, rates: Mapping[int, str | None]) -> Run:
        """Train to the last step of `rates`, each step between links of its rate (None: unshaped, as all before the first).

        Raises FailedError where it breaks off.
        """
        shaped: str | None = None
        self._hosts.shape(None)
        self._tell(json.dumps({"config": {**config, "steps": 1 + max(rates)}, "out": str(folder)}))
        while "error" not in (answer := self._answer()):
            rate = rates.get(answer["step"])
            if rate != shaped:
                self._hosts.shape(*link(rate))
                shaped = rate
            self._tell("")
        if answer["error"] is not None:
            raise FailedError(f"The run in {folder} broke off: {answer['error']}")
        return Run(folder)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise FailedError("The driver of the runs ended.") from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise FailedError("The driver of the runs ended.")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def driving(hosts: Hosts) -> Iterator[Driver]:
    """Run a cluster and a driver on the hosts, and stop both."""
    with Cluster.started(hosts) as cluster, cluster.driver() as process:
        yield Driver(hosts, process)


def link(text: str | None) -> tuple[float | None, float]:
    """Return the bits a second and the latency in seconds of a link such as "50mbps+20ms".

    The bits are None where the link is not shaped: None, or "free+20ms".
    """
    network = parse_network(text or "free")
    assert isinstance(network.bandwidth_bps, float)
    assert isinstance(network.latency_s, float)
    return None if math.isinf(network.bandwidth_bps) else network.bandwidth_bps, network.latency_s
