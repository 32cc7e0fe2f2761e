"""Harm at another size of the model: a table of `raysim.analysis.carry`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raysim.analysis.comparison.carry import Asked, carry, law_sentence
from raysim.analysis.report.page import Section, Table, Text
from raysim.analysis.runs.results import Results
from raysim.units import format_parameters


def carried(results: Results, asked: Asked) -> tuple[list[Section], list[str]]:
    """Return the section of the harms at the asked size, and the same in a sentence for each setting.

    Raises AnalysisError as `raysim.analysis.carry`.
    """
    frame = carry(results, asked.parameters, tokens=asked.tokens, stages=asked.stages, trained=asked.trained)
    families = frame["family"].nunique()
    sentences = []
    for row in frame.to_dict("records"):
        name = f"{row['setting']} ({row['family']})" if families > 1 else row["setting"]
        verdict = f": {row['verdict']}" if isinstance(row["verdict"], str) else ""
        sentences.append(f"{name}: {law_sentence(row)}{verdict}")
    table = Table(
        "carried",
        "Harm by a power of the size, shared by the settings of one method, averaged with a law without size; bounds hold 90 % of true "
        "harms. Both laws are shown alone as well. No law: why, and the runs that would allow one.",
        pd.DataFrame([_cells(row) for row in frame.to_dict("records")]),
    )
    title = f"Carried to {format_parameters(asked.parameters)} parameters"
    smallest, largest = (format_parameters(value) for value in (frame["smallest"].min(), frame["largest"].max()))
    lead = Text(
        f"These settings were trained at sizes from {smallest} to {largest}; laws carry their harm to {title[11:]}."
    )
    return [Section("carried", title, [lead, table])], sentences


def _cells(row: dict[Any, Any]) -> dict[str, str]:
    refused = isinstance(row["refusal"], str)
    laws = {name: "" if refused else _interval(row, name) for name in ("harm", "power", "constant")}
    return {
        "setting": row["setting"],
        "family": row["family"],
        f"harm ({row['unit']})": laws["harm"],
        "as a power of size": laws["power"],
        "without size": laws["constant"],
        "verdict": row["refusal"] if refused else row["verdict"],
    }


def _interval(row: dict[Any, Any], name: str) -> str:
    return f"{row[name]:+.2f} ({row[f'{name}_low']:+.2f} to {row[f'{name}_high']:+.2f})"
