"""A user's own models, named in configurations by import path."""

from collections import OrderedDict

from torch import Tensor, nn


def normed(shape, width: int = 8) -> nn.Sequential:
    """A small CNN with BatchNorm, and ReLU in place inside a stage."""
    channels = shape.input_shape[0]
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, width, 3, padding=1),
            norm1=nn.BatchNorm2d(width),
            conv2=nn.Conv2d(width, width, 3, padding=1),
            norm2=nn.BatchNorm2d(width),
            head=nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, shape.num_classes)),
        )
    )


def flat(shape) -> nn.Sequential:
    """A model whose first layer has no parameters, without names."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10))


class Scales(nn.Module):
    """A layer in place."""

    def forward(self, x):
        return x.mul_(2).sub_(0.5)


def in_place(shape) -> nn.Sequential:
    """A model whose first layer writes to the data."""
    return nn.Sequential(Scales(), nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10))


def frozen(shape) -> nn.Sequential:
    """An embedding and a head that are tied, and not trained."""
    embedding, head = nn.Embedding(shape.num_classes, 16), nn.Linear(16, shape.num_classes, bias=False)
    head.weight = embedding.weight
    head.weight.requires_grad_(False)
    return nn.Sequential(embedding, nn.Linear(16, 16), nn.LayerNorm(16), head)


def broken(shape) -> nn.Sequential:
    """A model that fails in training only, in its last layer."""

    class Fails(nn.Module):
        def forward(self, x):
            if type(x) is Tensor and x.device.type == "cpu" and len(x) == 4 and x.requires_grad:
                self.calls = getattr(self, "calls", 0) + 1
                if self.calls > 2:
                    raise RuntimeError("no luck")
            return x

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10), Fails())


def exploding(shape) -> nn.Sequential:
    """A model whose second layer sends infinity."""

    class Explodes(nn.Module):
        def forward(self, x):
            return x / 0.0

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Explodes(), nn.Linear(16, 10))


def unread(shape) -> nn.Sequential:
    """A model whose second layer has no weights to read what it is given."""
    return nn.Sequential(nn.Conv2d(shape.input_shape[0], 1, 3, padding=1), nn.Flatten(), nn.Linear(64, 10))


def untrained(shape) -> nn.Sequential:
    """A model of which every parameter is frozen."""
    return flat(shape).requires_grad_(False)


def of_one_length(shape) -> nn.Sequential:
    """A model that mixes the tokens of texts of one length, not causally."""
    (length,) = shape.input_shape

    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(length, length)

        def forward(self, x):
            return self.mix(x.transpose(1, 2)).transpose(1, 2)

    return nn.Sequential(nn.Embedding(shape.num_classes, 8), Mixes(), nn.Linear(8, 8), nn.Linear(8, shape.num_classes))
