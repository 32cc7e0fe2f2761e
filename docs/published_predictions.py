"""Predictions of published measurements: one function for each kind of table in docs/measurements/published.toml."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from raysim.forecast.packets import exchange_of, link_messages, sum_exchanges
from raysim.forecast.shapes import ModelShape
from raysim.forecast.timings import Timings
from raysim.network.exchanges import all_reduce_s
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.sharding import FSDP, Sharded, Units
from raysim.network.topology import FREE, Network, Placement
from raysim.network.transport import BARE, NCCL, Averaging
from raysim.schedules import ZB, parse_schedule
from raysim.schedules.arrays import make_table

Table = Mapping[str, Any]
Predict = Callable[[Table, Table, str, float], float]
"""The prediction for a table, a row, a column and the fitted constant."""
GRADIENTS = 1e9
"""Bytes of an average that is given by its seconds: any number."""


def pipeline(table: Table, row: Table, column: str, overhead_s: float) -> float:
    """Return samples a second and GPU of a pipeline from its measured times."""
    keys = ("num_microbatches", "microbatch_samples")
    workers, count, chunks = row["num_stages"], row["num_microbatches"], row["stages_per_worker"]
    times = {name: row[name] for name in ("forward_s", "input_s", "weight_s")}
    parts = chunks if column == "interleaved" else 1
    orders: dict[str, dict[str, Any]] = {
        "1F1B": {"schedule": "1F1B"},
        "interleaved": {"schedule": f"Interleaved1F1B({parts})"},
        "ZB-2p": {"schedule": repr(_searched(row)), "weights": "PostValidated"},
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


def _searched(row: Table) -> ZB:
    """Return ZB-2p's order, searched for the row's times in twice the memory of 1F1B."""
    forward_s, input_s, weight_s, message_s = (row[name] for name in ("forward_s", "input_s", "weight_s", "message_s"))
    return ZB(forward_s, input_s, weight_s, message_s, memory=2, kept=row["kept"])


def local_steps(table: Table, row: Table, column: str, _: float) -> float:
    """Return the utilisation in per cent of local steps with a blocking ring, on the network of the column or of its seconds."""
    size, members = table["parameters"] * table["bits"] / 8, table["num_replicas"]
    network = ring_network(size, members, row["all_reduce_s"]) if "all_reduce_s" in row else parse_network(column)
    seconds = all_reduce_s(size, range(members), network)
    compute_s = table["compute_s"] * row.get("steps", 1)
    return float(100 * compute_s / (compute_s + seconds))


def ring_network(size: float, members: int, seconds: float) -> Network:
    """Return the network on which a ring all-reduce of `size` bytes takes these seconds."""
    return Network(8 * size * 2 * (members - 1) / members / seconds)


def shaped(table: Table, row: Table, column: str, compute_s: float) -> float:
    """Return the seconds of a step of pipelines whose replicas average afterwards; forwards are computed again."""
    regular = [table["gradient_bytes"]] * (table["num_stages"] - 1)
    timings = Timings(
        **{key: table[key] for key in ("num_stages", "num_microbatches", "message_bytes")},
        schedule="GPipe",
        num_replicas=row["num_replicas"],
        forward_s=compute_s / 4,
        backward_s=3 * compute_s / 4,
        gradient_bytes=(table["first_gradient_bytes"], *regular),
    )
    over = replace(BARE, averaging=Averaging(row.get("averaging", "direct")))
    return timings.step().over(over).simulate(parse_network(column)).step_s


def placed(table: Table, row: Table, column: str, _: float) -> float:
    """Return the seconds of a step of several passes of GPipe and one average, with worker k of the row's order on host k."""
    names = ("num_stages", "num_replicas", "num_microbatches", "compute_s", "message_bytes", "gradient_bytes")
    job = (*(table[name] for name in names), table["first_gradient_bytes"], table["averaging"])
    pass_s, last_s = _passes_s(job, row["network"], _hosts(row, table["num_stages"] * table["num_replicas"]))
    passes = int(column) // (table["num_replicas"] * table["num_microbatches"])
    return (passes - 1) * pass_s + last_s


def _hosts(row: Table, count: int) -> tuple[int, ...]:
    """Return the host of each worker; with a `seed`, of workers shuffled as by DT-FM's generate_assignment.py."""
    workers = row.get("workers_by_host", [1] * count)
    of_slot = np.repeat(np.arange(len(workers)), workers)
    worker = np.arange(count)
    if "seed" in row:
        np.random.RandomState(row["seed"]).shuffle(worker[1:])
    return tuple(of_slot[np.argsort(worker)].tolist())


@functools.cache
def _passes_s(job: tuple[Any, ...], network: str, hosts: tuple[int, ...]) -> tuple[float, float]:
    """Return the seconds of a pass without and with the average of gradients."""
    stages, replicas, microbatches, compute_s, message_bytes, gradient_bytes, first_bytes, averaging = job
    timings = Timings(
        schedule="GPipe",
        num_stages=stages,
        num_replicas=replicas,
        num_microbatches=microbatches,
        forward_s=compute_s / 4,
        backward_s=3 * compute_s / 4,
        message_bytes=message_bytes,
        gradient_bytes=(first_bytes, *[gradient_bytes] * (stages - 1)),
    )
    over = replace(BARE, averaging=Averaging(averaging))
    parts = (timings.model_copy(update={"gradient_bytes": 0.0}), timings)
    steps = [replace(part.step().over(over), placement=Placement(hosts)) for part in parts]
    pass_s, last_s = (step.step_s(parse_network(network)) for step in steps)
    return pass_s, last_s


def delayed(table: Table, row: Table, column: str, share: float) -> float:
    """Return TFLOP/s of a GPU whose averages overlap the whole next step; `share` is of the operations that raysim counts."""
    count = int(column)
    averaging_s, compute_s = (row[key][column] / 1e3 for key in ("averaging_ms", "compute_ms"))
    timings = Timings(
        num_stages=1,
        num_microbatches=count,
        num_replicas=table["num_replicas"],
        forward_s=compute_s / count / 3,
        backward_s=2 * compute_s / count / 3,
        gradient_bytes=GRADIENTS,
        averaging_delay=1,
    )
    network = ring_network(GRADIENTS, table["num_replicas"], averaging_s)
    step_s = timings.step().over(replace(BARE, averaging=Averaging("ring"))).simulate(network).step_s
    (whole,) = ModelShape(**table["model"], length=row["length"]).stages(1, table["microbatch_samples"])
    return float(share * 3 * count * whole.forward_flops / table["gpus"] / step_s / 1e12)


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
    """Return tokens a second of a GPipe pipeline over slow links."""
    number, unit = column.split()
    bps = float(number) * {"Gbit/s": 1e9, "Mbit/s": 1e6}[unit]
    sizes = [table["values"] * bits / 8 for bits in row["bits"]]
    timings = Timings(
        schedule="GPipe",
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
        shaped,
        placed,
        delayed,
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
    "shaped": (0.01, 0.5),
    "delayed": (0.1, 2.0),
    "bandwidth": (20.0, 400.0),
    "slow_links": (1e-3, 1.0),
    "powersgd": (0.0, 1.0),
    "schedules": (1.0, 1e3),
    "datasheet": (0.05, 1.0),
}
"""Bounds of the fitted constant, by kind of table."""
