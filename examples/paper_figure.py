"""Pandas and a figure for a paper: accuracy against bytes, from the Parquet of any folder of runs.

Give it a folder of your own with `--runs`; without runs there, it trains a few.
"""

from itertools import cycle
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import typer
from matplotlib.ticker import LogLocator, NullFormatter

import raysim
from raysim.analysis import load

SETTINGS = ("Identity", "Quantize(8)", "Quantize(4)", "TopK(0.3)", "TopK(0.1)", "TopK(0.03)")


def train(runs: Path, steps: int, seeds: int) -> None:
    """Train the settings that the figure shows."""
    for codec in SETTINGS:
        for seed in range(seeds):
            changes = (f"steps={steps}", f"seed={seed}", f"forward={codec}", "evaluate_every_steps=50")
            raysim.train("digits-cnn", *changes, engine="inline", out=runs / f"{SETTINGS.index(codec)}-{seed}")


def main(
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("results/paper_figure"),
    picture: Annotated[Path, typer.Option(help="File of the figure.")] = Path("paper_figure.png"),
    steps: int = 300,
    seeds: int = 3,
) -> None:
    """Write the figure, and the numbers behind it as CSV beside it."""
    if not runs.exists():
        train(runs, steps, seeds)
    results = load(runs)

    evals = results.evals.merge(
        results.runs[["run", "forward", "wire_bytes", "steps"]], on="run", suffixes=("", "_run")
    )
    evals = evals[evals["mode"] == "on"].dropna(subset="wire_bytes")  # of runs that ended
    evals = evals.assign(sent_mb=lambda x: x["wire_bytes"] * x["step"] / x["steps"] / 1e6)
    curves = evals.groupby(["forward", "step"]).agg(
        sent_mb=("sent_mb", "mean"), accuracy=("accuracy", "mean"), deviation=("accuracy", "std")
    )
    curves.to_csv(picture.with_suffix(".csv"))

    plt.rcParams.update({"font.family": "serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(3.4, 2.6), layout="constrained")  # one column of a paper, in inches
    for style, (setting, curve) in zip(cycle("o^svDxP*"), curves.groupby("forward"), strict=False):
        axes.errorbar(
            curve["sent_mb"],
            100 * curve["accuracy"],
            100 * curve["deviation"],
            fmt=f"{style}-",
            ms=3,
            lw=0.8,
            label=setting,
        )
    axes.set(xlabel="sent, MB", ylabel="accuracy, %", xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=6)
    figure.savefig(picture, dpi=300)
    print(pd.read_csv(picture.with_suffix(".csv")).groupby("forward").last().to_string())


if __name__ == "__main__":
    typer.run(main)
