"""What do I gain from local steps?

Compares replicas that average their gradients in every step, in full or compressed, with replicas that take 15 local steps
between two exchanges of their parameters (DiLoCo), and with PowerGossip, which lets replicas differ.
"""

from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer

import raysim
from raysim.analysis import load, replay

NETWORKS = ["10mbps", "30mbps", "100mbps", "300mbps", "1gbps", "3gbps"]
METHODS = (
    "Identity",
    "ErrorFeedback(TopK(0.1))",
    "PowerGossip(rank=2)",
    "DiLoCo(15)",
    "DiLoCo(15, codec=Quantize(4))",
)


def main(
    runs: Annotated[Path, typer.Option(help="A new folder for the runs.")] = Path("results/local_steps"),
    picture: Annotated[Path, typer.Option(help="File of the figure.")] = Path("local_steps.png"),
    steps: int = 300,
    seeds: int = 3,
) -> None:
    """Print accuracy and bytes of each method, and draw seconds of a step against bandwidth."""
    shape = ("num_stages=1", "num_replicas=2", "num_microbatches=1", f"steps={steps}")
    for method in METHODS:
        for seed in range(seeds):
            changes = (*shape, f"seed={seed}", f"replica_gradient={method}")
            raysim.train("digits-cnn", *changes, engine="inline", out=runs / f"{METHODS.index(method)}-{seed}")

    results = load(runs)
    table = results.runs.groupby("replica_gradient")[["final_accuracy_on", "compression_factor"]]
    print(table.agg(["mean", "std"]).loc[list(METHODS)].to_string())

    priced = replay(results, NETWORKS).merge(results.runs[["run", "replica_gradient"]], on="run", suffixes=("_", ""))
    seconds = priced.groupby(["replica_gradient", "bandwidth_bps"])["step_s"].mean().unstack(0)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for method in METHODS:
        axes.loglog(seconds.index / 1e6, 1e3 * seconds[method], "o-", label=method)
    axes.set(xlabel="bandwidth between the replicas, Mbit/s", ylabel="step, ms")
    axes.legend()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
