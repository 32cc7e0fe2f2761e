"""The records of a screen: its tables as Parquet files in one folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from raysim.config import ConfigError, as_row
from raysim.records import write_table
from raysim.screening.findings import findings
from raysim.screening.screen import Screen, Screened

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
    rows = tables(done)
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


def tables(done: Screen) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tables of `SCHEMAS`."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
    rows["tensors"] = [{**each._asdict(), "peak": each.peak} for each in done.facts]
    for each in done.settings:
        for name, row in _rows(each):
            rows[name].append({**each.setting._asdict(), **row})
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
