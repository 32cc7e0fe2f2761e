"""Is 4 bits safe for my model?

Trains every width from 8 bits to 2 in both directions, beside dense runs of the same seeds, and draws the loss of accuracy.
"""

from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer

import raysim
from raysim.analysis import load, settings

WIDTHS = (8, 6, 4, 3, 2)


def main(
    runs: Annotated[Path, typer.Option(help="A new folder for the runs.")] = Path("results/four_bits"),
    picture: Annotated[Path, typer.Option(help="File of the figure.")] = Path("four_bits.png"),
    recipe: Annotated[str, typer.Option(help="A recipe of yours.")] = "digits-cnn",
    steps: int = 300,
    seeds: int = 5,
) -> None:
    """Say which widths are shown to be safe."""
    for bits in (None, *WIDTHS):
        codec = f"Quantize({bits})" if bits else "Identity"
        for seed in range(seeds):
            changes = (f"steps={steps}", f"seed={seed}", f"forward={codec}", f"backward={codec}")
            raysim.train(recipe, *changes, engine="inline", out=runs / f"{bits or 'dense'}-{seed}")

    results = load(runs)
    verdicts = settings(results)
    print(verdicts[["setting", "verdict", "seeds"]].to_string(index=False))

    accuracy = results.runs.pivot_table(index="seed", columns="setting", values="final_accuracy_on") * 100
    dense = next(setting for setting in accuracy if setting not in set(verdicts["setting"]))
    lost = accuracy.drop(columns=dense).rsub(accuracy[dense], axis=0)
    order = [setting for bits in WIDTHS for setting in lost if f"Quantize({bits})" in setting]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, setting in enumerate(order):
        axes.plot([place] * len(lost), lost[setting], ".", color="grey")
        axes.errorbar(place, lost[setting].mean(), yerr=lost[setting].std(), fmt="o", color="tab:blue", capsize=4)
    axes.set_yscale("symlog", linthresh=1)
    axes.axhspan(axes.get_ylim()[0], 0.5, color="tab:green", alpha=0.15, label="within half a point of dense")
    verdict = verdicts.set_index("setting")["verdict"]
    axes.set_xticks(
        range(len(order)), [f"{bits} bits\n{verdict[name]}" for bits, name in zip(WIDTHS, order, strict=True)]
    )
    axes.set(ylabel="points of accuracy lost to dense, by seed")
    axes.legend()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
