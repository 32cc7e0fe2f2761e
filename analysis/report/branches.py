"""The section on branches: the harm of compressing each part of training, and from which step on a setting is safe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from raysim.analysis.comparison.branches import ASSUMPTION, branch_harms, parts_and_whole
from raysim.analysis.data.settings import is_missing
from raysim.analysis.report.blocks import Block, Cell, Column, Section, Table, Text
from raysim.analysis.report.material import Material
from raysim.analysis.runs.results import Results

COLUMNS = (
    Column("compressed steps", number=True),
    Column("seeds", number=True),
    Column("harm", number=True),
    Column("at most", number=True),
    Column("verdict"),
    Column("harm to the end", number=True),
    Column("at most", number=True),
    Column("verdict"),
)


def has_branches(results: Results) -> bool:
    """Return whether runs branch from another one at several of its steps; at a single step, the other tables have all of it."""
    if "parent" not in results.runs:
        return False
    starts = results.runs[results.runs["parent"].notna()].groupby("parent")["first_step"].nunique()
    return bool((starts > 1).any())


def branches_section(material: Material) -> Section:
    """Return a table for each dense run from which others branch: settings by point, with a sentence on where each is safe."""
    key, title = "branches", "Where in training compression harms"
    harms, blocks = branch_harms(material.results), list[Block]()
    for i, (job, rows) in enumerate(harms.groupby("job", sort=False), start=1):
        blocks.append(
            Text(" ".join(safe_from(of_setting) for _, of_setting in rows.groupby("setting", sort=False)), "lead")
        )
        unit, within = rows["unit"].iloc[0], rows["within"].iloc[0]
        caption = f"{job}: harm in {unit}, with a margin of {within:g}"
        columns = (Column("setting"), *COLUMNS)
        table = [[Cell(row["setting"], code=True), *map(Cell, figures(row))] for row in rows.to_dict("records")]
        blocks.append(Table(f"branches{i}", caption, columns, table))
    blocks.append(Text(ASSUMPTION, "note"))
    for row in parts_and_whole(material.results).to_dict("records"):
        blocks.append(Text(sum_sentence(row), "note"))
    return Section.of(key, title, blocks, "No branch has a dense one beside it.")


def figures(row: Mapping[Any, Any]) -> list[str]:
    """Return the cells of a row of `branch_harms`, without the setting."""
    cells = [f"{row['first_step']:,} to {row['end_step']:,}", str(row["seeds"])]
    for prefix in ("", "rest_"):
        harm, high, why = row[f"{prefix}harm"], row[f"{prefix}harm_high"], row[f"{prefix}lacking"]
        cells += [f"{harm:+.2f}", f"{high:+.2f}", f"{row[f'{prefix}verdict']}{f' ({why})' if why else ''}"]
    return cells


def safe_from(rows: pd.DataFrame) -> str:
    """Return a sentence on the step from which on a setting is safe, and where it harms most; `rows` of `branch_harms`."""
    setting, start, planned = rows["setting"].iloc[0], rows["safe_from"].iloc[0], int(rows["planned_steps"].iloc[0])
    harmed = rows[rows["harm"] > 0].sort_values("harm")
    where = ""
    if len(harmed):
        worst = harmed.iloc[-1]
        where = f" It harms most in steps {worst['first_step']:,} to {worst['end_step']:,} ({worst['harm']:+.2f} {worst['unit']})."
    if is_missing(start):
        return f"`{setting}` is not shown to be safe from any of these steps on.{where}"
    if start == 0:
        return f"`{setting}` is safe for all {planned:,} steps.{where}"
    return f"`{setting}` is safe from step {start:,} of {planned:,} on: `compress_from={start}`.{where}"


def sum_sentence(row: Mapping[Any, Any]) -> str:
    """Return a sentence that compares the sum of parts with the whole, by a row of `parts_and_whole`."""
    return (
        f"Steps {row['first_step']:,} to {row['end_step']:,} of `{row['setting']}`: the {row['parts']} parts add up to "
        f"{row['sum_of_parts']:+.2f} {row['unit']}, the whole is {row['whole']:+.2f} (difference {row['difference']:+.2f}, from "
        f"{row['low']:+.2f} to {row['high']:+.2f}, {row['seeds']} seeds)."
    )
