"""Draw README's picture: loss against speed-up for every compression of a GPT in the studies of docs/findings/data.

Run `make findings`. Step times are prices at 100 Mbit/s over Ray; bounds of the loss are those of the findings' tables.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from findings_tables import name_of
from PIL import Image

from raysim import analysis
from raysim.analysis import frontier, load, replay

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
DATA = DOCS / "findings" / "data"
PICTURE = DOCS / "images" / "frontier.png"
NETWORK = "100mbps"
COLOURS = {"safe": "#2a7f4f", "harmful": "#b3382c", "undecided": "#8a8a8a"}
STUDIES = {"finetune-links": "Links between four stages", "finetune-replicas": "Gradients of two replicas, and links"}
LABELS = {  # of settings to name: text, its offset in points, and its alignment
    "backward=LowRank(16)": ("LowRank(16)\non gradients", (6, -24), "left"),
    "forward=TopK(0.1) shared_indices=true": ("TopK(0.1), gradients\nat the same positions", (-8, -28), "right"),
    "forward=Quantize(2) backward=Quantize(6)": ("Quantize(2) / Quantize(6)", (-8, -4), "right"),
    "forward=TopK(0.1) backward=TopK(0.1)": ("TopK(0.1) both ways", (-16, -2), "right"),
    "forward=TopK(0.05) backward=TopK(0.05)": ("TopK(0.05)\nboth ways", (0, 22), "center"),
    "forward=AQSGD(TopK(0.1)) backward=TopK(0.1)": ("AQSGD(TopK(0.1)) / TopK(0.1)", (-8, -4), "right"),
    "replica_gradient=PowerSGD(8)": ("PowerSGD(8)\nat all stages", (-6, -34), "right"),
    'replica_gradient=["PowerSGD(8)", "PowerSGD(8)", "PowerSGD(8)", "Identity"]': (
        "PowerSGD(8),\nlast stage dense",
        (6, -26),
        "left",
    ),
    'backward=Epilogue(LazyErrorPropagation(WarmStart(LowRank(8)))) replica_gradient=["PowerSGD(8)", "PowerSGD(8)", '
    '"PowerSGD(8)", "Identity"] fused_embedding=true': ("all of Optimus-CC", (8, -4), "left"),
    "backward=LazyErrorPropagation(WarmStart(LowRank(8)))": ("LazyErrorPropagation(...)", (8, -2), "left"),
}


def settings(study: str) -> pd.DataFrame:
    """Return a row for each setting of a study: its verdict, its loss beside dense in per cent, and its speed-up, with bounds."""
    results = load(DATA / study)
    names = {row["run"]: name_of(row) for _, row in results.runs.iterrows()}
    prices = replay(results, [NETWORK], split=False)
    steps = prices.groupby(prices["run"].map(names))["step_s"].mean()
    speedups = (steps["dense"] / steps).rename("speedup")
    judged = analysis.settings(results).set_index("setting")
    dense = pd.DataFrame({"harm": 0.0, "harm_low": 0.0, "harm_high": 0.0, "verdict": "dense"}, index=["dense"])
    return pd.concat([dense, judged[dense.columns]]).join(speedups).rename_axis("setting").reset_index()


def draw(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the settings of a study, and the line of those that no other one beats."""
    best = frontier(rows, {"speedup": "maximize", "harm": "minimize"}).sort_values("speedup")
    axes.plot(best["speedup"], best["harm"], color="black", linewidth=1, zorder=1)
    for row in rows.to_dict("records"):
        colour = COLOURS.get(row["verdict"], "black")
        axes.plot([row["speedup"]] * 2, [row["harm_low"], row["harm_high"]], color=colour, linewidth=1.5)
        axes.plot(row["speedup"], row["harm"], "s" if row["verdict"] == "dense" else "o", color=colour)
        if row["setting"] in LABELS:
            text, offset, side = LABELS[row["setting"]]
            point = (row["speedup"], row["harm"])
            axes.annotate(text, point, offset, textcoords="offset points", ha=side, fontsize=8.5)
    axes.margins(x=0.1)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yscale("symlog", linthresh=2, linscale=1.5)
    axes.set_yticks([0, 1, 2, 5, 10, 20, 50, 100])
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_xlabel("speed-up of a step at 100 Mbit/s")


if __name__ == "__main__":
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for axes, (study, title) in zip(panels, STUDIES.items(), strict=True):
        draw(axes, settings(study))
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("loss above dense, five seeds")
    for verdict, colour in COLOURS.items():
        panels[0].plot([], [], "o-", color=colour, label=verdict)
    panels[0].plot([], [], "s", color="black", label="dense")
    panels[0].plot([], [], color="black", linewidth=0.8, linestyle="--", label="margin: 1 %")
    figure.legend(loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None})
    with Image.open(PICTURE) as picture:  # it has few colours
        picture.convert("RGB").quantize(64).save(PICTURE, optimize=True)
