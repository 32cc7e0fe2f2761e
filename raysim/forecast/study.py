"""Write a study that tests whether the settings that pay on a network are safe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raysim.config import read_config
from raysim.forecast.advise import Advice
from raysim.forecast.compute import record_profile
from raysim.forecast.fleet import DENSE, SAME, Setting
from raysim.forecast.job import method_of
from raysim.forecast.shapes import UNNAMED, ModelShape
from raysim.forecast.structure import RecipeModel
from raysim.notation import InputError
from raysim.storage.files import output_file
from raysim.units import format_seconds

SEEDS = 5
MEASURED_STEPS = 1
STAND_IN = "topics-gpt"
"""Small recipe used in place of a model given by its shape."""


def write_study(advice: Advice, source: str | None, path: Path) -> str:
    """Write the study file and return a summary of it; raises InputError if no setting pays."""
    settings = list(dict.fromkeys(row.way.setting for row in advice.paying()))
    network = advice.networks[0]
    if not settings:
        raise InputError(
            f"`--study`: nothing pays on {network!r}, where dense is within 5 % of every setting. Try a slower network."
        )
    base, steps = _base(advice, source)
    kept = [setting for setting in settings if _divides(setting.replica_gradient, steps)]
    if not kept:
        raise InputError(
            f"`--study`: the settings that pay exchange too seldom for {steps} steps. Add --local-steps 10."
        )
    replicated = any(setting.replica_gradient != SAME for setting in kept)
    network_name = network.name or repr(network)
    lines = [
        f"# Written by raysim advise: the settings that would pay on {network_name}, beside dense.",
        f"# Train them by: raysim sweep {path.name}",
        f"seeds = {list(range(SEEDS))}",
        'sampler = "grid"',
        f'objectives = ["loss_on", "wire_bytes", {json.dumps(f"step_s@{network_name}/{advice.job.transport.name}")}]',
        'constraints = [{ objective = "loss_on", within = 0.01, of = "dense" }]',
        *base,
        *(["", "[set]", "num_replicas = 2"] if replicated else []),
        "",
        "[[baselines]]",
        'name = "dense"',
        'set = { forward = "Identity", backward = "Identity" }',
    ]
    for setting in kept:
        changed = {key: value for key, value in setting._asdict().items() if value != SAME}
        lines += ["", f"[space.variants.{json.dumps(' / '.join(changed.values()))}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in changed.items()]
    with output_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
    runs = SEEDS * (len(kept) + 1)
    price = f"{runs} runs of {steps} steps take {_price(advice, kept, steps)}."
    return f"Study: {path}, {len(kept)} settings and dense on {SEEDS} seeds. {price} Train it by: raysim sweep {path}"


def _price(advice: Advice, settings: Sequence[Setting], steps: int) -> str:
    """Return, in words, the duration of a study's runs in sequence: as advised, or measured here for `STAND_IN`."""
    if isinstance(advice.job.model, ModelShape) and advice.job.model.name == UNNAMED:
        config = read_config(STAND_IN)
        profile = record_profile(config, num_steps=MEASURED_STEPS)
        cpu_s = profile.cpu_s / config.threads_per_stage  # independent of other load on the machine
        actions_s = np.where(np.isnan(cpu_s), profile.compute_s, cpu_s) + profile.encode_s + profile.decode_s
        step_s = config.num_microbatches * float(actions_s.mean(axis=3).sum()) + float(profile.update_s.sum())
        whole_s = SEEDS * (len(settings) + 1) * steps * step_s
        return (
            f"{format_seconds(whole_s)} on this machine one after another ({STAND_IN}, {format_seconds(step_s)} a step without "
            "compression, measured)"
        )
    whole_s = SEEDS * steps * sum(_step_s(advice, setting) for setting in [DENSE, *settings])
    return (
        f"{format_seconds(whole_s)} one after another on {advice.job.fleet!r} over {advice.networks[0]!r}, by the steps above "
        f"(efficiency {advice.job.efficiency:g})"
    )


def _step_s(advice: Advice, setting: Setting) -> float:
    """Return the seconds of a setting's step on the first network, in its fastest layout."""
    rows = [row for row in advice.rows if row.way.setting == setting and row.fits]
    return min(row.networks[0].step_s for row in rows or [advice.dense])


def _base(advice: Advice, source: str | None) -> tuple[list[str], int]:
    """Return the study's lines on its base, and the base's number of steps."""
    model = advice.job.model
    if isinstance(model, RecipeModel):
        return [f"base = {json.dumps(source)}"], model.config.steps or 0
    if isinstance(model, ModelShape) and source is not None:
        steps = 200
        folder = source.removesuffix("config.json").rstrip("/") or "."
        return [
            "",
            "[base] # your data in place of train.txt",
            f'model = {{ name = "hf", path = {json.dumps(folder)} }}',
            f'data = {{ name = "text", path = "train.txt", length = {model.length} }}',
            f"num_stages = {max(row.way.layout.workers for row in [advice.dense, *advice.paying()])}",
            f"batch_size = {advice.job.batch}",
            f"num_microbatches = {advice.job.num_microbatches(advice.layout)}",
            f"steps = {steps}",
        ], steps
    config = read_config(STAND_IN)
    return [f"base = {json.dumps(STAND_IN)} # a small model: put your recipe here"], config.steps or 0


def _divides(method: str, steps: int) -> bool:
    """Return whether a method's exchanges fit a run of `steps` steps."""
    try:
        method_of(method).check_steps(steps)
    except ValueError:
        return False
    return True
