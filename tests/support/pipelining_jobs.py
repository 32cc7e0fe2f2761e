"""Training jobs of torch.distributed.pipelining with packets between their stages, and the same in one process."""

from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from raysim.distributed.pipelining import compress_stages
from raysim.nn import CompressedLink

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 8, 4, 5


def stage(index, num_stages, frozen=False):
    torch.manual_seed(index)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    module = nn.Sequential(*layers[: 3 if index < num_stages - 1 else 1])
    return module.requires_grad_(not frozen)


def batch(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(ROWS * MICROBATCHES, WIDTH, generator=generator) for _ in range(2)]


def loss_of(y, target):
    return nn.functional.mse_loss(y, target)


def in_one_process(num_stages, forward, backward, frozen=False):
    """Return the parameters of every stage after the steps of a plain loop with links; gradients are divided as torch does."""
    stages = [stage(index, num_stages, frozen and index == 0) for index in range(num_stages)]
    links = [
        CompressedLink(forward, backward=backward, boundary=b, num_microbatches=MICROBATCHES)
        for b in range(num_stages - 1)
    ]
    model = nn.Sequential(*[part for pair in zip(stages, [*links, nn.Identity()], strict=True) for part in pair])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for x, target in zip(*[part.chunk(MICROBATCHES) for part in batch(step)], strict=True):
            loss_of(model(x), target).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return [list(part.parameters()) for part in stages]


def train(rank, world_size, schedule, num_stages, forward, backward, evaluates=False, frozen=False):
    """Train this rank's stages; return whether they end as in one process, and the report of its ends."""
    kind = getattr(pipelining, f"Schedule{schedule}")
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        owned = [rank, 2 * world_size - 1 - rank]
    else:
        owned = list(range(rank, num_stages, world_size))
    shapes = [(ROWS, WIDTH)] * (num_stages - 1)
    modules = compress_stages(
        {index: stage(index, num_stages, frozen and index == 0) for index in owned},
        shapes,
        forward=forward,
        backward=backward,
        num_microbatches=MICROBATCHES,
    )
    stages = [PipelineStage(modules[i], i, num_stages, torch.device("cpu")) for i in owned]
    several = len(owned) > 1
    running = kind(stages if several else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)
    parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
    for step in range(STEPS):
        x, target = batch(step)
        given = (x,) if 0 in owned else ()
        target = target if num_stages - 1 in owned else None
        running.step(*given, target=target)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if evaluates and step in (1, 3):
            for module in modules.values():
                module.eval()
            with torch.no_grad():
                running.eval(*given, target=target)
            for module in modules.values():
                module.train()
    expected = in_one_process(num_stages, forward, backward, frozen)
    same = all(
        torch.equal(mine, theirs)
        for index, module in modules.items()
        for mine, theirs in zip(module.stage.parameters(), expected[index], strict=True)  # type: ignore[union-attr]
    )
    ends: list[Any] = [part for module in modules.values() for part in module.children() if hasattr(part, "report")]
    return {
        "same": same,
        "bytes": [end.message_bytes() for end in ends],
        "packets": [end.report()["packets"].tolist() for end in ends],
    }


def cast(rank, world_size):
    """Train a pipeline whose last stage gets packets that were rounded to bfloat16."""
    modules = compress_stages(
        {rank: stage(rank, 2)}, [(ROWS, WIDTH)], forward="TopK(0.1)", num_microbatches=MICROBATCHES
    )
    if rank == 1:
        modules[1].receive.register_forward_pre_hook(lambda module, given: (given[0].bfloat16().float(),))  # type: ignore[union-attr]
    running = pipelining.Schedule1F1B(
        PipelineStage(modules[rank], rank, 2, torch.device("cpu")), n_microbatches=MICROBATCHES, loss_fn=loss_of
    )
    x, target = batch(0)
    running.step(*((x,) if rank == 0 else ()), target=target if rank == 1 else None)


def refusals(rank, world_size):
    """Return the sentences that this rank is given."""
    cases = [
        {"forward": "TopK(0.1)" if rank == 0 else "TopK(0.2)"},
        {"forward": "TopK(0.1)" if rank == 0 else "Nonzero"},
        {"seed": rank},
        {"backward": ["Identity"] * (1 + rank)},
    ]
    said = []
    for case in cases:
        try:
            compress_stages({rank: nn.ReLU()}, [(ROWS, WIDTH)], num_microbatches=MICROBATCHES, **case)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    return said


def all_jobs(rank, world_size, jobs):
    """Return what each of several jobs returns, by name, and the refusals."""
    found = {name: train(rank, world_size, *arguments) for name, arguments in jobs.items()}
    return {**found, "refusals": refusals(rank, world_size)}
