"""Write docs/measurements/published.md and .csv, published measurements beside raysim's predictions, from the .toml."""

from __future__ import annotations

import csv
import io
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from published_predictions import KINDS, RANGES, Table
from scipy.optimize import minimize_scalar

FOLDER = Path(__file__).parent / "measurements"
DATA, PAGE, CELLS = (FOLDER / f"published.{suffix}" for suffix in ("toml", "md", "csv"))
Cell = tuple[str, str, float, float, bool]
"""Row, column, measured, predicted, and whether it was fitted."""


def is_fitted(table: Table, row: Table, column: str) -> bool:
    """Return whether the table's constant is fitted on a cell."""
    wanted = table.get("fitted_on")
    return wanted in (column, row["name"], f"{row['name']} at {column}") or row["name"].startswith(f"{wanted} on ")


def fit(table: Table) -> float:
    """Return the constant with the least mean error on the column, row or cell that the table names; 0 without one."""
    if "fitted" not in table:
        return 0.0
    predict = KINDS[table["kind"]]
    cells = [
        (row, column, measured)
        for row in table["rows"]
        for column, measured in row["measured"].items()
        if is_fitted(table, row, column)
    ]
    if not cells:
        raise SystemExit(f"{table['name']}: `fitted_on` = {table['fitted_on']!r} names no cell.")

    def loss(constant: float) -> float:
        return statistics.fmean(
            abs(math.log(predict(table, row, column, constant) / measured)) for row, column, measured in cells
        )

    low, high = RANGES[table["kind"]]
    grid = [low + (high - low) * k / 200 for k in range(201)]
    best = min(grid, key=loss)
    width = (high - low) / 200
    found = minimize_scalar(loss, bounds=(max(best - width, low), min(best + width, high)), method="bounded")
    return float(found.x) if found.fun < loss(best) else best


def errors(table: Table, constant: float) -> list[Cell]:
    """Return every cell with its prediction."""
    predict, found = KINDS[table["kind"]], []
    for row in table["rows"]:
        for column, measured in row["measured"].items():
            found.append(
                (
                    row["name"],
                    column,
                    float(measured),
                    predict(table, row, column, constant),
                    is_fitted(table, row, column),
                )
            )
    return found


def regrets(table: Table, cells: Sequence[Cell]) -> list[float]:
    """Return how much slower raysim's choice is than the fastest measured one, as a share, for each choice of the table.

    `choice`: among "columns", or in each column among "rows" of one `group`. `best`: "highest" or "lowest" figure.
    """
    if "choice" not in table:
        return []
    groups, columns = {row["name"]: row.get("group") for row in table["rows"]}, table["choice"] == "columns"
    power = -1 if table["best"] == "highest" else 1
    options: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row, column, measured, predicted, _ in cells:
        key = (row,) if columns else (groups[row], column)
        if key[0] is not None:
            options.setdefault(key, []).append((predicted**power, measured**power))
    return [min(each)[1] / min(measured for _, measured in each) - 1 for each in options.values()]


def ratios(table: Table, cells: Sequence[Cell]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return, by group and column, how much longer the other rows take than the group's first: measured and predicted means."""
    groups = {row["name"]: row["group"] for row in table["rows"]}
    steps: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row, column, measured, predicted, _ in cells:
        steps.setdefault((groups[row], column), []).append((measured, predicted))
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for (group, column), ((first, first_predicted), *others) in steps.items():
        measured, predicted = (statistics.fmean(values) for values in zip(*others, strict=True))
        found.setdefault(group, {})[column] = (measured / first, predicted / first_predicted)
    return found


def ratio_lines(table: Table, cells: Sequence[Cell]) -> list[str]:
    """Return the page's table of ratios."""
    columns = list(table["rows"][0]["measured"])
    lines = [f"| {table['ratios']} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for group, each in ratios(table, cells).items():
        lines.append(f"| {group} | {' | '.join('{:.2f}, {:.2f}'.format(*each[column]) for column in columns)} |")
    return lines


def written(content: Mapping[str, Any]) -> dict[Path, str]:
    """Return the page, and the file with every cell."""
    lines = [INTRODUCTION, "| table | cells | median error | largest | regret | fitted |", "|---|---|---|---|---|---|"]
    rows, sources = [("table", "row", "column", "published", "raysim", "error", "fitted")], []
    ratio: list[str] = []
    for table in content["tables"]:
        constant = fit(table)
        cells = errors(table, constant)
        for row, column, measured, predicted, fitted in cells:
            error = f"{predicted / measured - 1:+.3f}"
            rows.append((table["name"], row, column, f"{measured:g}", f"{predicted:.4g}", error, str(fitted).lower()))
        shares = [predicted / measured - 1 for *_, measured, predicted, fitted in cells if not fitted]
        held = f"{len(shares)} of {len(cells)}" if len(shares) < len(cells) else str(len(cells))
        words = f"{constant:.4g} {table['fitted_words']}, on {table['fitted_on']}" if "fitted" in table else "nothing"
        lost = regrets(table, cells)
        regret = f"{sum(map(bool, lost))} of {len(lost)} choices, at most {max(lost):.1%}" if lost else ""
        lines.append(
            f"| {table['name']}: {table['unit']} | {held} | {statistics.median(map(abs, shares)):.1%} | "
            f"{max(shares, key=abs):+.1%} | {regret} | {words} |"
        )
        ratio += ["", *ratio_lines(table, cells)] if "ratios" in table else []
        sources.append(f"* **{table['name']}**: {' '.join([table['source'] + '.', *table['notes']])}")
    lines += [
        *ratio,
        "",
        "## Sources",
        "",
        *sources,
        "",
        "## Not predicted",
        "",
        "| | missing |",
        "|---|---|",
    ]
    lines += [f"| {each['name']} | {each['why']} |" for each in content["missing"]]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return {PAGE: "\n".join(lines) + "\n", CELLS: file.getvalue()}


INTRODUCTION = """# Predicted beside published

Median errors are 0.1 to 24 % over fourteen published tables. [Every cell](published.csv) has the published figure, raysim's prediction,
and the signed error (positive: raysim's is larger). At most one constant a table is fitted; errors are of the other cells. *Regret*:
choices of a schedule, average, placement, codec or H in which raysim's is not the fastest measured one, and how much slower it is.
[Validation](validation.md) has raysim's own runs, [harm by size](sizes.md) published losses. `docs/measurements/published.toml` has the
assumptions, and `python docs/make_published.py` writes this page.
"""


if __name__ == "__main__":
    for path, text in written(tomllib.loads(DATA.read_text(encoding="utf-8"))).items():
        path.write_text(text, encoding="utf-8")
