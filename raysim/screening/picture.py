"""Draw a screen: the loss added at once against the speed-up."""

from __future__ import annotations

import math
from pathlib import Path

from raysim.screening.screen import Screen, words
from raysim.screening.verdicts import HOPELESS, LOST, NO_GAIN, WORTH, knowledge
from raysim.storage.files import output_file

COLOURS = {WORTH: "tab:green", NO_GAIN: "0.6", HOPELESS: "tab:red"}
LEAST = 1e-4  # loss at the foot of the axis: smaller differences are drawn there


def draw(done: Screen, path: Path) -> None:
    """Write a PNG with a point for each setting, on the first of at least one network."""
    from matplotlib.figure import Figure

    network = repr(done.networks[0])
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    axes = figure.subplots()
    drawn = [each for each in done.settings[1:] if each.result.measures and network in each.prices]
    for i, each in enumerate(drawn, 1):
        point = (each.prices[network].speedup, max(each.result.measures["loss"].difference, LEAST))
        axes.scatter(*point, color=COLOURS[each.verdict], label=f"{i}: {words(each.setting)}")
        axes.annotate(str(i), point, fontsize=8, xytext=(4, 3), textcoords="offset points")
    loss = done.dense.result.measures["loss"].value
    if not math.isnan(known := knowledge(loss, done.chance["loss"])):
        axes.axhline(LOST * known, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(1.0, color="0.8", linewidth=0.8, zorder=0)
    axes.set_yscale("log")
    axes.set_xlabel(f"speed-up on {network}")
    axes.set_ylabel(f"loss added at once (dense: {loss:.3g})")
    axes.set_title(f"{done.config.name}: screened on {done.num_samples} samples")
    title = "green: worth training, red: hopeless at once, grey: no gain"
    figure.legend(fontsize=7, loc="outside right upper", title=title, title_fontsize=7)
    with output_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
