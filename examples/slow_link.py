"""My link is 100 Mbit/s: what should I use?

Trains candidates over several seeds, replays all runs on the network, and draws accuracy against the speed-up over dense. With `--runs`
it takes the runs of any folder instead, such as a study.
"""

from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer

import raysim
from raysim.analysis import load, replay, settings

NETWORK = "100mbps"
CANDIDATES = {
    "dense": (),
    "16 bits": ("forward=Cast('bfloat16')", "backward=Cast('bfloat16')"),
    "8 bits": ("forward=Quantize(8)", "backward=Quantize(8)"),
    "5 and 6 bits": ("forward=Quantize(5)", "backward=ErrorFeedback(Quantize(6))"),
    "TopK 10 %": ("forward=TopK(0.1)", "backward=ErrorFeedback(TopK(0.1))"),
    "2 bits": ("forward=Quantize(2)", "backward=Quantize(2)"),
}


def train(runs: Path, steps: int, seeds: int) -> None:
    """Train every candidate on every seed."""
    for name, changes in CANDIDATES.items():
        for seed in range(seeds):
            out = runs / f"{name.replace(' ', '-')}-{seed}"
            raysim.train("digits-cnn", f"steps={steps}", f"seed={seed}", *changes, engine="inline", out=out)


def main(
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("results/slow_link"),
    picture: Annotated[Path, typer.Option(help="File of the figure.")] = Path("slow_link.png"),
    steps: int = 300,
    seeds: int = 5,
) -> None:
    """Say which setting to use at 100 Mbit/s."""
    if not runs.exists():
        train(runs, steps, seeds)
    results = load(runs)
    if not len(results):
        raise typer.BadParameter(" ".join(results.problems), param_hint="--runs")
    priced = replay(results, [NETWORK], against="dense")
    both = results.runs.merge(priced, on="run", suffixes=("", "_of_step"))
    links = ["forward", "backward"]
    summary = both.groupby(links)[["final_accuracy_on", "step_s", "speedup"]].mean().sort_values("step_s")
    summary["verdict"] = settings(results).set_index(links)["verdict"]
    print(summary.to_string())

    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    for (forward, backward), row in summary.iterrows():
        chosen = both[(both["forward"] == forward) & (both["backward"] == backward)]
        accuracy = 100 * chosen["final_accuracy_on"]
        verdict = row["verdict"] if isinstance(row["verdict"], str) else "the baseline"
        label = f"{forward}\n{backward}: {verdict}"
        axes.errorbar(row["speedup"], accuracy.mean(), yerr=accuracy.std(), fmt="o", capsize=3, label=label)
    axes.set(xlabel=f"speed-up over dense at {NETWORK}", ylabel="accuracy, % (bars: one deviation over seeds)")
    figure.legend(loc="outside right center", fontsize=7, labelspacing=1.2)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
