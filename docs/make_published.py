"""Write docs/measurements/published.md and .csv, published measurements beside raysim's predictions, from the .toml."""

from __future__ import annotations

import csv
import io
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from raysim.forecast.packets import exchange_of, link_messages, sum_exchanges
from raysim.forecast.shapes import ModelShape
from raysim.forecast.timings import Timings
from raysim.network.exchanges import all_reduce_s
from raysim.network.profile import Profile
from raysim.network.sharding import FSDP, Sharded, Units
from raysim.network.topology import FREE, Network
from raysim.network.transport import NCCL
from raysim.schedules import parse_schedule
from raysim.schedules.arrays import make_table

FOLDER = Path(__file__).parent / "measurements"
DATA, PAGE, CELLS = (FOLDER / f"published.{suffix}" for suffix in ("toml", "md", "csv"))
Table = Mapping[str, Any]
Predict = Callable[[Table, Table, str, float], float]
"""The prediction for a table, a row, a column and the fitted constant."""


def pipeline(table: Table, row: Table, column: str, overhead_s: float) -> float:
    """Return samples a second and GPU of a pipeline from its measured times."""
    keys = ("num_microbatches", "microbatch_samples")
    workers, count, chunks = row["num_stages"], row["num_microbatches"], row["stages_per_worker"]
    times = {name: row[name] for name in ("forward_s", "input_s", "weight_s")}
    parts = chunks if column == "interleaved" else 1
    orders: dict[str, dict[str, Any]] = {
        "1F1B": {"schedule": "1F1B"},
        "interleaved": {"schedule": f"Interleaved1F1B({parts})"},
        "ZB-2p": {"schedule": "ZBH2", "weights": "PostValidated"},
    }
    timings = Timings(
        **{key: row[key] for key in keys},
        **{name: seconds / parts for name, seconds in times.items()},
        **orders[column],
        num_stages=workers * parts,
        message_s=row["message_s"],
        blocking_sends=True,
    )
    step_s = timings.step().simulate(FREE).step_s
    step_s += overhead_s * row["billions"] / workers
    return float(count * row["microbatch_samples"] / (workers * step_s))


def local_steps(table: Table, row: Table, column: str, _: float) -> float:
    """Return the utilisation in per cent of local steps with a blocking all-reduce."""
    size, members = table["parameters"] * table["bits"] / 8, table["num_replicas"]
    bps = 8 * size * 2 * (members - 1) / members / row["all_reduce_s"]
    seconds = all_reduce_s(size, range(members), Network(bps))
    return float(100 * table["compute_s"] / (table["compute_s"] + seconds))


def bandwidth(table: Table, row: Table, column: str, gbit: float) -> float:
    """Return the first Gbit/s of the authors' grid at which averaging, hidden by the backward layer by layer, is short enough."""
    level, step_s, steps = float(column.split()[0]) / 100, table["step_s"], row["local_steps"]
    hidden_s = 2 / 3 * step_s * (1 - 1 / table["layers"])
    allowed_s = steps * step_s * (1 / level - 1)
    enough = (
        gbps
        for gbps in np.geomspace(*table["grid"])
        if max(gbit / gbps - hidden_s, gbit / gbps / table["layers"]) <= allowed_s
    )
    return float(next(enough, math.inf))


def slow_links(table: Table, row: Table, column: str, compute_s: float) -> float:
    """Return tokens a second of a pipeline over slow links."""
    number, unit = column.split()
    bps = float(number) * {"Gbit/s": 1e9, "Mbit/s": 1e6}[unit]
    sizes = [table["values"] * bits / 8 for bits in row["bits"]]
    timings = Timings(
        num_stages=table["num_stages"],
        num_microbatches=table["num_microbatches"],
        forward_s=compute_s / 3,
        backward_s=2 * compute_s / 3,
        message_bytes=sizes[0],
        gradient_message_bytes=sizes[1],
    )
    return float(table["tokens"] / timings.step().simulate(Network(bps)).step_s)


def powersgd(table: Table, row: Table, column: str, overhead_s: float) -> float:
    """Return the speed-up of data-parallel training with PowerSGD over one card."""
    nodes = row["nodes"]
    parts = [(count, exchange_of(f"PowerSGD({table['rank']})", shape, nodes)) for shape, count in resnet50().items()]
    (exchange,) = sum_exchanges(parts)
    sent = sum(exchange.pair_bytes) * (nodes - 1)
    seconds = 8 * sent / table["bandwidth_bps"]
    return float(2 * nodes * table["compute_s"] / (table["compute_s"] + seconds + overhead_s))


def resnet50() -> Counter[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters (He et al. 2016, 1512.03385)."""
    shapes: Counter[tuple[int, ...]] = Counter({(64, 3, 7, 7): 1, (64,): 2, (1000, 2048): 1, (1000,): 1})
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            convolutions += [(4 * inner, width, 1, 1)] if block == 0 else []
            shapes.update(convolutions)
            shapes.update((shape[0],) for shape in convolutions for _ in range(2))
            width = 4 * inner
    return shapes


def schedules(table: Table, row: Table, column: str, efficiency: float) -> float:
    """Return tokens a second and GPU by a schedule's bubble alone: the constant is the figure without one."""
    workers, count = table["num_stages"], row["num_microbatches"]
    parts = 2 if column == "interleaved" else 1
    timings = Timings(
        num_stages=workers * parts,
        num_microbatches=count,
        forward_s=1 / parts,
        backward_s=2 / parts,
        schedule=f"Interleaved1F1B({parts})" if parts > 1 else "1F1B",
    )
    return float(efficiency * 3 * count / timings.step().simulate(FREE).step_s)


def sharded(table: Table, row: Table, column: str, _: float) -> float:
    """Return tokens a second and GPU of sharded replicas on many hosts, from the figure on one host, taken as compute."""
    shape = ModelShape(**table["model"])
    (stage,) = shape.stages(1, table["microbatch_samples"])
    counts = np.array([unit.num_parameters for unit in stage.units], np.float64)
    units = Units(
        share=tuple(unit.forward_flops / stage.forward_flops for unit in stage.units),
        gather_bytes=tuple((table["gather_bits"] / 8 * counts).tolist()),
        scatter_bytes=tuple((table["scatter_bits"] / 8 * counts).tolist()),
        codec_s=(0.0,) * len(counts),
    )
    tokens = table["microbatch_samples"] * shape.length
    step_s = tokens / row["one_host"]
    profile = Profile.uniform(1, step_s / 3, 2 * step_s / 3, transport=NCCL)
    hosts = np.arange(table["hosts"])[:, None]
    rows = make_table(parse_schedule("1F1B"), 1, 1)
    network = Network(table["bandwidth_bps"])
    (whole,) = Sharded(FSDP(table["hosts"]), (units,)).profiles(profile, rows, hosts, [network])
    return float(tokens / whole.compute_s.sum())


def datasheet(table: Table, row: Table, column: str, efficiency: float) -> float:
    """Return tokens a second and GPU at a share of the GPU's datasheet, by operations and the schedule's bubble alone."""
    shape = ModelShape(**table["models"][row["model"]])
    (whole,) = shape.stages(1, 1)
    workers, parts, width = row["workers"], row["stages_per_worker"], row["gpus_per_worker"]
    forward_s = whole.forward_flops / (workers * parts * width * row["peak_flops"] * efficiency)
    replicas = row["gpus"] // (workers * width)
    count = row["batch"] // replicas
    timings = Timings(
        num_stages=workers * parts,
        num_microbatches=count,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        schedule=f"Interleaved1F1B({parts})",
    )
    return float(row["batch"] * shape.length / (row["gpus"] * timings.step().simulate(FREE).step_s))


def volume(table: Table, row: Table, column: str, _: float) -> float:
    """Return how many times fewer bytes coded gathers and scatters send between hosts than those of 16 bits, by packets."""
    values, hosts = table["values"], table["hosts"]
    dense = Sharded(FSDP(hosts), (Units.even(1, 2.0 * values, 2.0 * values),))
    gathered, scattered = (_coded_bytes(row[name], values) for name in ("gather", "scatter"))
    coded = Sharded(FSDP(hosts, row["reshard_after"]), (Units.even(1, gathered, scattered),), coded=True)
    return dense.sent_bytes(hosts, 1) / coded.sent_bytes(hosts, 1)


def _coded_bytes(codec: str, values: int) -> float:
    forward, _ = link_messages(codec, "Identity", (1, values // 1024, 1024), "float32")
    return forward.wire_bytes


KINDS: dict[str, Predict] = {
    function.__name__: function
    for function in (
        pipeline,
        local_steps,
        bandwidth,
        slow_links,
        powersgd,
        schedules,
        sharded,
        datasheet,
        volume,
    )
}
RANGES = {
    "pipeline": (0.0, 1.0),
    "bandwidth": (20.0, 400.0),
    "slow_links": (1e-3, 1.0),
    "powersgd": (0.0, 1.0),
    "schedules": (1.0, 1e3),
    "datasheet": (0.05, 1.0),
}
"""Of a kind's fitted constant."""


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


def errors(table: Table, constant: float) -> list[tuple[str, str, float, float, bool]]:
    """Return row, column, measured, predicted and whether it was fitted, for every cell."""
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


def written(content: Mapping[str, Any]) -> dict[Path, str]:
    """Return the page, and the file with every cell."""
    lines = [INTRODUCTION, "| table | cells | median error | largest | fitted |", "|---|---|---|---|---|"]
    rows, sources = [("table", "row", "column", "published", "raysim", "error", "fitted")], []
    for table in content["tables"]:
        constant = fit(table)
        cells = errors(table, constant)
        for row, column, measured, predicted, fitted in cells:
            error = f"{predicted / measured - 1:+.3f}"
            rows.append((table["name"], row, column, f"{measured:g}", f"{predicted:.4g}", error, str(fitted).lower()))
        shares = [predicted / measured - 1 for *_, measured, predicted, fitted in cells if not fitted]
        held = f"{len(shares)} of {len(cells)}" if len(shares) < len(cells) else str(len(cells))
        words = f"{constant:.4g} {table['fitted_words']}, on {table['fitted_on']}" if "fitted" in table else "nothing"
        lines.append(
            f"| {table['name']}: {table['unit']} | {held} | {statistics.median(map(abs, shares)):.1%} | "
            f"{max(shares, key=abs):+.1%} | {words} |"
        )
        sources.append(f"* **{table['name']}**: {' '.join([table['source'] + '.', *table['notes']])}")
    lines += ["", "## Sources and assumptions", "", *sources, "", "## Not predicted", "", "| | missing |", "|---|---|"]
    lines += [f"| {each['name']} | {each['why']} |" for each in content["missing"]]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return {PAGE: "\n".join(lines) + "\n", CELLS: file.getvalue()}


INTRODUCTION = """# Predicted beside published

Median errors are 0.1 to 14 % over nine published tables. [Every cell](published.csv) has the published figure, raysim's prediction, and
the signed error (positive: raysim's is larger). At most one constant a table is fitted; errors are of the other cells.
[Validation](validation.md) has raysim's own runs. `python docs/make_published.py` writes this page.
"""


if __name__ == "__main__":
    for path, text in written(tomllib.loads(DATA.read_text(encoding="utf-8"))).items():
        path.write_text(text, encoding="utf-8")
