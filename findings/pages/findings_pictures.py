"""The pictures of the findings' pages."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from findings_tables import judged_by, name_of, races

from raysim.analysis import Results, replay, settings

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

COLOURS = {"safe": "#2a7f4f", "harmful": "#b3382c", "undecided": "#8a8a8a"}


def draw(results: Results, path: Path) -> None:
    """Draw the harm of each setting with its one-sided bounds, beside the margin."""
    judged = settings(results).dropna(subset="harm").sort_values("harm", ascending=False)
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.42 * len(judged)), layout="constrained")
    many = judged["context"].nunique() > 1
    for i, row in enumerate(judged.to_dict("records")):
        colour = COLOURS[row["verdict"]]
        low, high = row["harm_low"], row["harm_high"]
        if math.isfinite(low):
            axes.plot([low, high], [i, i], color=colour, linewidth=2)
        axes.plot(row["harm"], i, "o", color=colour)
        name = f"{row['context']}: {row['setting']}" if many else row["setting"]
        name = "\n".join(textwrap.wrap(name, 120, break_long_words=False, break_on_hyphens=False))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(0.005, i + 0.2, name, fontsize=8, bbox=box, transform=axes.get_yaxis_transform())
    axes.axvline(0, color="black", linewidth=0.8)
    axes.axvline(judged["within"].iloc[0], color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("symlog", linthresh=2)
    axes.set_yticks([])
    axes.set_xlabel(f"harm beside dense, {judged['unit'].iloc[0]} (dashed: the margin)")
    axes.set_ylim(-0.6, len(judged) - 0.2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for verdict, colour in COLOURS.items():
        axes.plot([], [], "o-", color=colour, label=verdict)
    figure.legend(loc="outside upper right", ncols=len(COLOURS), fontsize=8, frameon=False)
    _save(figure, path)


def draw_networks(results: Results, path: Path) -> None:
    """Draw the mean quality of each setting, whatever its job, against seconds on each network and against bytes."""
    runs = results.runs.set_index("run")
    names = pd.Series({run: name_of(row) for run, row in runs.iterrows()})
    prices = replay(results, list(races(results)), split=False)
    seconds = prices.assign(name=prices["run"].map(names)).groupby(["network", "name"], sort=False)["step_s"].mean()
    sent = (runs["wire_bytes"] / runs["steps"] / 1e6).groupby(names).mean()
    measure = judged_by(results)
    evals = results.evals[results.evals["mode"] == "on"]
    curves = evals.groupby([evals["run"].map(names), "step"], observed=True)[measure.name].mean().unstack(0)
    panels = {f"seconds, {network}": seconds[network] for network in dict.fromkeys(prices["network"])} | {"MB": sent}
    figure, grid = plt.subplots(2, math.ceil(len(panels) / 2), figsize=(13, 9), layout="constrained", sharey=True)
    order = curves.iloc[-1].sort_values(ascending=not measure.higher).index
    for axes, (title, factors) in zip(grid.flat, panels.items(), strict=False):
        for i, name in enumerate(order):
            style = {"color": plt.get_cmap("tab20")(i % 20)} if name != "dense" else {"color": "black", "linewidth": 3}
            axes.plot(curves.index * factors[name], curves[name], label=name, **style)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(title)
    end, start = curves["dense"].iloc[[-1, 0]]  # a setting far from dense shows only its end, or nothing
    for axes in grid[:, 0]:
        axes.set_ylim(*sorted((end - 0.1 * (start - end), start + 0.6 * (start - end))))
        axes.set_ylabel(measure.name)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7.5)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
