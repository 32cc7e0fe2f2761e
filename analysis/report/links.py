"""Bytes per link: the wire bytes of each setting at each boundary and direction."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raysim.analysis.report.blocks import Cell, Column, Section, Table
from raysim.analysis.report.curves import looks
from raysim.analysis.report.figures import Axis, Figure, Panel, Series, finite
from raysim.analysis.report.material import Job, Material
from raysim.analysis.report.words import bytes_of, seconds
from raysim.records import with_replicas

COLUMNS = (
    Column("setting"),
    Column("link"),
    Column("codec"),
    Column("dense", number=True),
    Column("wire", number=True),
    Column("factor", number=True),
    Column("fidelity", number=True),
    Column("encode", number=True),
    Column("decode", number=True),
)
ARROWS = {"forward": "→", "backward": "←"}
AMOUNTS = ("wire_bytes", "dense_bytes", "packets", "encode_s", "decode_s")


def section(material: Material) -> Section:
    """Return a figure and a table a job, of the settings with a look of their own."""
    blocks: list[Figure | Table] = []
    for job in material.jobs:
        links = _links(job, material)
        if len(links):
            blocks += [_figure(job, links), _table(job, links, material)]
    if not blocks:
        return Section(
            "links",
            "Bytes per link",
            absent="No run here has links that sent anything: pipelines of one stage have none.",
        )
    return Section("links", "Bytes per link", blocks)


def _links(job: Job, material: Material) -> pd.DataFrame:
    """Return one row for each setting and link, means over steps and seeds."""
    named = {run: setting.name for setting in job.named for run in setting.runs}
    rows = material.results.select(list(named)).links
    if not len(rows):
        return rows
    rows = rows.assign(setting=[named[str(run)] for run in rows["run"]])
    rows = pd.concat([with_replicas(mine) for _, mine in rows.groupby("setting", sort=False)])
    rows = rows.assign(
        link=[
            ", ".join(filter(None, (name_of(boundary, str(direction)), str(tensor), replicas)))
            for boundary, direction, tensor, replicas in zip(
                rows["boundary"], rows["direction"], rows["tensor"], rows["replicas"], strict=True
            )
        ],
    )
    groups = rows.groupby(["setting", "link"], sort=False, observed=True)
    counts = rows.groupby(["setting", "link"], sort=False, observed=True)[["run", "step"]].apply(
        lambda part: len(part.drop_duplicates())
    )
    found = groups[list(AMOUNTS)].sum().astype(float).div(counts, axis=0)  # a step's, over its replicas
    found["fidelity"] = groups["fidelity"].mean()
    found["codec"] = groups["codec"].agg(lambda values: " | ".join(dict.fromkeys(map(str, values))))
    return found.reset_index()


def name_of(boundary: Any, direction: str) -> str:
    """Return a link in words: "0 → 1" forward, "0 ← 1" backward."""
    if direction not in ARROWS or boundary is None or repr(boundary) in ("<NA>", "nan"):
        return direction
    stage = int(boundary)
    return f"{stage} {ARROWS[direction]} {stage + 1}"


def _figure(job: Job, links: pd.DataFrame) -> Figure:
    chosen = looks(job)
    order = list(dict.fromkeys(links["link"]))
    panels = []
    for title, names in (
        ("Activations (forward)", [name for name in order if ARROWS["forward"] in name]),
        ("Gradients (backward)", [name for name in order if ARROWS["forward"] not in name]),
    ):
        rows = links[links["link"].isin(names)]
        series = []
        for name, look in chosen.items():
            mine = rows[rows["setting"] == name]
            if len(mine):
                series.append(Series(name, mine["link"].tolist(), finite(mine["wire_bytes"]), look, kind="bars"))
        if series:
            panels.append(Panel(title, Axis("link", "link"), Axis("wire_bytes", "bytes of a step", unit="B"), series))
    return Figure(
        f"{job.key}-links",
        f"{job.title}: wire bytes of a step by link",
        "Bytes counted on the packets, mean over steps and seeds. A link is one direction of the boundary between two stages.",
        panels,
    )


def _table(job: Job, links: pd.DataFrame, material: Material) -> Table:
    """Return the links of the settings that are recommended on some network, or else of the first compressed setting."""
    recommended = [
        one for network in material.networks if (one := job.recommended(network)) is not None and not one.dense
    ]
    compressed = recommended or [one for one in job.named if not one.dense] or list(job.named)
    order = {one.name: place for place, one in enumerate(dict.fromkeys(recommended) or compressed[:1])}
    rows = [row for row in links.to_dict("records") if row["setting"] in order]
    rows.sort(key=lambda row: order[row["setting"]])
    return Table(
        f"{job.key}-link-table",
        f"{job.title}: a step's traffic by link, means over steps and seeds. Factor is dense over wire bytes; "
        "fidelity is 1 where messages arrive exactly, and 0 where they arrive as zeros. Shown are the settings that are recommended "
        "on some network, or else the first compressed one.",
        COLUMNS,
        [
            [
                Cell(row["setting"], code=True),
                Cell(row["link"]),
                Cell(row["codec"], code=True),
                Cell(bytes_of(row["dense_bytes"]), row["dense_bytes"]),
                Cell(bytes_of(row["wire_bytes"]), row["wire_bytes"]),
                Cell(f"{row['dense_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else "none"),
                Cell(f"{row['fidelity']:.4f}" if pd.notna(row["fidelity"]) else "not measured", row["fidelity"]),
                Cell(seconds(row["encode_s"]), row["encode_s"]),
                Cell(seconds(row["decode_s"]), row["decode_s"]),
            ]
            for row in rows
        ],
        live=True,
    )
