"""The cases: which pipelines are trained over which links, and in what order."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from raysim.bench.workload import WARMUP_STEPS, bench_config

CODECS = ("Identity", "Quantize(8)", "Quantize(4)", "TopK(0.1)", "ErrorFeedback(TopK(0.1))")
SCHEDULES = ("1F1B", "GPipe")
RATES = ("20mbps", "100mbps", "500mbps")


class Pipeline(NamedTuple):
    """A run with a stage on each host, the same codec both ways."""

    hosts: int
    codec: str
    schedule: str

    @property
    def name(self) -> str:
        """A name for its folder."""
        return f"{self.hosts}-hosts-{self.codec}-{self.schedule}"

    def config(self) -> dict[str, Any]:
        """Return the run: the GPT of `raysim bench pipeline` at half its batch, all of whose steps are profiled."""
        changes = {"batch_size": 16, "forward": self.codec, "backward": self.codec, "schedule": self.schedule}
        config = bench_config(self.hosts).model_dump(mode="json")
        return config | changes | {"name": "validate", "profile_every_steps": 1}


def pipelines(hosts: int) -> list[Pipeline]:
    """Return all pipelines over so many hosts."""
    return [Pipeline(hosts, codec, schedule) for codec, schedule in product(CODECS, SCHEDULES)]


def rates_by_step(rounds: int) -> dict[int, str | None]:
    """Return the rate of every step after those that warm up: each in turn, after a step between unshaped links (None).

    So what drifts, such as the speed of a shared machine, comes to both alike.
    """
    turns = [rate for _ in range(rounds) for shaped in RATES for rate in (None, shaped)]
    return dict(enumerate(turns, start=WARMUP_STEPS))
