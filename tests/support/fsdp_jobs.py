"""FSDP2 with compressed reduce-scatters, and the same computed in one process."""

import io

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from raysim.codecs import CODECS
from raysim.distributed import fsdp
from raysim.notation import parse_notation


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def batch(step, rank):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


UNITS = (256 * 302 + 302, 302 * 256 + 256)  # parameters of the layers of `scattered`
CODED = [
    "Quantize(8)",
    "Quantize(4)",
    "Quantize(3, per='block')",
    "TopK(0.1)",
    "ErrorFeedback(TopK(0.01))",
    "Cast('bfloat16')",
]


def scattered(rank, world_size, method):
    """Return the bytes of gradients that this rank sends in a step."""
    model = nn.Sequential(nn.Linear(256, 302), nn.Tanh(), nn.Linear(302, 256))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gradients = fsdp.compress(model, method)
    model(torch.randn(8, 256)).square().mean().backward()
    return gradients.sent_bytes


def train(rank, world_size, method, steps, kept=None):
    model = build()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gradients = fsdp.compress(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(*steps):
        if kept is not None and step == kept[0]:
            held = io.BytesIO()
            torch.save(gradients.state_dict(), held)
            held.seek(0)
            gradients = fsdp.compress(model, method)
            gradients.load_state_dict(torch.load(held, weights_only=True))
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()], gradients.sent_bytes


def in_one_process(world_size, notation, steps):
    """Return the parameters where shard j is the mean over ranks of what rank i != j sends by a codec, and of j's own."""
    codec = parse_notation(notation, CODECS)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(*steps):
        found = []
        for rank in range(world_size):
            model.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        for layer in (0, 1):
            parameters = list(model.parameters())[2 * layer : 2 * layer + 2]
            sharded = [[g.tensor_split(world_size) for g in one[2 * layer : 2 * layer + 2]] for one in found]
            means = []
            for owner in range(world_size):
                rows = [
                    torch.cat([parts[owner].reshape(-1) for parts in sharded[rank]])[None] for rank in range(world_size)
                ]
                total = torch.zeros_like(rows[0])
                for rank, row in enumerate(rows):
                    total += row if rank == owner else codec.encode(row).decode()
                means.append((total / world_size).view(-1))
            for index, parameter in enumerate(parameters):
                sizes = [[parts[owner].numel() for parts in sharded[0]] for owner in range(world_size)]
                pieces = [mean.split(size)[index] for mean, size in zip(means, sizes, strict=True)]
                parameter.grad = torch.cat(pieces).view_as(parameter)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def sharded(world_size, *layers):
    model = build()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in layers:
        fully_shard(model[layer], mesh=mesh)
    return fully_shard(model, mesh=mesh)


SCALED = ["Quantize(4)", "ErrorFeedback(TopK(0.1))"]


def trained(rank, world_size, method, steps, scaler=None, broken=()):
    """Return the parameters after some steps, of which the broken ones overflow at rank 1; a checkpoint lies in the middle."""
    model = sharded(world_size, 0, 2)
    gradients = fsdp.compress(model, method, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        if step == 4:
            kept, gradients = gradients.state_dict(), fsdp.compress(model, method, scaler=scaler)
            gradients.load_state_dict(kept)
        hidden = model[1](model[0](batch(step, rank)))
        if rank == 1 and step in broken:  # below the last layer, which has sent its gradients
            hidden.register_hook(lambda gradient: gradient * float("inf"))
        loss = model[2](hidden).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().view(-1) for p in model.parameters()])


def overflows(rank, world_size, method):
    """Return the parameters of a job that skips two steps by its scaler, and of one without scaler and these steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)  # doubles in other steps
    skipping = trained(rank, world_size, method, range(6), scaler, broken=(2, 3))
    return skipping, trained(rank, world_size, method, (0, 1, 4, 5))


class InTurn(nn.Module):
    """A module of two parameters of the same size."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(8, 4)) for _ in range(2))

    def forward(self, x, step):
        return x @ (self.a if step % 2 == 0 else self.b)


def in_turn(rank, world_size, *, freezes):
    """Train one of two parameters of the same size in each step."""
    model = fully_shard(InTurn(), mesh=init_device_mesh("cpu", (world_size,)))
    model(torch.randn(4, 8), 0)  # leaves whole parameters in the model
    fsdp.compress(model, "ErrorFeedback(TopK(0.25), key='link')")
    for step in range(2):
        if freezes:
            model.a.requires_grad_(step == 0)
            model.b.requires_grad_(step == 1)
        model(torch.randn(4, 8), step).sum().backward()


def listed(rank, world_size, method):
    """Return the parameters of a model with its layers in one group: that of the whole model, and that of a list."""
    ends = []
    for as_list in (False, True):
        model, mesh = build(), init_device_mesh("cpu", (world_size,))
        if as_list:
            fully_shard([model[0], model[2]], mesh=mesh)
        fully_shard(model, mesh=mesh)
        fsdp.compress(model, method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.full_tensor().detach().view(-1) for p in model.parameters()]))
    return ends


def refusals(rank, world_size):
    """Return the sentences that this rank is given."""

    def broken():
        model = sharded(world_size, 0)
        fsdp.compress(model, "Quantize(4)")
        model(batch(0, rank) * (float("nan") if rank == 1 else 1.0)).sum().backward()

    def other_checkpoint(model, method):
        kept = fsdp.compress(sharded(world_size, 0, 2), "TopK(0.1)").state_dict()
        fsdp.compress(model, method).load_state_dict(kept)

    def other_rank():
        model = sharded(world_size, 0)
        gradients = fsdp.compress(model, "ErrorFeedback(TopK(0.1))")
        model(batch(0, rank)).sum().backward()
        states = [None] * world_size
        dist.all_gather_object(states, gradients.state_dict())
        gradients.load_state_dict(states[rank])
        gradients.load_state_dict(states[1 - rank])

    cases = [
        lambda: fsdp.compress(sharded(world_size, 0), "TopK(0.1)" if rank == 0 else "TopK(0.2)"),
        lambda: fsdp.compress(sharded(world_size, 0), "TopK(0.1)" if rank == 0 else "PowerSGD(2)"),
        lambda: other_checkpoint(sharded(world_size, 0, 2), "TopK(0.2)"),
        lambda: other_checkpoint(sharded(world_size, 0), "TopK(0.1)"),
        lambda: other_checkpoint(sharded(world_size, 0, 1), "TopK(0.1)"),
        other_rank,
        broken,
        lambda: in_turn(rank, world_size, freezes=False),
        lambda: in_turn(rank, world_size, freezes=True),
    ]
    said = []
    for case in cases:
        try:
            case()
            said.append(None)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def everything(rank, world_size):
    steps = (0, 4)
    method = "ErrorFeedback(TopK(0.1))"
    return {
        "closed form": [
            train(rank, world_size, "Quantize(4)", steps)[0],
            in_one_process(world_size, "Quantize(4)", steps),
        ],
        "resumed": [train(rank, world_size, method, steps)[0], train(rank, world_size, method, steps, kept=[2])[0]],
        "bytes": [train(rank, world_size, text, steps)[1] for text in ("Cast('bfloat16')", "Quantize(4)")],
        "scattered": [scattered(rank, world_size, text) for text in CODED],
        "overflows": {method: overflows(rank, world_size, method) for method in SCALED},
        "listed": listed(rank, world_size, method),
        "refusals": refusals(rank, world_size),
    }
