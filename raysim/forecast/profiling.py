"""A profile of this machine: the seconds of forwards and backwards, from a short real run in this process."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from raysim.config import ConfigError, RunConfig
from raysim.engine.inline import InlineEngine
from raysim.forecast.replica_costs import replica_costs
from raysim.network.profile import Profile, mean_profile
from raysim.network.recorded import profiles_from_actions
from raysim.pipeline.link import LinkAccount
from raysim.pipeline.plan import averaged_shapes
from raysim.pipeline.prepare import Workload, prepare

WARMUP_STEPS = 2  # steps that load and compile, and are not recorded


def record_profile(config: RunConfig, *, num_steps: int = 5) -> Profile:
    """Return the costs of actions on this machine, from a short real run in this process, one action at a time.

    `num_steps` steps are recorded, each after a step that is not. Stages run one after another and have the machine to
    themselves. Ray's time for a packet is the transport's, and not included.
    """
    if num_steps < 1:
        raise ConfigError(f"`num_steps` must be an integer of at least 1, but got {num_steps}.")
    total = WARMUP_STEPS + 2 * num_steps
    changes = {"steps": total, "epochs": None, "profile_every_steps": 2}
    alone = {
        "num_replicas": 1,
        "replica_gradient": "Identity",
        "fused_embedding": False,
        "clock": "measured",
        "profile": None,
        "transport": "ray",
        "codec_speed": None,
    }
    alone["batch_size"] = config.batch_size // config.num_replicas  # the share of one replica
    workload = prepare(config.changed(**changes | alone))
    engine = InlineEngine(workload)
    engine.check()
    engine.start()
    columns: dict[str, list[object]] = {}
    links: list[LinkAccount] = []
    updates_s = []
    try:
        for step in range(total):
            reports = engine.step(step)
            actions = [action for report in reports for action in report.actions]
            if step < WARMUP_STEPS or not actions:
                continue
            links += [link for report in reports for link in report.links if link.coded_bytes]
            updates_s.append(sum(report.update_s for report in reports))
            for action in actions:
                row = action._asdict() | {"step": step, "replica": 0}
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
    finally:
        engine.close()
    profiles = profiles_from_actions({name: np.array(values) for name, values in columns.items()})
    return replace(
        mean_profile(list(profiles.values())),
        update_s=_by_stage(workload, statistics.median(updates_s)),
        codec_bytes_per_s=_codec_speed(config, workload, links),
        microbatch_samples=config.microbatch_size,
        source=_source(config, workload, len(profiles)),
    )


def _codec_speed(config: RunConfig, workload: Workload, links: Sequence[LinkAccount]) -> float:
    """Return the bytes a second that the codecs of links and replica methods go over; 0 if there are none."""
    work: list[tuple[float, float]] = [(link.coded_bytes, link.codec_s) for link in links]
    if config.num_replicas > 1 and not any(method.uses_previous_gradients for method in config.replica_methods()):
        shapes = [
            averaged_shapes(stage, module, config, workload.plan.tied) for stage, module in enumerate(workload.modules)
        ]
        work += [
            (cost.coded_bytes, cost.method_s) for cost in replica_costs(config, shapes, None, []) if cost.coded_bytes
        ]
    return sum(size for size, _ in work) / sum(seconds for _, seconds in work) if work else 0.0


def _by_stage(workload: Workload, updates_s: float) -> NDArray[np.float64]:
    """Return the seconds of every stage's update, shares of all updates by the number of parameters."""
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in workload.modules]
    return updates_s * np.array(sizes, np.float64) / max(sum(sizes), 1)


def _source(config: RunConfig, workload: Workload, num_steps: int) -> str:
    size = config.microbatch_size
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else f"{config.threads_per_stage} thread(s) of {platform.machine()}"
    return (
        f"raysim profile of {config.name} on {where}, host {platform.node()}: {workload.plan.num_stages} stages, "
        f"microbatches of {size} samples, mean of {num_steps} steps"
    )
