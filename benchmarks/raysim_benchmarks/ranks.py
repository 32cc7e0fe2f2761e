"""Torch's side of a comparison: programs of several ranks, one process each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

from raysim_benchmarks.harness import FailedError
from raysim_benchmarks.hosts.namespaces import Hosts


def run_ranks(
    module: str, count: int, steps: int, *, hosts: Hosts | None = None, timeout_s: float = 900.0
) -> list[Any]:
    """Run `python -m MODULE RANK RANKS ADDRESS PORT STEPS` for each rank; return the last JSON value of each.

    Ranks run on this machine's loopback, or on a host each. Raises FailedError if a rank dies or is late.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = hosts.address(0) if hosts else "127.0.0.1"
    deadline = time.monotonic() + timeout_s
    with hosts.without_loopback() if hosts else nullcontext():
        ranks = []
        try:
            for rank in range(count):
                words = [sys.executable, "-m", module, *map(str, (rank, count, address, port, steps))]
                ranks.append(
                    subprocess.Popen(
                        hosts.inside(rank, *words) if hosts else words,
                        stdout=subprocess.PIPE,
                        text=True,
                        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # no warnings on addresses without names
                    )
                )
            values = []
            for rank, process in enumerate(ranks):
                output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
                if process.returncode:
                    raise FailedError(f"Rank {rank} of {module} ended with exit code {process.returncode}.")
                values.append(json.loads(output.splitlines()[-1]))
            return values
        except subprocess.TimeoutExpired:
            raise FailedError(f"The ranks of {module} did not end within {timeout_s:.0f} s.") from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
