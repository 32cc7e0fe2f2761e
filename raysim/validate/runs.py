"""Runs on a cluster of shaped hosts, whose links change from step to step."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from raysim.config import ConfigError
from raysim.network.topology import read_notation
from raysim.records import Run, write_table
from raysim.validate.cluster import Cluster
from raysim.validate.hosts import Hosts

CABLES = "cables.parquet"
CABLES_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("link", pa.string()),  # such as "50mbps+20ms"; null where cables are not shaped
        ("source", pa.int16()),
        ("target", pa.int16()),  # -1 at a switch
        ("sent_bytes", pa.int64()),  # Ray's own among them; of a piece's segments, headers count once
    ]
)


class FailedError(RuntimeError):
    """A run did not come to its end."""


class Driver:
    """The process that drives runs from the first host (see `driver`), seen from outside."""

    def __init__(self, hosts: Hosts, process: subprocess.Popen[str]) -> None:
        self._hosts = hosts
        self._process = process

    def train(self, config: Mapping[str, Any], folder: Path, links: Mapping[int, str | None]) -> Run:
        """Train to the last step of `links`, each step between links of its own (None: unshaped, as all before the first).

        At the end `cables.parquet` is in the folder: a row for each step of `links` and each cable.
        Raises FailedError where the run breaks off.
        """
        shaped: str | None = None
        sent: dict[int, dict[tuple[int, int], int]] = {}  # before each step, by cable
        self._hosts.shape(None)
        self._tell(json.dumps({"config": {**config, "steps": 1 + max(links)}, "out": str(folder)}))
        while "error" not in (answer := self._answer()):
            text = links.get(answer["step"])
            if text != shaped:
                self._hosts.shape(*link(text))
                shaped = text
            sent[answer["step"]] = self._hosts.sent_bytes()
            self._tell("")
        if answer["error"] is not None:
            raise FailedError(f"The run in {folder} broke off: {answer['error']}")
        sent[1 + max(links)] = self._hosts.sent_bytes()
        rows = [
            {"step": k, "link": text, "source": source, "target": target, "sent_bytes": count - sent[k][source, target]}
            for k, text in links.items()
            for (source, target), count in sent[k + 1].items()
        ]
        write_table(pa.Table.from_pylist(rows, CABLES_SCHEMA), folder / CABLES)
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

    The bits are None where the link is not shaped: None, or "free+20ms". Raises ConfigError where cables cannot be such a link.
    """
    network = read_notation(text or "free")
    if network is None or network.jitter_s or network.sharing != "pair":
        raise ConfigError(
            f"A link must be a rate, with a latency or without, as 20mbps or 50mbps+20ms, but got {text!r}."
        )
    assert isinstance(network.bandwidth_bps, float)
    assert isinstance(network.latency_s, float)
    return None if math.isinf(network.bandwidth_bps) else network.bandwidth_bps, network.latency_s
