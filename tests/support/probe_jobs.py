"""Trainings on several ranks with and without a probe around them."""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import raysim

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 8, 4, 5
CANDIDATES = ["TopK(0.1)", "ErrorFeedback(Quantize(4))"]
GRADIENTS = ["ErrorFeedback(TopK(0.05))", "PowerSGD(2)"]


def batch(step, rank=0):
    return torch.randn(ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def pipeline(rank, world_size, out=None):
    """Return this rank's losses and parameters of a pipeline of one stage a rank, with a probe around it if `out` is given."""
    module = layers(rank)
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []

    def loop():
        for step in range(STEPS):
            found = []
            x = batch(step)
            last = rank == world_size - 1
            schedule.step(*((x,) if rank == 0 else ()), target=x if last else None, losses=found if last else None)
            optimizer.step()
            optimizer.zero_grad()
            losses.extend(loss.item() for loss in found)

    if out is None:
        loop()
    else:
        with raysim.probe(stage, candidates=CANDIDATES, out=out, steps=2, every=2, num_microbatches=MICROBATCHES):
            loop()
    return losses, [p.detach() for p in module.parameters()]


def replicas(rank, world_size, out=None):
    """Return this rank's losses and parameters under DDP, with a probe around it if `out` is given."""
    model = DistributedDataParallel(layers(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def loop():
        for step in range(STEPS):
            halves = batch(step, rank).chunk(2)
            with model.no_sync():
                model(halves[0]).square().mean().backward()
            loss = model(halves[1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    if out is None:
        loop()
    else:
        with raysim.probe(model, gradients=GRADIENTS, out=out, steps=3, every=1, num_microbatches=2):
            loop()
    return losses, [p.detach() for p in model.parameters()]


def refusals(rank, world_size, folder):
    """Return the sentences that this rank is given."""
    model = DistributedDataParallel(layers(0))
    stage = PipelineStage(layers(rank), rank, world_size, torch.device("cpu"))
    frozen = PipelineStage(layers(rank).requires_grad_(rank > 0), rank, world_size, torch.device("cpu"))
    cases = [
        (model, {"gradients": ["PowerSGD(2)" if rank else "PowerSGD(1)"]}),
        (model, {"gradients": ["MARINA(QSGD(7))"]}),
        (model, {}),
        (model, {"cuts": ["0"], "gradients": ["SignSGD"]}),
        (stage, {"candidates": ["TopKk(0.1)" if rank == 1 else "TopK(0.1)"]}),
        (stage, {"candidates": ["TopK(0.1)"], "schedule": "ZBH1"}),
        (stage, {"candidates": ["TopK(0.1)"], "every": 1 + rank}),
        (frozen, {"candidates": ["TopK(0.1)"]}),
    ]
    said = []
    for probed, options in cases:
        try:
            raysim.probe(probed, out=folder / "refused", **options)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    return said


def everything(rank, world_size, folder):
    """Return whether each training is the same with a probe, bit for bit, and the refusals."""
    same = {}
    for name, train in (("pipeline", pipeline), ("replicas", replicas)):
        losses, parameters = train(rank, world_size)
        probed, ends = train(rank, world_size, folder / name)
        dist.barrier()
        same[name] = losses == probed and all(map(torch.equal, parameters, ends))
    return {"same": same, "refusals": refusals(rank, world_size, folder)}
