"""A user's own modules, with a forward of their own."""

import math
import random

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


class UNet(nn.Module):
    """Convolutions down and up, each level with a skip to the other side: two or three tensors are alive in between."""

    def __init__(self, shape, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape.input_shape[0], width, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(2)])
        self.middle = Residual(width)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * width if i else width, width, 2, stride=2) for i in range(2)])
        self.head = nn.Linear(2 * width, shape.num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = torch.tanh(layer(x))
        x = self.middle(x)
        for layer in self.up:
            x = torch.cat([layer(x), skips.pop()], 1)
        return self.head(x.mean((2, 3)))


def unet(shape, width: int = 4) -> nn.Module:
    return UNet(shape, width)


class Asking(nn.Module):
    """A small GPT as it is usually written: the forward asks for sizes, checks them, and computes with them."""

    def __init__(self, shape, width: int = 8, longest: int = 32) -> None:
        super().__init__()
        tokens = shape.num_classes
        self.longest = longest
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList([AskingBlock(width, longest) for _ in range(2)])
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.size()
        assert length <= self.longest, f"{length} tokens are too many"
        positions = torch.arange(0, length, dtype=torch.long, device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x.view(batch, length, -1))


class AskingBlock(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        if x.ndim != 3 or width % 2:
            raise ValueError("an even width is needed")
        q, k, v = self.attention(x).split(width, dim=2)
        q, k, v = (each.view(batch, length, 2, width // 2).transpose(1, 2) for each in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        weights = weights.masked_fill(self.mask[:length, :length] == 0, float("-inf")).softmax(-1)
        return x + self.projection((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Branches(Network):
    """A forward that goes by the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if x.sum() > 0:
            x = -x
        return super().forward(x)


class Moody(Network):
    """A forward that asks for the mode itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.head(F.dropout(self.stem(x), 0.5, self.training).mean((2, 3)))


class Noisy(Network):
    """A forward with noise of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + torch.randn(8))


class Skipping(Network):
    """A forward that skips blocks at random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        for block in self.encoder:
            x = x if random.random() < 0.001 else block(x)
        return self.head(x.mean((2, 3)))


class Frozen(Network):
    """A forward whose first blocks get no gradients, though their parameters require some."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        with torch.no_grad():
            first, second = self.encoder[1](self.encoder[0](x)).chunk(2, dim=1)
        return self.head((self.encoder[2](torch.cat([second, first], 1)) + x).mean((2, 3)))


class Cast(Network):
    """A forward whose first layer has another dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with torch.autocast("cpu", torch.bfloat16):
            x = self.stem(x)
        return self.head(x.float().mean((2, 3)))


class Halving(Network):
    """A forward that divides by half the number of samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        half = self.stem(x)[: x.shape[0] // 2]
        return self.head((self.stem(x) - half.sum(0) / half.shape[0]).mean((2, 3)))


class Weighing(Network):
    """A forward with a weight for each of the first half of the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        half = self.stem(x)[: x.shape[0] // 2]
        weights = torch.ones(half.shape[0], 1, 1, 1)
        return self.head((self.stem(x) - (half * weights).mean(0)).mean((2, 3)))


class Masked(Network):
    """A forward of two inputs."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * mask)


class Bounded(nn.Linear):
    """Rows with a norm of at most 1."""

    def constrain(self) -> None:
        with torch.no_grad():
            self.weight /= self.weight.norm(dim=1, keepdim=True).clamp(min=1)


class Bound(Network):
    """A head whose rows are bounded."""

    def __init__(self, shape) -> None:
        super().__init__(shape)
        self.head = Bounded(4, shape.num_classes)


class Unbound(Bound):
    """A forward that reads the bounded weights past their module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.linear(self.stem(x).mean((2, 3)), self.head.weight)


class Bounding(Network):
    """A constraint on the model itself."""

    def constrain(self) -> None:
        """Constrain nothing."""


def reused(shape) -> nn.Module:
    """Layers with one activation used twice."""
    relu = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, shape.num_classes))


def bound(shape) -> nn.Module:
    return Bound(shape)


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


class Down(nn.Module):
    """The first layer of a network with skips: a hidden state, a skip, a mask, and positions as numbers without a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, width)

    def forward(self, x):
        hidden = torch.tanh(self.linear(x.flatten(1)))
        mask = torch.arange(hidden.shape[1]) % 3 != 0
        return {"hidden": hidden, "skip": 2 * hidden, "mask": mask.expand_as(hidden), "place": x.mean((2, 3))}


class Across(nn.Module):
    """A layer that passes the skip on as it is, and writes a new hidden state into the dictionary that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value):
        change = torch.tanh(self.linear(value["hidden"] * value["mask"])) * (1 + value["place"])
        value["hidden"] = value["hidden"] + change
        return value


class Up(nn.Module):
    """A layer that adds a part of the skip to the hidden state, and makes another skip of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value):
        hidden = value["hidden"] + self.linear(value["skip"])
        return {"hidden": hidden, "skip": torch.tanh(value["skip"]), "late": hidden * value["skip"]}


class Out(nn.Module):
    """The head, which reads all that crosses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 10)

    def forward(self, value):
        return self.linear(value["hidden"] + value["skip"] * value["late"])


def skipping(shape) -> nn.Module:
    """Layers with skips over cuts: several tensors of floating-point numbers cross, some of which change on the way."""
    return nn.Sequential(Down(8), Across(8), Up(8), Out(8))


def complex_beside(shape) -> nn.Module:
    """Layers that pass a tensor which may not cross."""

    class Turned(nn.Module):
        def forward(self, x):
            return {"one": x, "two": torch.complex(x, x)}

    class Sum(nn.Module):
        def forward(self, value):
            return value["one"] + value["two"].real

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Turned(), Sum())
