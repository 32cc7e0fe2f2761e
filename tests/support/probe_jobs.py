"""Trainings on several ranks with and without a probe around them."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
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
    return staged([rank], world_size, Schedule1F1B, out)


def zero_bubble(rank, world_size, out=None):
    """Return the same of two stages a rank, which compute the gradients of weights apart."""
    return staged([rank, 2 * world_size - 1 - rank], 2 * world_size, ScheduleZBVZeroBubble, out, schedule="ZBH1")


def staged(owned, num_stages, kind, out, **options):
    modules = [layers(index) for index in owned]
    stages = [
        PipelineStage(module, index, num_stages, torch.device("cpu"))
        for module, index in zip(modules, owned, strict=True)
    ]
    running = kind(
        stages if len(stages) > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []

    def loop():
        for step in range(STEPS):
            found = []
            x = batch(step)
            last = num_stages - 1 in owned
            running.step(*((x,) if 0 in owned else ()), target=x if last else None, losses=found if last else None)
            optimizer.step()
            optimizer.zero_grad()
            losses.extend(loss.item() for loss in found)

    if out is None:
        loop()
    else:
        settings: dict[str, Any] = {"steps": 2, "every": 2, "num_microbatches": MICROBATCHES, **options}
        with raysim.probe(stages, candidates=CANDIDATES, out=out, **settings):  # type: ignore[arg-type]
            loop()
    return losses, [p.detach() for p in parameters]


def merged(rank, world_size, out=None):
    """Return the same, priced under a schedule whose backwards are in one part."""
    return staged([rank, 2 * world_size - 1 - rank], 2 * world_size, ScheduleZBVZeroBubble, out)


def replicas(rank, world_size, out=None):
    """Return this rank's losses and parameters under DDP, with a probe of its gradients around it if `out` is given."""
    return replicated(rank, out, gradients=GRADIENTS)


def both(rank, world_size, out=None):
    """Return the same with a probe of gradients and of the links at a cut."""
    return replicated(rank, out, cuts=["1"], candidates=CANDIDATES[:1], gradients=GRADIENTS[:1])


def replicated(rank, out, **probed):
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
        with raysim.probe(model, out=out, steps=3, every=1, num_microbatches=2, **probed):
            loop()
    return losses, [p.detach() for p in model.parameters()]


def spoiled(rank, out):
    """Probe three steps, in the second of which one rank alone finds NaN."""
    model = DistributedDataParallel(layers(0))
    settings: dict[str, Any] = {"cuts": ["1"], "candidates": CANDIDATES[:1], "gradients": GRADIENTS[:1], "every": 1}
    with raysim.probe(model, out=out, **settings):
        for step in range(3):
            x = batch(step, rank) * (float("nan") if (rank, step) == (1, 1) else 1.0)
            model(x).square().mean().backward()
            model.zero_grad()


def refusals(rank, world_size, folder):
    """Return the sentences that this rank is given."""
    model = DistributedDataParallel(layers(0))
    stage = PipelineStage(layers(rank), rank, world_size, torch.device("cpu"))
    frozen = PipelineStage(layers(rank).requires_grad_(rank > 0), rank, world_size, torch.device("cpu"))
    cases: list[tuple[Any, dict[str, Any]]] = [
        (model, {"gradients": ["PowerSGD(2)" if rank else "PowerSGD(1)"]}),
        (model, {"gradients": ["MARINA(QSGD(7))"]}),
        (model, {}),
        (model, {"cuts": ["0" if rank else "nine"], "gradients": ["SignSGD"]}),
        (model, {"candidates": ["TopK(0.1)"], "gradients": ["SignSGD"]}),
        (model, {"gradients": ["SignSGD"], "schedule": "ZBH1"}),
        (stage, {"candidates": ["TopKk(0.1)" if rank == 1 else "TopK(0.1)"]}),
        (stage, {"candidates": ["TopK(0.1)"], "gradients": ["SignSGD"]}),
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
    """Return whether each training is the same with a probe, bit for bit, the refusals, and the folder."""
    same = {}
    for train in (pipeline, zero_bubble, merged, replicas, both):
        name = train.__name__
        losses, parameters = train(rank, world_size)
        probed, ends = train(rank, world_size, folder / name)
        dist.barrier()
        same[name] = losses == probed and all(map(torch.equal, parameters, ends))
    spoiled(rank, folder / "spoiled")
    return {"same": same, "refusals": refusals(rank, world_size, folder), "folder": folder}
