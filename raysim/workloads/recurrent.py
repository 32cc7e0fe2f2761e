"""A recurrent model of text: the LSTM of the papers on gradient compression."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from raysim.notation import check_integer, check_real
from raysim.workloads.splits import MOST_LAYERS, DataShape


def lstm(shape: DataShape, *, width: int = 256, num_layers: int = 2, dropout: float = 0.0) -> nn.Sequential:
    """Return an embedding, `num_layers` LSTM layers of `width` (Zaremba et al. 2014, 1409.2329) and a linear head.

    Every sample starts from a state of zeros: nothing is carried from one block of text to the next. The paper of GraVAC
    has 2 layers of 1,500 on blocks of 35 tokens.

    >>> [name for name, _ in lstm(DataShape((35,), "int64", 256), width=8).named_children()]
    ['embedding', 'lstm1', 'lstm2', 'head']
    """
    if len(shape.input_shape) != 1 or shape.input_dtype != "int64":
        raise ValueError(
            f"Model `lstm` needs tokens of (length,) in int64, but the data has {shape.input_shape} in {shape.input_dtype}. "
            "Choose another `model` or `data`."
        )
    width = check_integer("model.width", width, 1)
    num_layers = check_integer("model.num_layers", num_layers, 1, MOST_LAYERS)
    dropout = check_real("model.dropout", dropout, 0, 1)
    layers: dict[str, nn.Module] = {
        "embedding": nn.Sequential(nn.Embedding(shape.num_classes, width), nn.Dropout(dropout))
    }
    for index in range(1, num_layers + 1):
        layers[f"lstm{index}"] = nn.Sequential(RecurrentLayer(width), nn.Dropout(dropout))
    layers["head"] = nn.Linear(width, shape.num_classes)
    model = nn.Sequential(OrderedDict(layers))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
    return model


class RecurrentLayer(nn.Module):
    """One LSTM layer, from the state of zeros; its last state is dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        y: Tensor = self.lstm(x)[0]
        return y
