"""How much accuracy do compressed links cost my own model?

The model is a function in this file that returns an `nn.Sequential`; raysim finds it by its import path and cuts it.
"""

import sys
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from torch import Tensor, nn

import raysim


class Residual(nn.Module):
    """Adds two convolutions to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layers(x)).relu()


def build(width: int = 16) -> nn.Sequential:
    """Return a small residual network for 8 x 8 digits of one channel."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        Residual(width),
        Residual(width),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def main(
    runs: Annotated[Path, typer.Option(help="A new folder for the runs.")] = Path("results/my_model"),
    picture: Annotated[Path, typer.Option(help="File of the figure.")] = Path("my_model.png"),
    steps: int = 300,
) -> None:
    """Train the model dense and compressed, and draw both learning curves."""
    sys.path.insert(0, str(Path(__file__).parent))  # so that `my_model:build` can be imported from any folder
    config = {
        "model": {"name": "my_model:build", "width": 16},
        "data": {"name": "digits"},
        "num_stages": 3,
        "batch_size": 32,
        "steps": steps,
        "evaluate_every_steps": max(1, steps // 10),
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "decay": "cosine"},
    }
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for codec in ("Identity", "Quantize(4)", "TopK(0.05)"):
        out = runs / codec.split("(")[0]
        run = raysim.train({**config, "forward": codec, "backward": codec}, engine="inline", out=out)
        print(run.links.groupby(["direction", "boundary"])[["dense_bytes", "wire_bytes"]].sum())
        evals = run.evals[run.evals["mode"] == "on"]
        axes.plot(evals["step"], 100 * evals["accuracy"], "o-", label=codec)
    axes.set(xlabel="step", ylabel="accuracy, % (compression on)")
    axes.legend()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
