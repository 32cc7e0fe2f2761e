"""Outputs of a screen: its records, the study of the settings worth training, and a picture."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from raysim.config import ConfigError, as_row
from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.forecast.study import SEEDS, beside_dense, save_study
from raysim.network.topology import Network
from raysim.notation import InputError
from raysim.pipeline.plan import Plan
from raysim.quality import MEASURES
from raysim.records import write_table
from raysim.screening.findings import findings
from raysim.screening.screen import Screen, Screened, words
from raysim.screening.verdicts import HOPELESS, LOST, NO_GAIN, WORTH, knowledge
from raysim.storage.files import output_file

# --- records: tables as Parquet files in one folder ---------------------------------------------------------------------------


_SETTING = [(name, pa.string()) for name in ("forward", "backward", "replica_gradient")]
_FIGURES = pa.float64()

SCHEMAS: dict[str, pa.Schema] = {
    "settings": pa.schema(
        [
            *_SETTING,
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),
            ("codec_s", _FIGURES),
            ("verdict", pa.string()),
            ("reason", pa.string()),
        ]
    ),
    "measures": pa.schema(
        [*_SETTING, ("measure", pa.string()), ("value", _FIGURES), ("difference", _FIGURES), ("bound", _FIGURES)]
    ),
    "links": pa.schema(
        [
            *_SETTING,
            ("stage", pa.int16()),  # for replica gradients, else null
            ("boundary", pa.int16()),  # null for replica gradients
            ("direction", pa.string()),
            ("tensor", pa.string()),
            ("codec", pa.string()),
            ("packets", pa.int32()),
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),
            ("fidelity", _FIGURES),
            ("encode_s", _FIGURES),
            ("decode_s", _FIGURES),
        ]
    ),
    "gradients": pa.schema(
        [
            *_SETTING,
            ("stage", pa.int16()),
            *((name, _FIGURES) for name in ("cosine", "norm_ratio", "error", "noise")),
        ]
    ),
    "prices": pa.schema([*_SETTING, ("network", pa.string()), ("step_s", _FIGURES), ("speedup", _FIGURES)]),
    "tensors": pa.schema(
        [
            ("direction", pa.string()),
            ("boundary", pa.int16()),
            ("tensor", pa.string()),
            *((name, _FIGURES) for name in ("rms", "largest", "energy", "channels", "rows", "peak")),
        ]
    ),
}
"""The tables of a screen, without `run`, whose one row holds the keys of the run. Shares and ratios are plain numbers."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless a folder is new or empty, and can be written; leaves nothing behind."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"`--out` must be a new or empty folder, but {folder} holds files.")
        existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ConfigError(f"`--out` must be a folder that can be written, but {folder}: {error.strerror}.") from None


def write_records(done: Screen, folder: Path) -> None:
    """Write the tables of a screen into a folder; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = table_rows(done)
    for name, schema in SCHEMAS.items():
        write_table(pa.Table.from_pylist(rows[name], schema=schema), folder / f"{name}.parquet")
    run = {
        **as_row(done.config),
        "cuts": list(done.plan.cuts),
        "samples": done.num_samples,
        "messages": done.num_messages,
        "pass_s": done.pass_s,
        "seconds": done.seconds,
        "findings": findings(done),
        **{f"chance_{name}": value for name, value in done.chance.items()},
    }
    write_table(pa.Table.from_pylist([run]), folder / "screen.parquet")


def table_rows(done: Screen) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tables of `SCHEMAS`."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
    rows["tensors"] = [{**each._asdict(), "peak": each.peak} for each in done.facts]
    for each in done.settings:
        for name, row in _rows(each):
            rows[name].append({**each.setting.methods(), **row})
    return rows


def _rows(each: Screened) -> Iterator[tuple[str, dict[str, Any]]]:
    yield (
        "settings",
        {
            "wire_bytes": each.wire_bytes,
            "dense_bytes": each.dense_bytes,
            "codec_s": each.codec_s,
            "verdict": each.verdict,
            "reason": each.reason,
        },
    )
    for name, difference in each.result.measures.items():
        yield "measures", {"measure": name, **difference._asdict()}
    for link in each.result.measured.links:
        yield "links", dict(link)
    for direction in each.result.directions:
        yield "gradients", direction._asdict()
    for network, price in each.prices.items():
        yield "prices", {"network": network, **price._asdict()}


# --- a study of the settings worth training, beside dense, on the screen's own model and data ---------------------------------


LONGEST = 4096  # characters of a path
PATHS = ("path", "tokenizer", "config", "start", "profile")
"""Keys and options that may hold a path; other texts are names, even if there is a file of that name."""


def write_screen_study(done: Screen, base: Mapping[str, Any], path: Path, transport: str) -> str:
    """Write the study's file and return a summary of it; raises InputError if no setting is worth training.

    `base`: the values of the screened run, nested as in its file; relative paths of existing files become absolute.
    """
    settings = [each.setting for each in done.worth()]
    if not settings:
        raise InputError("`--study`: no setting is worth training, so there is nothing to study.")
    study = study_of(done.plan, done.networks, settings, base, transport)
    command = save_study(study, f"raysim screen: the settings worth training of {done.config.name}", path)
    return (
        f"Study: {path}, {len(settings)} settings and dense on {SEEDS} seeds, {SEEDS * (len(settings) + 1)} runs. "
        f"Train it by: {command}"
    )


def study_of(
    plan: Plan, networks: Sequence[Network], settings: Sequence[Setting], base: Mapping[str, Any], transport: str
) -> dict[str, Any]:
    """Return the keys of a study that compares settings with dense, on the run whose values are `base`."""
    measure = plan.task.measures[0]
    own = {key: _absolute(key, value) for key, value in base.items() if key != "name"}
    dense, variants = _keys(DENSE, plan), {words(setting): _keys(setting, plan) for setting in settings}
    study = beside_dense(measure, networks, transport, dense, variants)
    if measure.name not in MEASURES:
        direction = "maximize" if measure.higher else "minimize"
        study["objectives"][0] = {"name": f"{measure.name}_on", "direction": direction}
    return {"base": own} | study


def _keys(setting: Setting, plan: Plan) -> dict[str, str]:
    """Return a setting's keys of a run; those that have no effect in this run are left out."""
    keys = setting.methods()
    if not plan.boundaries:
        del keys["forward"], keys["backward"]
    if plan.num_replicas == 1:
        assert keys["replica_gradient"] == IDENTITY, "one replica has no gradients to average"
        del keys["replica_gradient"]
    if not plan.tied:
        assert keys["tied_gradient"] == IDENTITY, "no tied parameters to sum"
        del keys["tied_gradient"]
    return keys


def _absolute(key: str, value: Any) -> Any:
    """Return a value with the relative paths of existing files made absolute."""
    if isinstance(value, Mapping):
        return {name: _absolute(name, inner) for name, inner in value.items()}
    if key not in PATHS or not isinstance(value, str) or len(value) > LONGEST:
        return value
    folder, at, step = value.partition("@") if key == "start" else (value, "", "")
    path = Path(folder).expanduser()
    return f"{path.absolute()}{at}{step}" if path.exists() else value


# --- a picture: the loss added at once against the speed-up -------------------------------------------------------------------


COLOURS = {WORTH: "tab:green", NO_GAIN: "0.6", HOPELESS: "tab:red"}
LEAST = 1e-4  # loss at the foot of the axis: smaller differences are drawn there


def draw_screen(done: Screen, path: Path) -> None:
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
