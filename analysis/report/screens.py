"""The report of a screen: the immediate effect of each setting on a model, from the records of `raysim screen --out`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from raysim.analysis.data import AnalysisError
from raysim.analysis.report.page import (
    COLOURS,
    GREY,
    Chart,
    Page,
    Panel,
    Section,
    Style,
    Table,
    Text,
    axis,
    scatter_trace,
)
from raysim.config.identity import IDENTITY
from raysim.network.prices import times
from raysim.records import UNREADABLE, read_whole
from raysim.storage.places import Place
from raysim.units import plural

KEYS = ["forward", "backward", "replica_gradient"]
LOOKS = {
    "worth training": Style(COLOURS[2], "circle"),
    "no gain on this network": Style(GREY, "square"),
    "hopeless at once": Style(COLOURS[1], "x"),
}
LEAST = 1e-4  # loss at the foot of the axis
MOST_ROWS = 1_000_000
"""Most rows of a table: a screen has one for each setting and cut."""
WITHOUT = "none given"
"""The network of a screen without prices."""


def screen_page(folder: Place) -> Page:
    """Return the report of a screen's folder; raises AnalysisError if a table is damaged."""
    try:
        tables = {
            name: read_whole(folder / f"{name}.parquet", MOST_ROWS).to_pandas()
            for name in ("screen", "settings", "measures", "links", "gradients", "prices", "tensors")
        }
        if len(tables["screen"]) != 1:
            raise ValueError(f"screen.parquet must have one row, but has {len(tables['screen'])}")
        return _page(tables)
    except KeyError as error:
        raise AnalysisError(f"The screen in {folder} cannot be read: there is no column {error}.") from None
    except (*UNREADABLE, IndexError, TypeError) as error:
        raise AnalysisError(f"The screen in {folder} cannot be read: {str(error).rstrip('.')}.") from None


def _page(tables: dict[str, pd.DataFrame]) -> Page:
    run = tables["screen"].iloc[0]
    settings = tables["settings"].assign(setting=_names(tables["settings"]))
    networks = list(dict.fromkeys(tables["prices"]["network"])) or [WITHOUT]
    priced = len(tables["prices"]) > 0
    tried = settings[settings["verdict"] != "dense"]
    worth = tried[tried["verdict"] == "worth training"]
    lead = f"{len(worth)} of {plural(len(tried), 'setting')} are worth training; whether they are safe takes a study."
    shown = [Text(lead, "lead"), *(Text(str(line)) for line in run["findings"])]
    frame = pd.DataFrame([_row(row, tables, networks) for row in settings.to_dict("records")])
    caption = (
        f"Each setting at once, on {plural(int(run['samples']), 'test sample')}, without training. Differences from dense have a 95 % "
        "bound. Fidelity: the lowest over all cuts. Gradient: cosine of the stage that changes most."
    )
    tensors = tables["tensors"].rename(columns={"largest": "largest magnitude", "peak": "over rms"})
    sections = [
        Section("summary", "Summary", shown),
        Section("settings", "Settings", [Table("settings", caption, frame)]),
        *([Section("speed", "Loss at once against speed-up", [_chart(settings, tables, networks)])] if priced else []),
        Section("tensors", "Tensors at the cuts", [Table("tensors", "The dense messages of each link.", tensors)]),
    ]
    name = str(run["name"])
    subtitle = f"{plural(len(tried), 'setting')}, {plural(int(run['samples']), 'sample')}."
    return Page(f"Screen of {name}", subtitle, [], sections, networks if priced else (), networks[0])


def _names(frame: pd.DataFrame) -> list[str]:
    return [
        " / ".join(row[key] for key in KEYS[:2]) + ("" if row[KEYS[2]] == IDENTITY else f", replicas {row[KEYS[2]]}")
        for row in frame.to_dict("records")
    ]


def _of(frame: pd.DataFrame, row: Mapping[Any, Any]) -> pd.DataFrame:
    """Return the rows of a table that are of a setting."""
    return frame[(frame[KEYS] == [row[key] for key in KEYS]).all(axis=1)]


def _row(row: Mapping[Any, Any], tables: dict[str, pd.DataFrame], networks: list[str]) -> dict[str, Any]:
    measures, links, gradients, prices = (
        _of(tables[name], row) for name in ("measures", "links", "gradients", "prices")
    )
    cells: dict[str, Any] = {"setting": "dense" if row["verdict"] == "dense" else row["setting"]}
    for measure in tables["measures"]["measure"].unique():
        own = measures[measures["measure"] == measure]
        cells[measure] = _measured(own.iloc[0]) if len(own) else "-"
    fidelity, cosine = links["fidelity"].min(), gradients["cosine"].min()
    cells["fidelity"] = "-" if math.isnan(fidelity) else f"{fidelity:.4g}"
    cells["gradient"] = "-" if math.isnan(cosine) else f"{cosine:.3f}"
    cells["fewer bytes"] = f"{row['dense_bytes'] / row['wire_bytes']:.1f}x" if row["wire_bytes"] else "-"
    if len(tables["prices"]):
        by_network = prices.set_index("network")["speedup"]
        cells["speed-up"] = {each: f"{times(by_network[each])}x" if each in by_network else "-" for each in networks}
    return cells | {"verdict": row["verdict"], "reason": row["reason"] or ""}


def _measured(row: pd.Series[Any]) -> str:
    """Return a measure, and its difference from dense with its bound."""
    if not row["difference"]:
        return f"{row['value']:.4g}"
    bound = "" if math.isnan(row["bound"]) else f" ± {row['bound']:.2g}"
    return f"{row['value']:.4g} ({row['difference']:+.2g}{bound})"


def _chart(settings: pd.DataFrame, tables: dict[str, pd.DataFrame], networks: list[str]) -> Chart:
    measures = tables["measures"][tables["measures"]["measure"] == "loss"]
    points = settings.merge(measures, on=KEYS).merge(tables["prices"], on=KEYS)
    traces = [
        scatter_trace(
            verdict,
            own["speedup"],
            own["difference"].clip(lower=LEAST),
            look,
            labels=own["setting"].tolist(),
            network=network,
        )
        for network in networks
        for verdict, look in LOOKS.items()
        if len(own := points[(points["network"] == network) & (points["verdict"] == verdict)])
    ]
    caption = f"Loss added at once; below {LEAST:g} it is drawn there. Hover over a point for its setting."
    panel = Panel("", axis("speed-up"), axis("loss added at once", log=True), traces)
    return Chart("screen", "Loss at once against speed-up", caption, [panel], columns=1)
