"""Training jobs of DistributedDataParallel with raysim's hook."""

import io
import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysim.config import make_config
from raysim.distributed import ddp
from raysim.pipeline.optimizer import learning_rate, make_optimizer
from raysim.pipeline.prepare import prepare
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.models import build_model

FEEDBACK = [
    "Gathered(ErrorFeedback(TopK(0.1)), min_values=16)",
    "Gathered(ErrorFeedback(TopK(0.1)), min_values=16, scope='stage')",
    "GTopK(0.1, min_values=16)",
    "PowerSGD(2, min_values=16)",
]


def losses(rank, world_size, values, method, options, resumes=False):
    """Return this rank's losses of a configuration trained under DDP; with `resumes` over a checkpoint in the middle."""
    config = make_config(values)
    workload = prepare(config)
    plan, split = workload.plan, workload.data.train

    def build():
        module = build_model(config.model.name, config.model.options, workload.data.shape, config.seed)
        model = DistributedDataParallel(module)
        optimizer = make_optimizer(config.optimizer, model.named_parameters())
        given = {"optimizer": optimizer, "steps_per_epoch": plan.steps_per_epoch, "seed": config.seed, **options}
        return model, optimizer, ddp.hook(model, method, **given)

    model, optimizer, gradients = build()
    found = []
    for step in range(config.steps):
        if resumes and step == config.steps // 2:
            kept = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), gradients.state_dict()], kept)
            kept.seek(0)
            states = torch.load(kept, weights_only=True)
            model, optimizer, gradients = build()
            for part, state in zip((model, optimizer, gradients), states, strict=True):
                part.load_state_dict(state)
        epoch, ids = plan.microbatch(step, 0, rank)
        loss = CrossEntropy()(model(split.inputs(ids, epoch, config.seed, True)), split.targets(ids))
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, plan.steps_per_epoch, plan.num_steps)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, gradients.report().to_dict("records")[0]


def all_losses(rank, world_size, jobs):
    return {name: losses(rank, world_size, *job) for name, job in jobs.items()}


def of_buckets(rank, world_size, method):
    """Return the parameters after some steps in one bucket and in many."""
    ends = []
    for cap in (25.0, 0.001):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)]), bucket_cap_mb=cap)
        ddp.hook(model, method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    return ends


def stack(*, wrap=lambda layer: layer, frozen=(), width=24):
    """Return a small model, each layer wrapped, in many buckets; layers of `frozen` freeze after DDP has wrapped them."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[wrap(nn.Linear(width, width)) for _ in range(4)])
    model = DistributedDataParallel(layers, bucket_cap_mb=0.001, find_unused_parameters=bool(frozen))
    for index in frozen:
        layers[index].requires_grad_(False)
    return model


def steps_of(model, rank, optimizer, steps, scaler=None, broken=()):
    """Train, with infinite inputs at rank 1 in some steps; return the parameters."""
    for step in steps:
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x * (float("inf") if rank == 1 and step in broken else 1.0)).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(rank, method, scaler=None, **changes):
    model = stack()
    if method is not None:
        ddp.hook(model, method, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return steps_of(model, rank, optimizer, scaler=scaler, **changes)


def overflows(rank, world_size, method):
    """Return the parameters of a hooked job that skips two steps by its scaler, and of one without scaler and these steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)  # doubles in other steps
    skipping = trained(rank, method, steps=range(6), scaler=scaler, broken=(2, 3))
    return skipping, trained(rank, method, steps=(0, 1, 4, 5))


def freezes(rank, world_size):
    """Return the parameters of plain DDP and of a hooked job with layers frozen after wrapping, and the frozen ones before."""
    ends = []
    for method in (None, "Identity", "ErrorFeedback(TopK(0.5))"):
        model = stack(frozen=(0, 2))
        if method is not None:
            ddp.hook(model, method)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        ends.append(steps_of(model, rank, optimizer, range(4)))
    return ends


class Some(nn.Module):
    """A model that uses some of its layers in each step, the last ones first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(24, 24, bias=False) for _ in range(4)])

    def forward(self, x, used):
        for index in reversed(used):
            x = self.layers[index](x)
        return x


def passed_on(rank, world_size, method, *, finds_unused):
    """Return, by layer, what ranks fed into a method, and what arrived or is remembered.

    Parameters do not change, so a gradient depends only on its step. The layers are used in turn, if DDP finds unused ones, or all
    are, but in another order than DDP puts them into its first buckets, of two layers each.
    """
    model = DistributedDataParallel(Some(), bucket_cap_mb=0.005, find_unused_parameters=finds_unused)
    gradients, alone = ddp.hook(model, method), Some()
    fed, arrived = torch.zeros(2, 4, 24 * 24)
    for step in range(6):
        used = [index for index in range(4) if not finds_unused or (index + step) % 3]
        x = torch.randn(world_size, 8, 24, generator=torch.Generator().manual_seed(step))
        model(x[rank], used).square().sum().backward()
        for each in x:
            alone(each, used).square().sum().backward()
        for index in used:
            arrived[index] += model.module.layers[index].weight.grad.view(-1)
            fed[index] += alone.layers[index].weight.grad.view(-1) / world_size
        model.zero_grad()
        alone.zero_grad()
    for key, x in gradients.state_dict()["memory"].items():
        kind, _, name = key.rpartition("/")
        if kind.startswith("residual"):
            dist.all_reduce(x)
            arrived[int(name.split(".")[1])] += x.view(-1) / world_size
    return fed, arrived


def renamed(rank, world_size):
    """Return the parameters of a job, and of one that goes on in a compiled model from a checkpoint."""
    method, ends = "ErrorFeedback(TopK(0.1))", []
    for wrap in (lambda layer: layer, _Compiled):
        model = stack()
        gradients = ddp.hook(model, method)
        steps_of(model, rank, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
        if wrap is _Compiled:
            other = stack(wrap=wrap)
            for one, kept in zip(other.parameters(), model.parameters(), strict=True):
                one.data.copy_(kept.data)
            state = gradients.state_dict()
            model, gradients = other, ddp.hook(other, method)
            gradients.load_state_dict(state)
        ends.append(steps_of(model, rank, torch.optim.SGD(model.parameters(), lr=0.1), range(3, 6)))
    return ends


def of_another_rank(rank, world_size):
    """Return the memory of a method whose ranks all keep the same, after loading that of the other rank."""
    model = stack()
    gradients = ddp.hook(model, "PowerSGD(2, min_values=16, feedback=False)")
    steps_of(model, rank, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    states = [None] * world_size
    dist.all_gather_object(states, gradients.state_dict())
    gradients.load_state_dict(states[1 - rank])
    return gradients.state_dict()["memory"]


def together(rank, world_size, method):
    """Return the parameters of two models after some steps, with a backward for each of them, and with one for both."""
    ends = []
    for at_once in (False, True):
        torch.manual_seed(0)
        models = nn.ModuleList([DistributedDataParallel(nn.Linear(200, 200)) for _ in range(2)])
        for model in models:
            ddp.hook(model, method)
        optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(8, 200, generator=torch.Generator().manual_seed(10 * step + rank))
            losses = [scale * model(x).square().mean() for scale, model in enumerate(models, 1)]
            for loss in [sum(losses)] if at_once else losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().view(-1) for p in models.parameters()]))
    return ends


def decided(rank, world_size):
    """Return the steps that the controllers of a model in several buckets have seen before and after a checkpoint."""
    found, state = [], None
    for steps in (range(5), range(5, 8)):
        model = stack()
        gradients = ddp.hook(model, "GraVAC(2, 50, epsilon=0.5, window=100, min_values=16)", batch_size=16)
        if state is not None:
            gradients.load_state_dict(state)
        steps_of(model, rank, torch.optim.SGD(model.parameters(), lr=0.1), steps)
        state = gradients.state_dict()
        found.append({names: int(kept["controller/whole"][3]) for names, kept in state["buckets"].items()})
    return found, gradients.report()["steps"].item()


def dense_bytes(rank, world_size):
    """Return the bytes of a plain all-reduce of a model in float32, and in bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = DistributedDataParallel(nn.Linear(24, 24).to(dtype))
        gradients = ddp.hook(model, "TopK(0.1)")
        model(torch.ones(2, 24, dtype=dtype)).sum().backward()
        found.append(gradients.report()["dense_bytes"].item())
    return found


class _Compiled(nn.Module):
    """A wrapper that names its module as `torch.compile` does."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, x):
        return self._orig_mod(x)


def refusals(rank, world_size):
    """Return the sentences that each rank is given."""
    said = []

    def model():
        torch.manual_seed(0)
        return DistributedDataParallel(nn.Linear(32, 32))

    cases = [
        {"method": "TopK(0.1)" if rank == 0 else "TopK(0.2)"},
        {"method": "TopK(0.1)" if rank == 0 else "TopKk(0.2)"},
        {"method": "TopK(0.1)", "seed": rank},
        {"method": "MARINA(QSGD(7))"},
        {"method": "PowerGossip(2)"},
        {"method": "DGC(0.1)"},
        {"method": "DGC(0.1, ramp=2)", "momentum": 0.9},
        {"method": "Accordion(LowRank(4), LowRank(1))", "steps_per_epoch": 4},
        {"method": "PowerSGD(40)"},
        {"method": "DeMo", "optimizer": {"momentum": 0.9}},
    ]
    for case in cases:
        try:
            made = model()
            if "optimizer" in case:
                case["optimizer"] = torch.optim.SGD(made.parameters(), lr=0.1, **case["optimizer"])
            ddp.hook(made, **case)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    broken = model()
    ddp.hook(broken, "Quantize(4)")
    x = torch.ones(2, 32) * (float("nan") if rank == 1 else 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken(x).sum().backward()
        assert all(p.grad.isnan().all() for p in broken.parameters()), "all ranks learn of it"
        broken.zero_grad()
        if rank == 1:  # as after a step with them
            broken.module.weight.data.fill_(float("nan"))
        try:
            broken(x).sum().backward()
            said.append(None)
        except RuntimeError as error:
            said.append(str(error))
    kept = ddp.hook(model(), "TopK(0.1)")
    try:
        kept.load_state_dict({"method": "TopK(0.2)"})
    except ValueError as error:
        said.append(str(error))
    feeding = model()
    remembering = ddp.hook(feeding, "ErrorFeedback(TopK(0.1))")
    feeding(torch.ones(2, 32)).sum().backward()
    states = [None] * world_size
    dist.all_gather_object(states, remembering.state_dict())
    remembering.load_state_dict(states[rank])
    try:
        remembering.load_state_dict(states[1 - rank])
    except ValueError as error:
        said.append(str(error))
    state = kept.state_dict()
    strange = DistributedDataParallel(nn.Linear(32, 16)), DistributedDataParallel(nn.Sequential(nn.Linear(32, 32)))
    for other in strange:
        try:
            ddp.hook(other, "TopK(0.1)").load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
    return said


def everything(rank, world_size, jobs, methods):
    """Return all of the above, from one group."""
    return {
        "losses": all_losses(rank, world_size, jobs),
        "buckets": {method: of_buckets(rank, world_size, method) for method in methods},
        "refusals": refusals(rank, world_size),
        "overflows": {method: overflows(rank, world_size, method) for method in (None, "Identity", *methods)},
        "freezes": freezes(rank, world_size),
        "passed on": {
            (method, finds): passed_on(rank, world_size, method, finds_unused=finds)
            for method in FEEDBACK
            for finds in (False, True)
        },
        "of another rank": of_another_rank(rank, world_size),
        "renamed": renamed(rank, world_size),
        "together": together(rank, world_size, "ErrorFeedback(TopK(0.1))"),
        "decided": decided(rank, world_size),
        "dense bytes": dense_bytes(rank, world_size),
    }
