"""Latency under Ray: the one-way trips of a packet from worker to worker.

Three distant hosts have a stage each, with the driver on the first, as raysim places it. A step has one microbatch, so every
worker waits for every packet. The time from the end of the sending action to the start of the receiving one grows by the trips
times the latency of the cables, which changes between the steps of one run.

Measured on 2026-11-25 with Ray 2.60, on cables of unlimited bandwidth (`raysim validate --trips --rounds 8`), at 20 and 80 ms, for
pairs of hosts with and without the driver's host; medians:

| packet | trips |
|---|---|
| 16 kB | 0.99 to 1.02, once 2.59 |
| 131 kB | 1.00 to 1.03 |
| 524 kB | 1.00 to 3.01 |
| 1 MB | 1.00 to 3.00 |
| 2 MB | 1.05 to 3.02 |
| 4 MB | 1.04 to 3.07, six of eight at 3 |

All packets travel in the call of their receiver. A large one exceeds the window of gRPC or TCP: a part is sent first, and the rest
once it is acknowledged, one round trip later. Windows grow with a connection's traffic, so the same packet takes one trip or three.
The end of a step takes two trips, a call to update and its reply.

Connections are idle between packets of a training step. Linux then resets the congestion window to 14 kB, unless
`net.ipv4.tcp_slow_start_after_idle` is 0, as on these hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysim.records import Run
from raysim_benchmarks.hosts.driver import driving
from raysim_benchmarks.hosts.namespaces import Hosts, parse_link
from raysim_benchmarks.workload import WARMUP_STEPS, bench_config

HOSTS = 3
LATENCIES = ("free+20ms", "free+80ms")
PATH = ((0, "F"), (1, "F"), (2, "F"), (2, "B"), (1, "B"), (0, "B"))  # (stage, op), each waiting for the previous one
PACKETS = (("Quantize(4)", 1), *(("Identity", samples) for samples in (1, 4, 8, 16, 31)))
"""Codec, and samples of 128 kB each uncompressed."""


class Trips(NamedTuple):
    """One-way trips between two successive actions of a step; medians and quartiles over steps."""

    source: int
    """Host of the sending worker."""
    target: int
    """Host of the receiving worker; source and target are 0, the driver's, for the end of a step."""
    wire_bytes: int
    latency_s: float
    low: float
    trips: float
    high: float


def measure_trips(out: Path, rounds: int) -> Iterator[Trips]:
    """Yield the trips of packets by size, path and latency, from `rounds` steps each; `out` keeps the runs.

    Raises ConfigError if this machine cannot make hosts, FailedError if a run fails.
    """
    turns = [turn for latency in LATENCIES for turn in (None, latency)]
    rates = dict(enumerate(islice(cycle(turns), rounds * len(turns)), start=WARMUP_STEPS))
    with Hosts.made(HOSTS, "distant") as hosts, driving(hosts) as driver:
        for codec, batch in PACKETS:
            run = driver.train(_config(codec, batch), out / f"{codec}-{batch}", rates)
            yield from trips_of(run, rates)


def _config(codec: str, batch: int) -> dict[str, Any]:
    config = bench_config(HOSTS).model_dump(mode="json")
    config["model"]["num_blocks"] = HOSTS
    changes = {"batch_size": batch, "num_microbatches": 1, "schedule": "GPipe", "forward": codec, "backward": codec}
    return config | changes | {"name": "trips", "profile_every_steps": 1}


def trips_of(run: Run, rates: dict[int, str | None]) -> Iterator[Trips]:
    """Yield the trips of a run whose steps had these latencies, relative to steps without latency."""
    starts, ends, sizes = _by_action(run, "start_s", "end_s", "wire_bytes")
    seconds = dict(zip(run.steps["step"].tolist(), run.steps["seconds"].tolist(), strict=True))
    steps = {rate: [step for step, at in rates.items() if at == rate] for rate in set(rates.values())}

    def trips(waits: dict[int, float], latency: str) -> tuple[float, tuple[float, float, float]]:
        latency_s = parse_link(latency)[1]
        without = float(np.median([waits[step] for step in steps[None]]))
        taken = [(waits[step] - without) / latency_s for step in steps[latency]]
        low, middle, high = np.quantile(taken, (0.25, 0.5, 0.75)).tolist()
        return latency_s, (low, middle, high)

    for latency in dict.fromkeys(rate for rate in rates.values() if rate):
        for sends, takes in pairwise(PATH):
            if sends[0] == takes[0]:
                continue
            waits = {k: starts[k, *takes] - ends[k, *sends] for k in rates}
            packet = (min(rates), *sends)
            latency_s, quartiles = trips(waits, latency)
            yield Trips(sends[0], takes[0], int(sizes[packet]), latency_s, *quartiles)
        rests = {k: seconds[k] - (ends[k, *PATH[-1]] - starts[k, *PATH[0]]) for k in rates}
        latency_s, quartiles = trips(rests, latency)
        yield Trips(0, 0, 0, latency_s, *quartiles)


def _by_action(run: Run, *columns: str) -> list[dict[tuple[int, int, str], Any]]:
    """Return columns of the run's actions, each by (step, stage, op)."""
    actions = run.actions
    keys = list(zip(*(actions[name].tolist() for name in ("step", "stage", "op")), strict=True))
    return [dict(zip(keys, actions[name].tolist(), strict=True)) for name in columns]
