"""Draw README's picture: loss against bytes on links, for a model trained elsewhere and for a small GPT.

Run `make findings`. Bounds are those of the findings' tables. A setting with one seed has no bounds and is drawn hollow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from findings_tables import name_of
from PIL import Image

from raysim import analysis
from raysim.analysis import frontier, load

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
DATA = DOCS / "findings" / "data"
PICTURE = DOCS / "images" / "frontier.png"
COLOURS = {"safe": "#2a7f4f", "harmful": "#b3382c", "undecided": "#8a8a8a"}
STUDIES = {
    "trained-links": "SmolLM2, 135 million parameters, trained elsewhere",
    "finetune-links": "A GPT of 5.6 million parameters",
}
LABELS = {  # of settings to name, by study: text, its offset in points, and its alignment
    "trained-links": {
        "forward=Quantize(8, per='row') backward=Quantize(8, per='row')": ("Quantize(8, per='row')", (4, -18), "left"),
        "forward=Rotated(4) backward=Rotated(4)": ("Rotated(4)", (8, -10), "left"),
        "forward=Rotated(3) backward=Rotated(4)": ("Rotated(3)", (8, 5), "left"),
        "forward=TAHQuant(tile=64) backward=Quantize(6, per='row')": ("TAHQuant(tile=64)", (-8, -3), "right"),
        "forward=Quantize(4, per='block', block=64) backward=Quantize(8, per='row')": (
            "Quantize(4, per='block')",
            (-8, -3),
            "right",
        ),
        "forward=TopK(0.3) backward=TopK(0.3)": ("TopK(0.3)", (-8, -3), "right"),
        "forward=AQSGD(TopK(0.3)) backward=TopK(0.3)": ("AQSGD(TopK(0.3))", (-6, 8), "right"),
        "forward=ErrorFeedback(TopK(0.1)) backward=ErrorFeedback(TopK(0.1))": (
            "ErrorFeedback(TopK(0.1))",
            (-8, -8),
            "right",
        ),
        "forward=Quantize(8) backward=Quantize(8)": ("Quantize(8)", (-8, -3), "right"),
    },
    "finetune-links": {
        "backward=LowRank(16)": ("LowRank(16) on gradients", (8, -14), "left"),
        "forward=TopK(0.1) shared_indices=true": ("TopK(0.1), gradients\nat the same positions", (-4, -44), "center"),
        "forward=Quantize(2) backward=Quantize(6)": ("Quantize(2) / Quantize(6)", (-8, -4), "right"),
        "forward=TopK(0.1) backward=TopK(0.1)": ("TopK(0.1)", (-16, -4), "right"),
        "forward=TopK(0.05) backward=TopK(0.05)": ("TopK(0.05)", (0, 18), "center"),
        "forward=AQSGD(TopK(0.1)) backward=TopK(0.1)": ("AQSGD(TopK(0.1)) / TopK(0.1)", (8, 4), "left"),
    },
}


def settings(study: str) -> pd.DataFrame:
    """Return a row for each setting of links: its verdict, its loss above dense in per cent with bounds, and its bytes."""
    results = load(DATA / study)
    names = {row["run"]: name_of(row) for _, row in results.runs.iterrows()}
    links = results.links[results.links["direction"].isin(["forward", "backward"])]
    sent = links.groupby(links["run"].map(names))[["dense_bytes", "wire_bytes"]].sum()
    judged = analysis.settings(results).set_index("setting")
    dense = pd.DataFrame({"harm": 0.0, "harm_low": 0.0, "harm_high": 0.0, "verdict": "dense"}, index=["dense"])
    rows = pd.concat([dense, judged[dense.columns]]).assign(fewer=sent["dense_bytes"] / sent["wire_bytes"])
    return rows[(rows["fewer"] > 1.05) | (rows["verdict"] == "dense")].rename_axis("setting").reset_index()


def draw(axes: Axes, rows: pd.DataFrame, labels: Mapping[str, Any]) -> None:
    """Draw the settings of a study, and the line of those that no other one beats."""
    best = frontier(rows, {"fewer": "maximize", "harm": "minimize"}).sort_values("fewer")
    axes.plot(best["fewer"], best["harm"], color="black", linewidth=1, zorder=1)
    for row in rows.to_dict("records"):
        colour = COLOURS.get(row["verdict"], "black")
        bounded = math.isfinite(row["harm_low"])
        if bounded:
            axes.plot([row["fewer"]] * 2, [row["harm_low"], row["harm_high"]], color=colour, linewidth=1.5)
        shape = "s" if row["verdict"] == "dense" else "o"
        axes.plot(row["fewer"], row["harm"], shape, color=colour, markerfacecolor=colour if bounded else "white")
        if row["setting"] in labels:
            text, offset, side = labels[row["setting"]]
            point = (row["fewer"], row["harm"])
            axes.annotate(text, point, offset, textcoords="offset points", ha=side, fontsize=8.5)
    axes.set_xscale("log", base=2)
    axes.margins(x=0.1)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yscale("symlog", linthresh=2, linscale=1.5)
    axes.set_yticks([0, 1, 2, 5, 10, 20, 50, 100])
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_xticks([1, 2, 4, 8, 16], labels=["dense", "2x", "4x", "8x", "16x"])
    axes.set_xlabel("times fewer bytes on links")


if __name__ == "__main__":
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharex=True, sharey=True)
    for axes, (study, title) in zip(panels, STUDIES.items(), strict=True):
        draw(axes, settings(study), LABELS[study])
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("loss above dense")
    for verdict, colour in COLOURS.items():
        panels[0].plot([], [], "o-", color=colour, label=verdict)
    panels[0].plot([], [], "s", color="black", label="dense")
    panels[0].plot([], [], color="black", linewidth=0.8, linestyle="--", label="margin: 1 %")
    figure.legend(loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None})
    with Image.open(PICTURE) as picture:  # it has few colours
        picture.convert("RGB").quantize(64).save(PICTURE, optimize=True)
