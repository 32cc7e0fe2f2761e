"""A study of the settings that would pay on a network: what would decide whether they are safe."""

from __future__ import annotations

import json
from pathlib import Path

from raysim.advice.advise import Advice
from raysim.advice.inputs import KEYS
from raysim.advice.job import SAME
from raysim.advice.recipe_shape import RecipeModel
from raysim.advice.shapes import ModelShape
from raysim.config import read_config
from raysim.errors import InputError

STAND_IN = "topics-gpt"
"""The recipe that stands for a model given by its shape: small enough for a laptop."""


def write_study(advice: Advice, source: str | None, path: Path) -> str:
    """Write the study file and return what it holds, in words; raises InputError if nothing pays."""
    rows = advice.paying()
    settings = list(dict.fromkeys((row.way.forward, row.way.backward, row.way.method) for row in rows))
    network = advice.networks[0]
    if not settings:
        raise InputError(
            f"`--study`: nothing pays on {network!r}, where dense is within 5 % of every setting. Try a slower network."
        )
    base, steps = _base(advice, source)
    kept = [setting for setting in settings if _divides(setting[2], steps)]
    if not kept:
        raise InputError(
            f"`--study`: the settings that pay exchange too seldom for {steps} steps. Add --local-steps 10."
        )
    replicated = any(method != SAME for *_, method in kept)
    network_name = network.name or repr(network)
    lines = [
        f"# Written by raysim advise: the settings that would pay on {network_name}, beside dense.",
        f"# Train them by: raysim sweep {path.name}",
        "seeds = [0, 1, 2, 3, 4]",
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
        lines += ["", f"[space.variants.{json.dumps(_name(setting))}]", *_keys(setting)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"Study: {path}, {len(kept)} settings and dense on 5 seeds. Train it by: raysim sweep {path}"


def _keys(setting: tuple[str, str, str]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in zip(KEYS, setting, strict=True) if value != SAME]


def _name(setting: tuple[str, str, str]) -> str:
    return " / ".join(value for value in setting if value != SAME)


def _base(advice: Advice, source: str | None) -> tuple[list[str], int]:
    """Return the lines of the study's base, and its steps."""
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
            f"num_stages = {advice.layout.workers}",
            f"batch_size = {advice.job.batch}",
            f"num_microbatches = {advice.job.num_microbatches(advice.layout)}",
            f"steps = {steps}",
        ], steps
    config = read_config(STAND_IN)
    return [f"base = {json.dumps(STAND_IN)} # a small model: put your recipe here"], config.steps or 0


def _divides(method: str, steps: int) -> bool:
    """Return whether a method's exchanges fit a run of so many steps."""
    rule = read_config(STAND_IN, ["num_replicas=2", f"replica_gradient={method}"]).replica_methods()[0]
    try:
        rule.check_steps(steps)
    except ValueError:
        return False
    return True
