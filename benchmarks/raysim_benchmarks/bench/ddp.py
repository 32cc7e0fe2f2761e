"""DistributedDataParallel over slow links between hosts of this machine: plain, with torch's own hooks, and with raysim's.

Run as a program, it is one rank: `python -m raysim_benchmarks.bench.ddp RANK RANKS ADDRESS PORT STEPS`. It prints each
contender's median seconds of a step as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from raysim.cli.terminal import console
from raysim.config import ConfigError
from raysim.distributed import ddp
from raysim.pipeline.optimizer import make_optimizer
from raysim.pipeline.prepare import Workload, prepare
from raysim.units import format_bandwidth, format_seconds
from raysim.workloads.losses import CrossEntropy
from raysim_benchmarks.harness import alternate, seconds_of
from raysim_benchmarks.hosts.namespaces import Hosts, check_machine, network, parse_link
from raysim_benchmarks.ranks import run_ranks

WARMUP_STEPS = 4  # the first steps of torch's PowerSGD send everything
PROGRAM = "raysim_benchmarks.bench.ddp"
BUCKET_MB = 100  # one bucket: with two, torch's PowerSGD deadlocks both threads of gloo
RANK = 4
TIMEOUT_S = 120.0  # of a contender


def perceptron(width: int = 1024) -> nn.Sequential:
    """Return a model of 1.1 million parameters, most of them in one square matrix."""
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def _powersgd(model: DistributedDataParallel) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)


CONTENDERS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "DDP": lambda model: None,
    "torch fp16_compress_hook": lambda model: model.register_comm_hook(None, fp16_compress_hook),
    "torch powerSGD_hook(4)": _powersgd,
    **{
        method: partial(ddp.hook, method=method)
        for method in (f"PowerSGD({RANK})", "ErrorFeedback(TopK(0.01))", "Quantize(4)")
    },
}


def bench_ddp(
    hosts: Sequence[int] = (2, 4), rates: Sequence[str] = ("100mbps", "20mbps"), *, steps: int = 10
) -> list[dict[str, Any]]:
    """Print and return every contender's seconds of a step, and the step predicted by replay, on each network.

    `rates`: bandwidths of the cables, one from each host to a switch. `raysim replay` predicts over gloo, from a run of the same
    model and method in one process. Raises ConfigError if this machine cannot make hosts or links, FailedError if a rank fails.
    """
    links = [_bandwidth_bps(rate) for rate in rates]
    check_machine()
    rows: list[dict[str, Any]] = []
    for num_hosts in hosts:
        predicted = _predictions(num_hosts, links)
        with Hosts.made(num_hosts, "switch") as made:
            for bandwidth_bps in links:
                made.shape(bandwidth_bps)
                first, *_ = run_ranks(PROGRAM, num_hosts, steps, hosts=made, timeout_s=TIMEOUT_S * len(CONTENDERS))
                for name, seconds in first.items():
                    row = {"hosts": num_hosts, "bandwidth_bps": bandwidth_bps, "contender": name, "step_s": seconds}
                    rows.append(row | {"predicted_s": predicted.get((name, bandwidth_bps))})
    _print(rows)
    return rows


def _bandwidth_bps(rate: str) -> float:
    """Return the bandwidth of a shaped link without latency, in bit/s."""
    bandwidth_bps, latency_s = parse_link(rate)
    if bandwidth_bps is None or latency_s:
        raise ConfigError(f"`--rate` must be a bandwidth, such as 100mbps, but got {rate!r}.")
    return bandwidth_bps


def _config(replicas: int, method: str) -> dict[str, Any]:
    return {
        "model": {"name": "raysim_benchmarks.bench.ddp:perceptron"},
        "data": {"name": "digits"},
        "num_stages": 1,
        "num_replicas": replicas,
        "num_microbatches": 1,
        "batch_size": 32 * replicas,
        "replica_gradient": method,
        "steps": 30,
        "profile_every_steps": 3,
        "device": "cpu",
    }


def _predictions(replicas: int, links: Sequence[float]) -> dict[tuple[str, float], float]:
    """Return the step predicted by replay for each method on each link, from runs in one process."""
    from raysim.analysis import replay
    from raysim.analysis.runs.prices import in_company
    from raysim.config import make_config
    from raysim.training.train import train

    networks = {link: network("switch", link) for link in links}
    predicted: dict[tuple[str, float], float] = {}
    with TemporaryDirectory() as folder:
        names = {"DDP": "Identity", **{name: name for name in CONTENDERS if not name.startswith(("DDP", "torch"))}}
        runs = [
            train(make_config(_config(replicas, method)), engine="inline", out=Path(folder) / f"{i}")
            for i, method in enumerate(names.values())
        ]
        for link, chosen in networks.items():
            steps = replay(in_company([run.folder for run in runs], transport="gloo"), chosen)["step_s"].tolist()
            predicted |= {(name, link): step for name, step in zip(names, steps, strict=True)}
    return predicted


def run_rank(rank: int, workload: Workload, steps: int, *, address: str, port: int) -> dict[str, float]:
    """Train as one rank with every contender in turn, step by step; return each one's median seconds of a step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    plan = workload.plan
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=plan.num_replicas,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    sides = {name: _side(add_hook, workload, rank) for name, add_hook in CONTENDERS.items()}
    runs = alternate(sides, steps, warm_up=WARMUP_STEPS)
    dist.barrier()
    dist.destroy_process_group()
    return {name: statistics.median(run[name] for run in runs) for name in sides}


def _side(add_hook: Callable[[DistributedDataParallel], object], workload: Workload, rank: int) -> Callable[[], float]:
    """Return a function that trains one step with a hook and returns its seconds."""
    torch.manual_seed(0)
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=BUCKET_MB)
    add_hook(model)
    plan, split = workload.plan, workload.data.train
    optimizer = make_optimizer(plan.config.optimizer, model.named_parameters())
    assert optimizer is not None
    steps = count()

    def train() -> None:
        _, ids = plan.microbatch(next(steps), 0, rank)
        CrossEntropy()(model(split.inputs(ids, 0, 0, True)), split.targets(ids)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def step() -> float:
        dist.barrier()
        return seconds_of(train)

    return step


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="A step of DDP between hosts")
    for head in ("hosts", "link", "gradients", "step", "of DDP", "predicted"):
        table.add_column(head, justify="left" if head == "gradients" else "right")
    plain = {(row["hosts"], row["bandwidth_bps"]): row["step_s"] for row in rows if row["contender"] == "DDP"}
    for row in rows:
        share = row["step_s"] / plain[row["hosts"], row["bandwidth_bps"]]
        predicted = "" if row["predicted_s"] is None else format_seconds(row["predicted_s"])
        cells = (format_bandwidth(row["bandwidth_bps"]), row["contender"], format_seconds(row["step_s"]))
        table.add_row(str(row["hosts"]), *cells, f"{share:.2f}", predicted)
    console().print(table)


def main() -> None:
    """Run one rank."""
    from raysim.config import make_config

    rank, ranks, address, port, steps = sys.argv[1:]
    config = make_config(_config(int(ranks), "Identity") | {"steps": WARMUP_STEPS + int(steps)})
    step_s = run_rank(int(rank), prepare(config), int(steps), address=address, port=int(port))
    print(json.dumps(step_s))


if __name__ == "__main__":
    main()
