"""Training runs on a cluster of hosts whose links change from step to step.

Run as a program (`python -m raysim_benchmarks.hosts.driver`), it is a process on the first host that pauses training before every
step while links are shaped. A line of its input is JSON, `{"config": {...}, "out": FOLDER}`. Before every step it answers
{"step": NUMBER} and waits for a line; at the end it answers {"error": null} or a sentence. Evaluations and checkpoints are left out,
since they are not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from raysim.config import make_config
from raysim.records import Run, write_table
from raysim.training.run import Training
from raysim_benchmarks.harness import FailedError
from raysim_benchmarks.hosts.cluster import Cluster
from raysim_benchmarks.hosts.namespaces import Hosts, parse_link

CABLES = "cables.parquet"
CABLES_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("link", pa.string()),  # such as "50mbps+20ms"; null if unshaped
        ("source", pa.int16()),
        ("target", pa.int16()),  # -1 at a switch
        ("sent_bytes", pa.int64()),  # with Ray's own; headers count once per piece
    ]
)


class Driver:
    """A handle on the driver process of the first host."""

    def __init__(self, hosts: Hosts, process: subprocess.Popen[str]) -> None:
        self._hosts = hosts
        self._process = process

    def train(self, config: Mapping[str, Any], folder: Path, links: Mapping[int, str | None]) -> Run:
        """Train to the last step of `links`, which gives the links of each step (None or missing: unshaped).

        Writes `cables.parquet` to the folder, with a row for each step of `links` and each cable.
        Raises FailedError if the run fails.
        """
        shaped: str | None = None
        sent: dict[int, dict[tuple[int, int], int]] = {}  # before each step, by cable
        self._hosts.shape(None)
        self._tell(json.dumps({"config": {**config, "steps": 1 + max(links)}, "out": str(folder)}))
        while "error" not in (answer := self._answer()):
            text = links.get(answer["step"])
            if text != shaped:
                self._hosts.shape(*parse_link(text))
                shaped = text
            sent[answer["step"]] = self._hosts.sent_bytes()
            self._tell("")
        if answer["error"] is not None:
            raise FailedError(f"The run in {folder} failed: {answer['error']}")
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
    with Cluster.started(hosts) as cluster, cluster.driver("-m", __name__) as process:
        yield Driver(hosts, process)


def main() -> None:
    """Serve the input until it ends."""
    for line in sys.stdin:
        try:
            _train(**json.loads(line))
            _answer(error=None)
        except Exception as error:  # the parent reports which case failed
            traceback.print_exc()
            _answer(error=f"{type(error).__name__}: {error}")


def _train(config: dict[str, object], out: str) -> None:
    training = Training(make_config(config), out=out)
    events = training.events()
    for step in range(1, training.plan.num_steps + 1):
        next(event for event in events if event.kind == "step")
        if step < training.plan.num_steps:
            _answer(step=step)
            sys.stdin.readline()
    events.close()


def _answer(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
