"""DistributedDataParallel over slow links between hosts of this machine: plain, with torch's own hooks, and with raysim's.

As a program it is one rank: `python -m raysim.bench.ddp RANK RANKS ADDRESS PORT STEPS`. The first rank prints the median seconds of
a step of every contender as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
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

from raysim.config import ConfigError
from raysim.distributed import ddp
from raysim.pipeline.optimizer import make_optimizer
from raysim.pipeline.plan import Workload, prepare
from raysim.show.terminal import console
from raysim.validate.hosts import Hosts, check_machine, network
from raysim.validate.runs import FailedError, link
from raysim.workloads.losses import CrossEntropy

WARMUP_STEPS = 4  # the first of torch's PowerSGD send everything
PORT = 29_611
BUCKET_MB = 100  # one bucket: with two, torch's PowerSGD waits on both threads of gloo for work that they would do
RANK = 4
TIMEOUT_S = 120.0


def perceptron(width: int = 1024) -> nn.Sequential:
    """Return a model of 1.1 million parameters, whose gradients are one dense square for the most part."""
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
    """Print and return the seconds of a step of every contender, and the step that replay predicts, on each network.

    `rates`: bandwidths of the hosts, each of which has one cable, to a switch. The prediction is made by `raysim replay` from a run
    of the same model and method in one process, over gloo. Raises ConfigError where this machine cannot make hosts or links,
    FailedError where a rank fails.
    """
    links = [_bandwidth_bps(rate) for rate in rates]
    check_machine()
    rows: list[dict[str, Any]] = []
    for count in hosts:
        predicted = _predictions(count, links)
        with Hosts.made(count, "switch") as made:
            for bandwidth_bps in links:
                made.shape(bandwidth_bps)
                for name, seconds in _measured(made, steps).items():
                    row = {"hosts": count, "bandwidth_bps": bandwidth_bps, "contender": name, "step_s": seconds}
                    rows.append(row | {"predicted_s": predicted.get((name, bandwidth_bps))})
    _print(rows)
    return rows


def _bandwidth_bps(rate: str) -> float:
    """Return the bits a second of a shaped link without latency."""
    bandwidth_bps, latency_s = link(rate)
    if bandwidth_bps is None or latency_s:
        raise ConfigError(f"`--rate` must be a bandwidth, as 100mbps, but got {rate!r}.")
    return bandwidth_bps


def _config(replicas: int, method: str) -> dict[str, Any]:
    return {
        "model": {"name": "raysim.bench.ddp:perceptron"},
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
    """Return the step that replay predicts of each method on each link, from runs in one process."""
    from raysim.analysis import replay
    from raysim.analysis.pricing.pooled import in_company
    from raysim.config import make_config
    from raysim.training.run import train

    networks = {link: network("switch", link) for link in links}
    predicted: dict[tuple[str, float], float] = {}
    with TemporaryDirectory() as folder:
        names = {"DDP": "Identity", **{name: name for name in CONTENDERS if not name.startswith(("DDP", "torch"))}}
        runs = [
            train(make_config(_config(replicas, method)), engine="inline", out=Path(folder) / f"{index}")
            for index, method in enumerate(names.values())
        ]
        for link, chosen in networks.items():
            steps = replay(in_company([run.folder for run in runs], transport="gloo"), chosen)["step_s"].tolist()
            predicted |= {(name, link): step for name, step in zip(names, steps, strict=True)}
    return predicted


def _measured(hosts: Hosts, steps: int) -> dict[str, float]:
    """Return the seconds of a step of every contender, of the first rank."""
    ranks = []
    for rank in range(hosts.count):
        subprocess.run(
            hosts.inside(rank, "ip", "address", "delete", "127.0.0.1/8", "dev", "lo"), capture_output=True, check=False
        )  # gloo takes the first address of a device
        words = (
            sys.executable,
            "-m",
            "raysim.bench.ddp",
            str(rank),
            str(hosts.count),
            hosts.address(0),
            str(PORT),
            str(steps),
        )
        ranks.append(subprocess.Popen(hosts.inside(rank, *words), stdout=subprocess.PIPE, text=True))
    try:
        for rank, process in enumerate(ranks):
            said, _ = process.communicate(timeout=TIMEOUT_S * len(CONTENDERS))
            if process.returncode:
                raise FailedError(f"Rank {rank} of DistributedDataParallel ended with exit code {process.returncode}.")
            if rank == 0:
                found: dict[str, float] = json.loads(said.splitlines()[-1])
    except subprocess.TimeoutExpired as late:
        raise FailedError(f"DistributedDataParallel did not end within {late.timeout:.0f} s.") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return found


def run_rank(rank: int, workload: Workload, steps: int, *, address: str, port: int) -> dict[str, float]:
    """Train as one rank with every contender in turn; return the median seconds of a step of each."""
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
    found = {}
    for name, prepare_hook in CONTENDERS.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(perceptron(), bucket_cap_mb=BUCKET_MB)
        prepare_hook(model)
        optimizer = make_optimizer(plan.config.optimizer, model.named_parameters())
        assert optimizer is not None
        seconds = []
        for step in range(WARMUP_STEPS + steps):
            _, ids = plan.microbatch(step, 0, rank)
            split = workload.data.train
            dist.barrier()
            start = time.perf_counter()
            CrossEntropy()(model(split.inputs(ids, 0, 0, True)), split.targets(ids)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
        found[name] = statistics.median(seconds[WARMUP_STEPS:])
    dist.barrier()
    dist.destroy_process_group()
    return found


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="A step of DDP between hosts")
    for head in ("hosts", "link", "gradients", "step", "of DDP", "predicted"):
        table.add_column(head, justify="left" if head == "gradients" else "right")
    plain = {(row["hosts"], row["bandwidth_bps"]): row["step_s"] for row in rows if row["contender"] == "DDP"}
    for row in rows:
        share = row["step_s"] / plain[row["hosts"], row["bandwidth_bps"]]
        predicted = "" if row["predicted_s"] is None else f"{row['predicted_s']:.3f} s"
        link = f"{row['bandwidth_bps'] / 1e6:g} Mbit/s"
        table.add_row(str(row["hosts"]), link, row["contender"], f"{row['step_s']:.3f} s", f"{share:.2f}", predicted)
    console().print(table)


def main() -> None:
    """Run one rank."""
    from raysim.config import make_config

    rank, ranks, address, port, steps = sys.argv[1:]
    config = make_config(_config(int(ranks), "Identity") | {"steps": WARMUP_STEPS + int(steps)})
    found = run_rank(int(rank), prepare(config), int(steps), address=address, port=int(port))
    if int(rank) == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
