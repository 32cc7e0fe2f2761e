"""The table of cases: for a person, as Markdown, and as Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.validate.measure import Case


def line(case: Case) -> str:
    """Return a case in a line."""
    what = f"{case.hosts} hosts, {case.codec}, {case.schedule}, {case.rate}"
    return f"{what}: {case.measured_s:.3f} s, predicted {case.predicted_s:.3f} s, {case.error:+.1%}"


def summary(cases: Sequence[Case]) -> list[str]:
    """Return the errors of all cases, and of those with and without a core for every stage, a sentence each."""
    sentences = []
    for name, chosen in (
        ("all cases", list(cases)),
        ("a core for every stage", [case for case in cases if not case.oversubscribed]),
        ("oversubscribed", [case for case in cases if case.oversubscribed]),
    ):
        if chosen:
            errors = [abs(case.error) for case in chosen]
            sentences.append(
                f"{name}: {len(chosen)} cases, error of the median {median(errors):.1%}, of the 95th percentile "
                f"{np.quantile(errors, 0.95):.1%}, mean with its sign {np.mean([case.error for case in chosen]):+.1%}"
            )
    return sentences


def markdown(cases: Sequence[Case]) -> str:
    """Return a row for every pipeline: measured and predicted seconds of a step and the error, at every rate."""
    rates = list(dict.fromkeys(case.rate for case in cases))
    lines = [
        "| hosts | both ways | schedule | " + " | ".join(rates) + " |",
        "|---|---|---|" + "---|" * len(rates),
    ]
    rows: dict[tuple[int, str, str], dict[str, str]] = {}
    for case in cases:
        cell = f"{case.measured_s:.3f} / {case.predicted_s:.3f}, {case.error:+.1%}"
        rows.setdefault((case.hosts, case.codec, case.schedule), {})[case.rate] = cell
    for (hosts, codec, schedule), cells in rows.items():
        mark = "*" if any(case.oversubscribed for case in cases if case.hosts == hosts) else ""
        lines.append(f"| {hosts}{mark} | `{codec}` | {schedule} | " + " | ".join(cells[rate] for rate in rates) + " |")
    return "\n".join(lines)


def write(cases: Sequence[Case], folder: Path) -> None:
    """Write `cases.parquet` and `cases.md`."""
    pq.write_table(pa.Table.from_pylist([case._asdict() for case in cases]), folder / "cases.parquet")
    text = "\n".join([markdown(cases), "", *(f"- {sentence}" for sentence in summary(cases)), ""])
    (folder / "cases.md").write_text(text, encoding="utf-8")
