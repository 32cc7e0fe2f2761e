"""A user's own modules, with a forward of their own."""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


class Network(nn.Module):
    """Residual blocks in a list, operations between submodules, and a parameter that is used at both ends."""

    def __init__(self, shape) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape.input_shape[0], 4, 3, padding=1)
        self.encoder = nn.ModuleList([Residual(4) for _ in range(3)])
        self.head = nn.Linear(4, shape.num_classes)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for block in self.encoder:
            x = block(x)
        if double:
            x = 2 * x
        return self.head(x.mean((2, 3)).view(x.size(0), -1)) * self.scale


class Branches(Network):
    """A forward that goes by the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        return super().forward(x)


class Moody(Network):
    """A forward that asks for the mode itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(self.stem(x), 0.5, self.training).mean((2, 3)))


class Masked(Network):
    """A forward of two inputs."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * mask)


def network(shape) -> nn.Module:
    return Network(shape)


def transformer(shape) -> nn.Module:
    """A model of transformers, as such."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=shape.num_classes))


class Marking(nn.Module):
    """An embedding that also tells which tokens are not 0, and where they stand."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)

    def forward(self, x):
        positions = torch.arange(x.shape[1]).expand_as(x)
        return {"mask": x != 0, "hidden": self.token(x), "positions": positions.to(torch.int16)}


class Mixing(nn.Module):
    """A layer that mixes the tokens that are not masked, and changes the positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value):
        hidden, mask = value["hidden"], value["mask"][..., None]
        mean = (hidden * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        scale = 1 + value["positions"][..., None] / 10
        return {
            **value,
            "hidden": hidden + torch.tanh(self.linear(mean + hidden * scale)),
            "positions": value["positions"] + 1,
        }


class Reading(nn.Module):
    """The head: it reads what is masked."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, num_tokens)

    def forward(self, value):
        return self.linear(value["hidden"] * value["mask"][..., None])


def marked(shape) -> nn.Module:
    """Layers that pass a mask and positions on beside the hidden state."""
    tokens = shape.num_classes
    return nn.Sequential(Marking(tokens, 8), Mixing(8), Mixing(8), Reading(8, tokens))


def two_floats(shape) -> nn.Module:
    """Layers that pass two tensors of floating-point numbers."""

    class Twice(nn.Module):
        def forward(self, x):
            return {"one": x, "two": x}

    class Sum(nn.Module):
        def forward(self, value):
            return value["one"] + value["two"]

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Twice(), Sum())
