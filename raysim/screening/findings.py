"""Findings of a screen, in sentences above its table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raysim.quality import MEASURES
from raysim.screening.passes import TensorFacts
from raysim.screening.screen import Screen, Screened, words
from raysim.screening.verdicts import knowledge, knowledge_lost
from raysim.units import format_seconds, two_digits

FAITHFUL = 0.9
"""Fidelity of every cut from which a setting looks faithful."""
MISLED = 0.1
"""Share of knowledge whose loss a faithful setting hides."""
SEEN = 0.01
"""Share of a step from which a cause is named."""


def findings(done: Screen) -> list[str]:
    """Return sentences on the tensors, on misleading fidelity, and on the model's distance from chance."""
    lines = _tensor_words(done.facts)
    loss, base = done.dense.result.measures["loss"].value, done.chance["loss"]
    if math.isnan(knowledge(loss, base)):
        lines.append(
            f"The model knows little yet: its loss is {loss:.4g}, and {base:.4g} by the frequencies of the targets alone. So no "
            "setting can be called hopeless."
        )
    misleading = [each for each in done.settings[1:] if _misleads(done, each)]
    if misleading:
        worst = max(misleading, key=lambda each: each.result.measures["loss"].difference)
        low, high = (pick(worst.fidelities("forward")) for pick in (min, max))
        harm = worst.result.measures["loss"].difference
        others = f", and {len(misleading) - 1} more" if len(misleading) > 1 else ""
        lines.append(
            f"Fidelity misleads here: {words(worst.setting)} keeps {low:.3f} to {high:.3f} of the energy and adds {harm:.2g} to the "
            f"loss{others}. The energy is that of a few large values; judge by the loss."
        )
    return [*lines, *_hidden_words(done), *_gradient_words(done), *_share_words(done)]


def _hidden_words(done: Screen) -> list[str]:
    """Return a sentence on settings that pass by loss, but surely fail by another measure."""
    dense = done.dense.result.measures
    hidden = []
    for measure in (each for each in done.plan.task.measures if each.points and each.higher):
        for each in done.settings[1:]:
            own = each.result.measures
            if not own or MEASURES["loss"].harm(own["loss"].value, dense["loss"].value) > MEASURES["loss"].margin:
                continue
            lost = -100 * own[measure.name].difference
            if lost - 100 * own[measure.name].bound > measure.margin:
                hidden.append((lost, measure, each))
    if not hidden:
        return []
    lost, measure, each = max(hidden, key=lambda item: item[0])
    others = f", and {len(hidden) - 1} more" if len(hidden) > 1 else ""
    harm = each.result.measures["loss"].difference
    return [
        f"The loss hides harm: {words(each.setting)} adds {harm:+.2g} to it, and takes {two_digits(lost)} {measure.unit}{others}."
    ]


def _share_words(done: Screen) -> list[str]:
    """Return a sentence for each network: the dense step's time, and how much sending nothing would save."""
    lines = []
    for network, shares in done.shares.items():
        step = format_seconds(done.dense.prices[network].step_s)
        causes = " and ".join(f"{share:.0%} on {name}" for name, share in shares.items() if share >= SEEN)
        lines.append(
            f"On {network} the dense step takes {step}"
            + (f"; sending nothing would save {causes}." if causes else "; what it sends costs less than 1 %.")
        )
    return lines


def _gradient_words(done: Screen) -> list[str]:
    """Return how many settings change gradients by less than their noise."""
    tried = [each.result.directions for each in done.settings[1:] if each.result.directions]
    if not tried or any(math.isnan(stage.noise) for stage in tried[0]):
        return []
    quiet = sum(all(stage.error < stage.noise for stage in stages) for stages in tried)
    return [
        f"Settings that change the gradient of every stage by less than its noise between steps: {quiet} of {len(tried)}. Training "
        "hardly sees such a change."
    ]


def _misleads(done: Screen, each: Screened) -> bool:
    loss, fidelities = each.result.measures.get("loss"), each.fidelities("forward")
    if loss is None or not fidelities or min(fidelities) < FAITHFUL:
        return False
    lost = knowledge_lost(loss, done.chance["loss"], surely=True)
    return not math.isnan(lost) and lost > MISLED


def _tensor_words(facts: Sequence[TensorFacts]) -> list[str]:
    """Return a sentence for each direction: the tensors' statistics and the conclusion."""
    lines = []
    for direction, noun in (("forward", "activation"), ("backward", "gradient")):
        own = [each for each in facts if each.direction == direction]
        if not own:
            continue
        worst = max(own, key=lambda each: each.peak)
        named = f" of {noun} `{worst.tensor}`" if worst.tensor else f" of the {noun}"
        words = (
            f"At cut {worst.boundary + 1} the largest value{named} is {worst.peak:.0f} times the root mean square; "
            f"0.1 % of the values hold {two_digits(100 * worst.energy)} % of the energy"
        )
        if worst.massive:
            channels, rows = (f"{two_digits(100 * share)} %" for share in (worst.channels, worst.rows))
            lines.append(
                f"{words}, half of these in {channels} of the channels and {rows} of the rows: one range for a tensor wastes its "
                "levels; group by `row` or `block`, or send the largest values separately."
            )
        else:
            lines.append(f"{words}: one range for a tensor may do.")
    return lines
