"""A model that knows its data, with massive activations: one channel of the first token dwarfs all else."""

import torch
from torch import Tensor, nn

TOKENS, LENGTH, WIDTH = 16, 32, 64
KEYS = {
    "name": "massive",
    "model": "massive:model",
    "data": "massive:texts",
    "num_stages": 3,
    "batch_size": 8,
    "num_microbatches": 2,
    "steps": 10,
    "evaluate_every_steps": 10,
    "optimizer": {"name": "sgd", "learning_rate": 0.01},
}
"""Of a run."""


class Embed(nn.Module):
    """One channel a token, and a massive value in the last channel of the first position."""

    def __init__(self, massive: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(TOKENS, WIDTH))
        self.massive = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.massive.data[0, -1] = massive

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids] + self.massive


class Mix(nn.Module):
    """A small residual layer that does not read the massive channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.data *= 0.1
        self.inner.weight.data[:, -1] = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def model(shape, massive: float = 4000.0) -> nn.Sequential:
    """Return a model of four layers whose next token is three times the present one, plus one."""
    head = nn.Linear(WIDTH, shape.num_classes)
    head.weight.data *= 0.1
    head.weight.data[:, -1] = 0
    for token in range(TOKENS):
        head.weight.data[(3 * token + 1) % TOKENS, token] = 6.0
    return nn.Sequential(Embed(massive), Mix(), Mix(), head)


class Texts(list):
    classes = range(TOKENS)


def texts():
    """Return 32 training and 16 test samples of `LENGTH` random tokens and the tokens that follow them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(TOKENS, (48, LENGTH), generator=generator)
    pairs = list(zip(ids, (3 * ids + 1) % TOKENS, strict=True))
    return Texts(pairs[:32]), Texts(pairs[32:])


def surest(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the greatest probability, as a metric."""
    return outputs.softmax(-1).amax()


surest.higher_is_better = True  # type: ignore[attr-defined]
