"""The table of cases, as lines of text, Markdown and Parquet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raysim.records import write_table
from raysim_benchmarks.validate.measure import Case

SCHEMA = pa.schema(
    [
        ("hosts", pa.int16()),
        ("replicas", pa.int16()),
        ("codec", pa.string()),
        ("schedule", pa.string()),
        ("recipe", pa.string()),
        ("link", pa.string()),
        ("steps", pa.int32()),
        ("calibration_s", pa.float64()),
        ("unshaped_s", pa.float64()),
        ("measured_s", pa.float64()),
        ("predicted_s", pa.float64()),
        ("low_s", pa.float64()),
        ("high_s", pa.float64()),
        ("unpaced_s", pa.float64()),
        ("wire_bytes", pa.float64()),
        ("cable_bytes", pa.float64()),
        ("oversubscribed", pa.bool_()),
        ("error", pa.float64()),
        ("baseline_error", pa.float64()),
        ("wire_bound", pa.bool_()),
        ("inside", pa.bool_()),
    ]
)

GROUPS: dict[str, Callable[[Case], bool]] = {
    "all cases": lambda case: True,
    "wire-bound": lambda case: case.wire_bound,
    "not wire-bound": lambda case: not case.wire_bound,
    "wire-bound, links without latency": lambda case: case.wire_bound and case.replicas == 1 and not case.distant,
    "wire-bound, links with latency": lambda case: case.wire_bound and case.distant,
    "wire-bound, replicas": lambda case: case.wire_bound and case.replicas > 1,
    "wire-bound, a core for every worker": lambda case: case.wire_bound and not case.oversubscribed,
    "wire-bound, more workers than cores": lambda case: case.wire_bound and case.oversubscribed,
}


class Summary(NamedTuple):
    """Errors of a group of cases: of the prediction, and of the unshaped step in its place (the baseline)."""

    group: str
    cases: int
    median: float
    """Median of the absolute error."""
    high: float
    """95th percentile of the absolute error."""
    mean: float
    """Mean of the signed error: above 0 if predictions are too slow."""
    inside: float
    """The share of cases whose measured step lies in the 90 % interval of the prediction."""
    baseline_median: float
    baseline_high: float
    unpaced_median: float
    """Median absolute error of predictions that use nothing of the test run, not even the machine's pace."""


def summaries(cases: Sequence[Case]) -> list[Summary]:
    """Return the errors of every group that has cases."""
    groups = []
    for name, belongs in GROUPS.items():
        chosen = [case for case in cases if belongs(case)]
        if not chosen:
            continue
        errors = np.array([case.error for case in chosen])
        baseline = np.array([case.baseline_error for case in chosen])
        unpaced = np.array([case.unpaced_s / case.measured_s - 1 for case in chosen])
        groups.append(
            Summary(
                group=name,
                cases=len(chosen),
                median=float(np.median(np.abs(errors))),
                high=float(np.quantile(np.abs(errors), 0.95)),
                mean=float(np.mean(errors)),
                inside=float(np.mean([case.inside for case in chosen])),
                baseline_median=float(np.median(np.abs(baseline))),
                baseline_high=float(np.quantile(np.abs(baseline), 0.95)),
                unpaced_median=float(np.median(np.abs(unpaced))),
            )
        )
    return groups


def line(case: Case) -> str:
    """Return a case in a line."""
    return (
        f"{_hosts(case)}, {case.codec}, {_schedule(case)}, {case.link}: {case.measured_s:.3f} s, predicted {case.predicted_s:.3f} s "
        f"({case.low_s:.3f} to {case.high_s:.3f}), {case.error:+.1%}; without a network {case.unshaped_s:.3f} s, "
        f"{case.baseline_error:+.1%}"
    )


def sentence(summary: Summary) -> str:
    """Return the errors of a group in a sentence."""
    return (
        f"{summary.group}: {summary.cases} cases, error of the median {summary.median:.1%}, of the 95th percentile "
        f"{summary.high:.1%}, mean with its sign {summary.mean:+.1%}, inside the 90 % interval "
        f"{summary.inside:.0%}; without a network {summary.baseline_median:.1%} and {summary.baseline_high:.1%}"
    )


def markdown(cases: Sequence[Case]) -> str:
    """Return the errors of every group of cases, then a row for every case."""
    lines = [
        "| cases | number | error, median | 95th percentile | mean with its sign | inside 90 % | no network, median "
        "| 95th percentile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {group.group} | {group.cases} | {group.median:.1%} | {group.high:.1%} | {group.mean:+.1%} | {group.inside:.0%} "
        f"| {group.baseline_median:.1%} | {group.baseline_high:.1%} |"
        for group in summaries(cases)
    ]
    lines += [
        "",
        "Seconds of a step. `no network` is the error of the unshaped step as a prediction; (*) more workers than cores.",
        "",
        "| hosts | codec | schedule | link | unshaped | measured | predicted | 90 % interval | error | no network |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        mark = "*" if case.oversubscribed else ""
        seconds = " | ".join(f"{value:.3f}" for value in (case.unshaped_s, case.measured_s, case.predicted_s))
        seconds += f" | {case.low_s:.3f} to {case.high_s:.3f}"
        lines.append(
            f"| {_hosts(case)}{mark} | `{case.codec}` | {_schedule(case)} | {case.link} | {seconds} | {case.error:+.1%} "
            f"| {case.baseline_error:+.1%} |"
        )
    return "\n".join(lines)


def write(cases: Sequence[Case], folder: Path) -> None:
    """Write `cases.parquet` and `cases.md`."""
    derived = ("error", "baseline_error", "wire_bound", "inside")
    rows = [case._asdict() | {name: getattr(case, name) for name in derived} for case in cases]
    write_table(pa.Table.from_pylist(rows, SCHEMA), folder / "cases.parquet")
    (folder / "cases.md").write_text(f"{markdown(cases)}\n", encoding="utf-8")


def _schedule(case: Case) -> str:
    """Return the schedule, and the recipe unless it is the campaign's."""
    return f"{case.schedule} of {case.recipe}" if case.recipe else case.schedule


def _hosts(case: Case) -> str:
    return f"{case.replicas} replicas" if case.replicas > 1 else f"{case.hosts} hosts"
