"""Models cut into stages, run without an engine."""

import torch

from raysim.workloads.data import DataShape
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.models import build_model

DIGITS = DataShape((1, 8, 8), "float32", 10)


BYTES = DataShape((16,), "int64", 256)


MODELS = {
    "cnn": ("cnn", {"width": 4}, DIGITS),
    "resnet18": ("resnet18", {}, DataShape((3, 8, 8), "float32", 10)),
    "gpt": ("gpt", {"num_blocks": 3, "width": 16}, BYTES),
    "gpt tied": ("gpt", {"num_blocks": 3, "width": 16, "tied": True}, BYTES),
}


BATCH = 4


def example(name):
    model, options, shape = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, *shape.input_shape, generator=generator)
    if shape.input_dtype == "int64":
        x = torch.randint(256, (BATCH, *shape.input_shape), generator=generator)
    targets = torch.randint(shape.num_classes, x.shape[: 2 if x.dim() == 2 else 1], generator=generator)
    return build_model(model, options, shape, seed=0), shape, x, targets


def train_cut(stages, x, targets):
    """Run stages as the pipeline does, each on a tensor of its own, and return the error and what crossed the cuts."""
    received, sent = [], []
    for stage in stages:
        x = x.detach().requires_grad_(bool(received) and x.is_floating_point())
        received.append(x)
        x = stage(x)
        sent.append(x)
    error = CrossEntropy()(x, targets)
    error.backward()
    for index in range(len(stages) - 2, -1, -1):
        sent[index].backward(received[index + 1].grad)
    return error, sent
