"""Write a study that tests whether the settings that pay on a network are safe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from raysim.config import read_config
from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.forecast.advise import Advice
from raysim.forecast.compute import record_profile
from raysim.forecast.evidence import ELSEWHERE, UNTRIED
from raysim.forecast.fleet import HostLayout
from raysim.forecast.packets import method_of
from raysim.forecast.shapes import UNNAMED, ModelShape
from raysim.forecast.structure import RecipeModel
from raysim.network.topology import Network
from raysim.notation import InputError
from raysim.quality import MEASURES, Measure
from raysim.storage.files import output_file
from raysim.units import format_seconds

SEEDS = 5
MEASURED_STEPS = 1
STAND_IN = "topics-gpt"
"""Small recipe used in place of a model given by its shape."""
STEPS = 200
"""Steps of a study of a folder's model, unless its local steps need more."""
NAMELESS = "study"
"""A file of this name is a sweep's own, whose name stands in it."""
TOKENIZER = "tokenizer.json"
FILE = "FILE"
"""In a command: the text, for the user to fill in."""


class _Base(NamedTuple):
    """The run that a study changes."""

    source: str
    """A recipe or its file."""
    changes: dict[str, Any]
    """Keys that differ from it in every trial."""
    steps: int
    asked: tuple[str, ...] = ()
    """Arguments that the user adds to the command."""


def write_study(advice: Advice, source: str | None, path: Path) -> str:
    """Write the study of one layout, and return a summary of it; raises InputError if no setting pays.

    The layout is the requested one, or else the layout of the fastest setting that pays. The summary names omitted settings.
    """
    network = advice.networks[0]
    paying = [row for row in advice.paying() if not advice.chosen or row.way.layout == advice.layout]
    if not paying:
        raise InputError(
            f"`--study`: nothing pays on {network!r}, where dense is within 5 % of every setting. Try a slower network."
        )
    layout = paying[0].way.layout
    settings = list(dict.fromkeys(row.way.setting for row in paying if row.way.layout == layout))
    base = _base(advice, source, layout, settings)
    kept = [setting for setting in settings if _divides(setting.replica_gradient, base.steps)]
    if not kept:
        raise InputError(
            f"`--study`: the settings that pay exchange too seldom for {base.steps} steps. Add --local-steps 10."
        )
    about = f"raysim advise: the settings of {layout} that would pay on {network.name or repr(network)}"
    command = save_study(_keys(advice, path, base, kept), about, path, base.asked)
    runs = SEEDS * (len(kept) + 1)
    return " ".join(
        [
            f"Study: {path}, {len(kept)} settings and dense on {SEEDS} seeds, as {layout}.",
            f"{runs} runs of {base.steps} steps take {_price(advice, layout, kept, base.steps)}.",
            *_left_out(advice, layout, [setting for setting in settings if setting not in kept], base.steps),
            f"Train it by: {command}",
        ]
    )


def _keys(advice: Advice, path: Path, base: _Base, settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the keys of the study in a file."""
    network = advice.networks[0]
    name = network.name or repr(network)
    stem = re.sub(r"[^\w.+=-]+", "-", path.stem).lstrip(".") or NAMELESS
    if stem == NAMELESS:
        stem = re.sub(r"[^\w+=-]+", "-", f"{advice.job.model.name} on {name}").strip("-")
    changed = [setting.changes() for setting in settings]
    variants = {" / ".join(map(str, changes.values())): changes for changes in changed}
    dense = {"forward": IDENTITY, "backward": IDENTITY}
    beside = beside_dense(MEASURES["loss"], [network], advice.job.transport.name, dense, variants)
    return {"name": stem, "base": base.source, "set": base.changes, **beside}


def beside_dense(
    measure: Measure,
    networks: Sequence[Network],
    transport: str,
    dense: Mapping[str, str],
    variants: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Return the keys of a study that compares settings with dense, without those of its base run, by a measure and its margin."""
    objective = f"{measure.name}_on"
    return {
        "seeds": list(range(SEEDS)),
        "sampler": "grid",
        "early_stopping": "none",
        "objectives": [
            objective,
            "wire_bytes",
            *(f"step_s@{network.name or repr(network)}/{transport}" for network in networks),
        ],
        "constraints": [{"objective": objective, "within": measure.margin / 100, "of": "dense"}],
        "baselines": [{"name": "dense", "set": dense}],
        "space": {"variants": variants},
    }


def save_study(study: Mapping[str, Any], about: str, path: Path, asked: Sequence[str] = ()) -> str:
    """Write a study's file, `about` in a comment on top, and return the command that trains it.

    `asked`: arguments that the user adds to the command.
    """
    here = shlex.join(["raysim", "sweep", path.name, *asked])
    with output_file(path) as file:
        file.write(f"# Written by {about}, beside dense.\n# Train them by: {here}\n{tomli_w.dumps(study)}".encode())
    return shlex.join(["raysim", "sweep", str(path), *asked])


def _left_out(advice: Advice, layout: HostLayout, seldom: Sequence[Setting], steps: int) -> list[str]:
    """Return, in sentences, which settings of the tables are not in the study, and why."""
    sentences = []
    if seldom:
        names = ", ".join(setting.replica_gradient for setting in seldom)
        sentences.append(f"Left out, since they do not exchange after the last of {steps} steps: {names}.")
    harms = [row for row in advice.rows if row.known.breaks and row.way.layout == layout]
    if harms:
        sentences.append(f"Left out as known to do harm: {'; '.join(f'{row.way} ({row.known})' for row in harms)}.")
    others = dict.fromkeys(row.way.layout for row in advice.paying() if row.way.layout != layout)
    if others:
        sentences.append(
            f"Other layouts have their own studies: {'; '.join(f'{each} by {_options(each)}' for each in others)}."
        )
    return sentences


def _options(layout: HostLayout) -> str:
    """Return the options of `raysim advise` that choose a layout."""
    words = ["--stages", str(layout.workers), "--replicas", str(layout.replicas)]
    sharding = (
        [] if layout.sharding is None else ["--sharding", f'"{layout.sharding!r}"']
    )  # its texts have single quotes
    return " ".join([*words, *sharding])


def _price(advice: Advice, layout: HostLayout, settings: Sequence[Setting], steps: int) -> str:
    """Return, in words, the duration of a study's runs in sequence: as advised, or measured here for `STAND_IN`."""
    if _is_unnamed(advice):
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
    whole_s = SEEDS * steps * sum(_step_s(advice, layout, setting) for setting in [DENSE, *settings])
    return (
        f"{format_seconds(whole_s)} one after another on {advice.job.fleet!r} over {advice.networks[0]!r}, by the steps above "
        f"(efficiency {advice.job.efficiency:g})"
    )


def _step_s(advice: Advice, layout: HostLayout, setting: Setting) -> float:
    """Return the seconds of a setting's step on the first network, in a layout and the job's own schedule."""
    ways = [(row.way.layout, row.way.schedule, row.way.setting) for row in advice.rows]
    rows = [row for row, way in zip(advice.rows, ways, strict=True) if way == (layout, None, setting)]
    return min(row.networks[0].step_s for row in rows or [advice.dense])


def _is_unnamed(advice: Advice) -> bool:
    """Return whether the model was given by its shape, so that a small one stands for it."""
    return isinstance(advice.job.model, ModelShape) and advice.job.model.name == UNNAMED


def _base(advice: Advice, source: str | None, layout: HostLayout, settings: Sequence[Setting]) -> _Base:
    """Return the run that the study changes, long enough for the exchanges of its fastest setting."""
    job, model = advice.job, advice.job.model
    if _is_unnamed(advice):  # a small model with the same kinds of link
        config = read_config(STAND_IN)
        shape: dict[str, Any] = {"num_stages": 1} if layout.workers == 1 else {}
        return _lengthened(
            STAND_IN, shape | ({"num_replicas": 2} if layout.replicas > 1 else {}), config.steps or 0, settings
        )
    shape = {
        "num_stages": job.num_stages(layout),
        "num_replicas": layout.replicas,
        "batch_size": job.batch,
        "num_microbatches": job.num_microbatches(layout),
        "schedule": repr(job.schedule),
    }
    if isinstance(model, RecipeModel):
        assert source is not None
        own = model.config.flat() | {"num_stages": model.config.stages}
        changes = {key: value for key, value in shape.items() if str(own[key]) != str(value)}
        return _lengthened(source, changes, model.num_steps, settings)
    assert source is not None
    folder = _folder(source).resolve()
    weights = {"model.path": str(folder)} if model.trained else {"model.config": str(folder / "config.json")}
    tokens = {"data.tokenizer": str(folder)} if (folder / TOKENIZER).is_file() else {}
    data = {"data.name": "text", "data.length": model.length, **tokens}
    return _lengthened("hf", weights | data | shape, STEPS, settings, (f"data.path={FILE}",))


def _lengthened(
    source: str, changes: dict[str, Any], steps: int, settings: Sequence[Setting], asked: tuple[str, ...] = ()
) -> _Base:
    """Return the base with the least steps, from `steps` to ten times as many, that the first setting's exchanges fit."""
    method = settings[0].replica_gradient
    most = next((count for count in range(steps, 10 * steps + 1) if _divides(method, count)), steps)
    given = source == "hf" and asked  # the recipe's length is of its own data
    return _Base(source, changes | ({"steps": most} if given or most != steps else {}), most, asked)


def _divides(method: str, steps: int) -> bool:
    """Return whether a method's exchanges fit a run of `steps` steps."""
    try:
        method_of(method).check_steps(steps)
    except ValueError:
        return False
    return True


def _folder(source: str) -> Path:
    """Return the folder of a transformers config."""
    return Path(source).parent if source.endswith(".json") else Path(source)


def screen_command(advice: Advice, source: str | None) -> str | None:
    """Return the command that tries the settings on trained weights; None without such weights or untried settings."""
    model = advice.job.model
    untried = any(row.known.verdict == UNTRIED for row in advice.rows)
    if source is None or not untried or model.scope.origin != ELSEWHERE:
        return None
    words = [source]
    if isinstance(model, ModelShape):
        folder = str(_folder(source))
        tokens = [f"data.tokenizer={folder}"] if (_folder(source) / TOKENIZER).is_file() else []
        words = ["hf", f"model.path={folder}", "data=text", f"data.path={FILE}", *tokens]
    stages = max(advice.job.num_stages(row.way.layout) for row in advice.rows)
    networks = [word for network in advice.networks for word in ("--network", network.name or repr(network))]
    return shlex.join(["raysim", "screen", *words, f"num_stages={stages}", *networks])
