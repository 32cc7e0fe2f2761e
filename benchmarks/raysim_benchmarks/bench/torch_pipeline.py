"""The GPT of `bench_config` under torch.distributed.pipelining with 1F1B over gloo, one process and one thread per stage.

Run as a program, it is one rank: `python -m raysim_benchmarks.bench.torch_pipeline RANK RANKS ADDRESS PORT STEPS`. It prints the
seconds and the CPU seconds of a step as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from raysim.pipeline.optimizer import make_optimizer
from raysim.pipeline.prepare import Workload, prepare
from raysim_benchmarks.workload import WARMUP_STEPS, bench_config


def run_rank(rank: int, workload: Workload, steps: int, *, address: str, port: int) -> tuple[float, float]:
    """Train one stage, with the others at `address`; return seconds and CPU seconds of a step, between two barriers."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    plan, config = workload.plan, workload.plan.config
    last = plan.num_stages - 1
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=plan.num_stages)
    module = workload.modules[rank].train()
    stage = PipelineStage(module, rank, plan.num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.num_microbatches, loss_fn=plan.task.loss)
    optimizer = make_optimizer(config.optimizer, module.named_parameters())
    assert optimizer is not None
    start = cpu_start = 0.0
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
        ids = [plan.microbatch(step, m)[1] for m in range(config.num_microbatches)]
        if rank == 0:
            schedule.step(torch.cat([workload.data.train.inputs(part, 0, config.seed, True) for part in ids]))
        elif rank == last:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.cat([workload.data.train.targets(part) for part in ids]), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    dist.destroy_process_group()
    return seconds / steps, cpu_s / steps


def main() -> None:
    """Run one rank."""
    rank, ranks, address, port, steps = sys.argv[1:]
    print(
        json.dumps(run_rank(int(rank), prepare(bench_config(int(ranks))), int(steps), address=address, port=int(port)))
    )


if __name__ == "__main__":
    main()
