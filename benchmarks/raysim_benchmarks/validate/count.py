"""Bytes on every cable between hosts, compared with the bytes in the records.

A packet takes the cable between its two workers. A pipeline with a stage on each host is trained with few and with many microbatches.
The bytes on a cable that are not packets of `links.parquet` grow with the number of packets. The slope is the traffic of Ray, gRPC and
TCP for a packet (and for the one coming back); the constant is their other traffic in a step, such as heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from raysim.config import make_config
from raysim.records import Run
from raysim_benchmarks.hosts.driver import CABLES, Driver, driving
from raysim_benchmarks.hosts.namespaces import Hosts
from raysim_benchmarks.validate.cases import Pipeline
from raysim_benchmarks.workload import WARMUP_STEPS

MICROBATCHES = (2, 8)
SAMPLES = 4  # of a microbatch, so that packets of both runs have equal sizes
CODECS = ("Identity", "Quantize(8)", "Quantize(4)", "TopK(0.1)", "TopK(0.03)")


class CableBytes(NamedTuple):
    """Bytes that a host sent to another in a step, medians over steps with the greater number of microbatches."""

    hosts: int
    codec: str
    source: int
    target: int
    packets: int
    wire_bytes: float
    """Bytes of the packets in the records."""
    cable_bytes: float
    beside_packet: float
    """Additional bytes for each packet."""
    beside_step: float
    """Additional bytes for each step."""
    seconds: float
    """Seconds of a step."""

    def __str__(self) -> str:
        """Return a line to print."""
        sent = (
            f"{self.packets} packets of {self.wire_bytes / self.packets:,.0f} bytes" if self.packets else "no packets"
        )
        beside = f"{self.beside_packet:,.0f} bytes of overhead per packet and " if self.packets else ""
        return (
            f"{self.hosts} hosts, {self.codec}, {self.source} -> {self.target}: {sent} a step; the cable carried "
            f"{self.cable_bytes:,.0f} bytes: {beside}{self.beside_step:,.0f} a step of {self.seconds:.2f} s"
        )


def count_bytes(out: Path, hosts: Sequence[int], codecs: Sequence[str], steps: int) -> Iterator[CableBytes]:
    """Yield the bytes on every cable by number of hosts and codec, from `steps` steps each; `out` keeps the runs.

    Raises ConfigError if this machine cannot make hosts or a codec is impossible, FailedError if a run fails.
    """
    for count, codec in product(hosts, codecs):  # check all before making hosts
        make_config(Pipeline(count, 1, codec, "1F1B", ()).config(1))
    for count in hosts:
        with Hosts.made(count) as made, driving(made) as driver:
            for codec in codecs:
                yield from _of_codec(driver, out / f"{count}-{codec}", count, codec, steps)


def _of_codec(driver: Driver, folder: Path, hosts: int, codec: str, steps: int) -> Iterator[CableBytes]:
    pipeline = Pipeline(hosts, 1, codec, "1F1B", ())
    links = dict.fromkeys(range(WARMUP_STEPS, WARMUP_STEPS + steps))
    runs = []
    for microbatches in MICROBATCHES:
        size = {"num_microbatches": microbatches, "batch_size": SAMPLES * microbatches}
        changes = size | {"profile_every_steps": 0}
        run = driver.train(pipeline.config(1) | changes, folder / str(microbatches), links)
        runs.append((run, pq.read_table(folder / str(microbatches) / CABLES).to_pandas()))
    yield from cables_of(hosts, codec, runs)


def cables_of(hosts: int, codec: str, runs: Sequence[tuple[Run, pd.DataFrame]]) -> Iterator[CableBytes]:
    """Yield the bytes on every cable of two runs with a stage on each host, with few and with many microbatches."""
    for source in range(hosts):
        for target in (host for host in range(hosts) if host != source):
            few, many = (_a_step(run, cables, source, target) for run, cables in runs)
            packets, wire, cable, seconds = many
            more = packets - few[0]
            slope = ((cable - wire) - (few[2] - few[1])) / more if more else 0.0
            rest = cable - wire - slope * packets
            yield CableBytes(hosts, codec, source, target, int(packets), wire, cable, slope, rest, seconds)


def _a_step(run: Run, cables: pd.DataFrame, source: int, target: int) -> tuple[float, float, float, float]:
    """Return a cable's packets, their bytes, all its bytes, and the step's seconds, as medians over the run's steps."""
    here = cables[(cables["source"] == source) & (cables["target"] == target)].set_index("step")["sent_bytes"]
    direction = "forward" if source < target else "backward"
    sent = run.links[(run.links["direction"] == direction) & (run.links["boundary"] == min(source, target))]
    sent = sent[sent["step"].isin(here.index) & (abs(source - target) == 1)]
    totals = sent.groupby("step")[["packets", "wire_bytes"]].sum().reindex(here.index, fill_value=0)
    seconds = run.steps.set_index("step")["seconds"].reindex(here.index)
    medians = (totals["packets"], totals["wire_bytes"], here, seconds)
    packets, wire, cable, length = (float(np.median(each)) for each in medians)
    return packets, wire, cable, length
