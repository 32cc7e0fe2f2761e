"""Cases of the validation: pipelines, links, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from raysim.config import ConfigError, make_config, read_config
from raysim.pipeline.prepare import prepare
from raysim.schedules.families import Interleaved1F1B, parse_schedule
from raysim_benchmarks.harness import in_turn
from raysim_benchmarks.hosts.namespaces import parse_link
from raysim_benchmarks.workload import WARMUP_STEPS, bench_config

CALIBRATION_STEPS = 8  # after the warm-up steps


class Pipeline(NamedTuple):
    """A run over hosts of this machine, with a stage or a replica on each."""

    hosts: int
    replicas: int
    codec: str
    """Codec of both directions of all links, or the replica method if there are replicas."""
    schedule: str
    links: tuple[str, ...]
    """The links of the test run's shaped steps, such as "50mbps+20ms"."""
    recipe: str = ""
    """A recipe's name, or the path of a configuration; empty for the narrow GPT of the campaign."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        copies = f"-{self.replicas}-replicas" if self.replicas > 1 else ""
        of = f"-{Path(self.recipe).stem}" if self.recipe else ""
        return f"{self.hosts}-hosts{copies}-{self.codec}-{self.schedule}{of}" + ("-distant" if self.distant else "")

    @property
    def distant(self) -> bool:
        """True if any link has a latency."""
        return any(parse_link(text)[1] > 0 for text in self.links)

    @property
    def wiring(self) -> str:
        """The wiring of its hosts, see `hosts`: replicas are on a switch, with one port each."""
        if self.replicas > 1:
            return "switch"
        return "distant" if self.distant else "pairs"

    def config(self, steps: int) -> dict[str, Any]:
        """Return a run of `steps` steps, all of them profiled.

        The campaign's model is a narrow GPT: narrow models need fewer operations per byte of activations, so that the wire matters.
        Replicas train a wider one, since they send as many bytes as the weights have.
        """
        schedule = parse_schedule(self.schedule)
        turns = schedule.stages_per_worker if isinstance(schedule, Interleaved1F1B) else 1
        stages = self.hosts // self.replicas * turns
        changes: dict[str, Any] = {"name": "validate", "steps": steps, "profile_every_steps": 1}
        changes |= {"schedule": self.schedule, "num_replicas": self.replicas}
        if self.replicas > 1:
            changes |= {"replica_gradient": self.codec}
        else:
            changes |= {"forward": self.codec, "backward": self.codec}
        if self.recipe:
            config = read_config(self.recipe, [f"num_stages={stages}"]).model_dump(mode="json")
            return config | changes | {"checkpoint_every_steps": 0, "evaluate_every_steps": 0}
        changes["batch_size"] = 16
        changes["model"] = {"name": "gpt", "num_blocks": max(4, stages), "width": 128, "num_heads": 4, "tied": False}
        if self.replicas > 1:
            changes["num_microbatches"] = 1
            changes["model"] |= {"num_blocks": 1, "width": 512}
        return bench_config(stages).model_dump(mode="json") | changes


DENSE_LINKS = ("20mbps", "50mbps", "100mbps")
HALF_LINKS = ("5mbps", "20mbps", "50mbps")  # with 8 bits a value
FEW_LINKS = ("3mbps", "10mbps", "30mbps")  # with 4 bits a value, or a tenth of the values
FAR_LINKS = ("50mbps+20ms", "200mbps+20ms", "50mbps+80ms", "200mbps+80ms")
LINKS = {
    "Identity": DENSE_LINKS,
    "Quantize(8)": HALF_LINKS,
    "Quantize(4)": FEW_LINKS,
    "TopK(0.1)": FEW_LINKS,
    "ErrorFeedback(TopK(0.1))": FEW_LINKS,
}
REPLICA_LINKS = {
    "Identity": ("100mbps", "200mbps", "500mbps"),
    "PowerSGD(32)": ("20mbps", "50mbps", "100mbps"),
    "PowerGossip(32)": ("20mbps", "50mbps", "100mbps"),
    "ErrorFeedback(TopK(0.1))": ("50mbps", "100mbps", "200mbps"),
}


def campaign() -> list[Pipeline]:
    """Return the pipelines that `raysim validate` trains by default; pipelines over the same hosts are adjacent."""
    chosen = [
        *product((2,), LINKS, ("1F1B", "GPipe")),
        *product((2,), ("Identity", "Quantize(8)"), ("Interleaved1F1B(2)", "ZBH1")),
        *product((3,), ("Identity", "Quantize(8)", "TopK(0.1)"), ("1F1B", "GPipe")),
        (3, "Identity", "ZBH1"),
        *product((4,), ("Identity", "Quantize(8)"), ("1F1B",)),
        (4, "Identity", "GPipe"),
    ]
    near = [Pipeline(hosts, 1, codec, schedule, LINKS[codec]) for hosts, codec, schedule in chosen]
    far = [Pipeline(hosts, 1, codec, "1F1B", FAR_LINKS) for hosts in (2, 3) for codec in ("Identity", "Quantize(4)")]
    replicas = [Pipeline(4, 4, method, "1F1B", links) for method, links in REPLICA_LINKS.items()]
    return [*near, *far, *replicas]


def pipelines(
    hosts: Sequence[int],
    replicas: int,
    codecs: Sequence[str],
    schedules: Sequence[str],
    links: Sequence[str],
    recipe: str = "",
) -> Iterator[Pipeline]:
    """Yield every combination; combinations over the same hosts are adjacent. Raises ConfigError if one is impossible.

    `hosts`: number of hosts of all replicas together. `recipe`: see `Pipeline.recipe`.
    """
    for count, codec, schedule in product(hosts, codecs, schedules):
        if count % replicas:
            raise ConfigError(f"`--replicas` must divide `--hosts` ({count}), but got {replicas}.")
        pipeline = Pipeline(count, replicas, codec, schedule, tuple(links), recipe)
        if replicas > 1 and pipeline.distant:
            raise ConfigError("`--rate` must be without latency for replicas, which meet at a switch that has none.")
        config = make_config(pipeline.config(1))
        if recipe:
            prepare(config)  # checks the cuts of the model, and its data
        yield pipeline


def links_by_step(links: Sequence[str], rounds: int) -> dict[int, str | None]:
    """Return the link of every step after the warm-up: each link in turn, paired with an unshaped step (None).

    The unshaped step comes first in one round and second in the next, since a method's even and odd steps may differ in work.
    """
    turns = (step for number in range(rounds) for shaped in links for step in in_turn([None, shaped], number))
    return dict(enumerate(turns, start=WARMUP_STEPS))
