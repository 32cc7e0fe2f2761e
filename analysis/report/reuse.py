"""Settings to reuse: lines for another training loop, and commands that reproduce the runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from raysim.analysis.data.folders import over
from raysim.analysis.report.material import JobRuns, Material
from raysim.analysis.report.page import Block, Table, Text
from raysim.analysis.report.words import speedup
from raysim.config.boundaries import OTHERS, is_by_replica
from raysim.config.identity import IDENTITY, SYNCHRONOUS, plain
from raysim.storage.texts import parse_toml

# --- the recommended setting, as lines for the reader's own training loop -----------------------------------------------------------


class Adoption(NamedTuple):
    """The setting of a job recommended for other training code."""

    text: str
    """A sentence that names it."""
    code: str
    """Python for another training loop; empty for dense."""


def adoption(job: JobRuns, network: str) -> Adoption:
    """Return the recommended setting of a job on a network, or else the most promising one."""
    recommended, setting = job.recommended(network), job.taken_home(network)
    if setting is not None:
        row = job.runs[job.runs["run"] == setting.runs[0]].iloc[0].to_dict()
        code = snippet(row, _price(job, setting.name, network))
        if code:
            condition = "" if setting is recommended else ", once it has been shown to be safe"
            return Adoption(f"`{setting.name}` in your own training{condition}:", code)
    if not job.priced:
        return Adoption("No step here can be priced, so no setting is recommended.", "")
    if recommended is None:
        return Adoption("There is no dense step to compare with, so no setting is recommended.", "")
    return Adoption(f"On {network}, stay dense: no change to your training code.", "")


def _price(job: JobRuns, setting: str, network: str) -> str:
    """Return the speed-ups of a setting over the transports of torch's own training code, as a comment in Python."""
    speedups = [
        f"{speedup(prices[network])} {over(transport)}"
        for transport, prices in job.home.get(setting, {}).items()
        if network in prices
    ]
    return f"# on {network}, against dense: {'; '.join(speedups)}\n" if speedups else ""


def snippet(row: Mapping[Any, Any], price: str = "") -> str:
    """Return Python that puts a run's compression into other training code; empty if the run compresses nothing.

    `price` is a comment with its speed-up in torch's own training code, put over each part of that kind.

    `row` has the keys of a run: `forward`, `backward`, `num_stages`, `num_microbatches`, `num_replicas`, `replica_gradient`,
    `tied_gradient`, `shared_indices`, `compress_from`.
    Links are written for one process and for torch's pipelines, gradients of replicas for DistributedDataParallel.

    >>> row = {"num_stages": 1, "num_replicas": 2, "replica_gradient": "PowerSGD(2)"}
    >>> print(snippet(row))
    import raysim
    gradients = raysim.ddp.hook(model, "PowerSGD(2)")  # of DistributedDataParallel: docs/take-home/ddp.md
    >>> row = {"num_stages": 4, "num_microbatches": 4, "forward": "Quantize(5)", "backward": "Identity"}
    >>> print(snippet(row))
    from raysim.nn import CompressedLink  # between two layers of any model, in one process: docs/take-home/link.md
    link = CompressedLink("Quantize(5)", backward="Identity", num_microbatches=4)
    <BLANKLINE>
    from raysim.distributed.pipelining import compress_stages  # of torch's pipelines: docs/take-home/pipelining.md
    stages = compress_stages(modules, shapes, forward="Quantize(5)", backward="Identity", num_microbatches=4)
    >>> print(snippet(row | {"forward": '{1 = "Quantize(5)"}'}).splitlines()[0])
    # Replica 1:
    >>> print(snippet(row | {"forward": '{skip = "Quantize(5)"}'}))
    # Tensor `skip`:
    <BLANKLINE>
    from raysim.nn import CompressedLink  # between two layers of any model, in one process: docs/take-home/link.md
    link = CompressedLink("Quantize(5)", backward="Identity", num_microbatches=4)
    >>> print(snippet(row | {"weights": "DoubleBuffered"}).splitlines()[0])
    # weights=DoubleBuffered: not here, since torch's pipelines run empty after each step.
    >>> print(snippet(row | {"forward": "TopK(0.1)", "shared_indices": True, "compress_from": 200}))
    # compress_from=200: train so many steps without these lines, then add them.
    <BLANKLINE>
    from raysim.nn import CompressedLink  # between two layers of any model, in one process: docs/take-home/link.md
    link = CompressedLink("TopK(0.1)", backward="Identity", num_microbatches=4, shared_indices=True)
    <BLANKLINE>
    # shared_indices=true: not in torch's pipelines, whose gradients are sent with positions of their own.
    >>> print(snippet({"num_stages": 2, "tied_gradient": "TopK(0.01)"}))
    # tied_gradient=TopK(0.01): not here, since torch's pipelines do not sum gradients of tied parameters. Before optimizer.step(), sum
    # yours over the ranks that hold the parameter, uncompressed and so slower: dist.all_reduce(weight.grad, group=owners)
    """
    parts = list(_link_code(row, price))
    method = _of_tensor(_read(row.get("replica_gradient")), None)
    if _count(row, "num_replicas") > 1 and method != IDENTITY:
        parts.append(
            f"{price}import raysim\n"
            f"gradients = raysim.ddp.hook(model, {_quoted(method)})  # of DistributedDataParallel: docs/take-home/ddp.md"
        )
    tied = _of_tensor(_read(row.get("tied_gradient")), None)
    if _count(row, "num_stages") > 1 and tied != IDENTITY:
        parts.append(
            f"# tied_gradient={tied}: not here, "
            "since torch's pipelines do not sum gradients of tied parameters. Before optimizer.step(), sum"
            "\n# yours over the ranks that hold the parameter, uncompressed and so slower: "
            "dist.all_reduce(weight.grad, group=owners)"
        )
    first = int(plain(row.get("compress_from")) or 0)
    if parts and first:
        parts.insert(0, f"# compress_from={first}: train so many steps without these lines, then add them.")
    weights = row.get("weights")
    if parts and isinstance(weights, str) and weights != SYNCHRONOUS:
        parts.insert(0, f"# weights={weights}: not here, since torch's pipelines run empty after each step.")
    return "\n\n".join(parts)


def _link_code(row: Mapping[Any, Any], price: str) -> Iterator[str]:
    """Yield Python for the compressed links of each replica and tensor."""
    microbatches = f"num_microbatches={_count(row, 'num_microbatches')}"
    shared = bool(plain(row.get("shared_indices")))
    in_one_process = microbatches + ", shared_indices=True" * shared
    for replica, tensor, forward, backward in _links(row):
        if _count(row, "num_stages") == 1 or (forward, backward) == (IDENTITY, IDENTITY):
            continue
        if replica is not None:
            yield f"# Replica {replica}:" if replica != OTHERS else "# All other replicas:"
        if tensor is not None:
            yield f"# Tensor `{tensor}`:" if tensor != OTHERS else "# All other tensors:"
        one_notation = isinstance(forward, str) and isinstance(backward, str)
        forward_text, backward_text = _quoted(forward), _quoted(backward)
        yield (
            "from raysim.nn import CompressedLink  # between two layers of any model, in one process: docs/take-home/link.md\n"
            f"link = CompressedLink({forward_text}, backward={backward_text}, {in_one_process})"
            if one_notation
            else "from raysim.nn import insert_links  # at the cuts of a Sequential, in one process: docs/take-home/link.md\n"
            f"model = insert_links(model, cuts, forward={forward_text}, backward={backward_text}, {in_one_process})"
        )
        if shared:
            yield "# shared_indices=true: not in torch's pipelines, whose gradients are sent with positions of their own."
        elif tensor is None:  # stages of torch's pipelines pass tensors by position, without names
            yield (
                f"{price}from raysim.distributed.pipelining import compress_stages  # of torch's pipelines: "
                "docs/take-home/pipelining.md\n"
                f"stages = compress_stages(modules, shapes, forward={forward_text}, backward={backward_text}, {microbatches})"
            )


def _links(row: Mapping[Any, Any]) -> Iterator[tuple[str | None, str | None, str | list[str], str | list[str]]]:
    """Yield replica, tensor, and the notations of activations and gradients.

    The replica is None if all have the same setting, the tensor if no table names one.
    """
    settings = [_read(row.get(key)) for key in ("forward", "backward")]
    by_replica = [isinstance(setting, dict) and is_by_replica(setting) for setting in settings]
    tables = [setting for setting, table in zip(settings, by_replica, strict=True) if table]
    replicas: list[str | None] = sorted({replica for table in tables for replica in table}) or [None]
    for replica in replicas:
        own = [
            setting.get(replica, setting.get(OTHERS, IDENTITY)) if table else setting
            for setting, table in zip(settings, by_replica, strict=True)
        ]
        entries = [entry for setting in own for entry in (setting if isinstance(setting, list) else [setting])]
        names = {name for entry in entries if isinstance(entry, dict) for name in entry}
        tensors: list[str | None] = sorted(names, key=lambda name: (name == OTHERS, name)) or [None]
        for tensor in tensors:
            forward, backward = (_of_tensor(setting, tensor) for setting in own)
            yield replica, tensor, forward, backward


def _read(text: Any) -> Any:
    """Return a setting as records write it: a notation, or a list or table in TOML."""
    if not isinstance(text, str):
        return IDENTITY
    return parse_toml(f"value = {text}")["value"] if text.startswith(("{", "[")) else text


def _of_tensor(setting: Any, tensor: str | None) -> str | list[str]:
    """Return the notation of a tensor, or a list by boundary if they differ."""
    if isinstance(setting, list):
        several = [str(_of_tensor(item, tensor)) for item in setting]
        return several[0] if len(set(several)) == 1 else several
    return str(setting.get(tensor, setting.get(OTHERS, IDENTITY)) if isinstance(setting, dict) else setting)


def _quoted(value: str | list[str]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _count(row: Mapping[Any, Any], key: str) -> int:
    return int(plain(row.get(key)) or 1)


# --- a recipe of the settings that all runs share, a command for each run, and versions ---------------------------------------


ENVIRONMENT = ("raysim", "torch", "ray", "numpy", "python", "host", "cpu", "cpu_capability", "engine")
TABLES = ("model", "data")  # keys written with their options in one table


def reproduce_blocks(job: JobRuns, material: Material) -> Iterator[Block]:
    """Yield the settings and versions of a job."""
    runs = job.runs
    given = [key for key in material.results.keys if key in runs and runs[key].map(_written).any()]
    given = [key for key in given if key != "num_stages" or "cuts" not in given]  # the cuts determine it
    varied = [key for key in given if runs[key].map(_written).nunique() > 1]
    for table in TABLES:  # a recipe cannot contain half a table
        if any(key.startswith(f"{table}.") for key in varied):
            varied = [key for key in given if key in varied or key == table or key.startswith(f"{table}.")]
    yield Text(f"The settings common to all {len(runs)} runs, as a recipe: `{job.key}.toml`.")
    yield Text(recipe(runs.iloc[0].to_dict(), [key for key in given if key not in varied]), "code")
    yield Text("The settings named in the figures, the first seed of each:")
    commands = []
    for setting in job.named:
        row = runs[runs["run"] == setting.runs[0]].iloc[0].to_dict()
        words = [f"{key}={_word(row[key])}" for key in varied if _written(row[key])]
        words += ["--engine", str(row["engine"])] if _written(row.get("engine")) else []
        commands.append(shlex.join(["raysim", "train", f"{job.key}.toml", *words]))
    yield Text("\n".join(commands), "code")
    versions = [{"what": name, "version": _counted(runs[name])} for name in ENVIRONMENT if name in runs]
    yield Table(f"{job.key}-versions", f"Software and hardware of the runs of {job.title}.", pd.DataFrame(versions))


def recipe(row: dict[Any, Any], keys: Sequence[str]) -> str:
    """Return the keys of a run in TOML.

    >>> row = {"model": "gpt", "model.width": 64, "steps": 10, "forward": '{1 = "TopK(0.1)"}', "optimizer.name": "adamw"}
    >>> print(recipe(row, list(row)))
    model = { name = "gpt", width = 64 }
    steps = 10
    forward = {1 = "TopK(0.1)"}
    optimizer.name = "adamw"
    """
    lines = []
    for key in keys:
        table, _, option = key.partition(".")
        if table in TABLES and option:
            continue
        options = [other for other in keys if table in TABLES and other.startswith(f"{table}.")]
        if options:
            inner = ", ".join(f"{other.partition('.')[2]} = {_written(row[other])}" for other in options)
            lines.append(f"{key} = {{ name = {_written(row[key])}, {inner} }}")
        else:
            lines.append(f"{key} = {_written(row[key])}")
    return "\n".join(lines)


def _written(value: Any) -> str:
    """Return a value in TOML, which equals JSON for all values of a run; nothing if it was not given.

    Lists by boundary and tables by replica are recorded as TOML already.
    """
    value = plain(value)
    if value is None:
        return ""
    return value if isinstance(value, str) and value.startswith(("[", "{")) else json.dumps(value, ensure_ascii=False)


def _word(value: Any) -> str:
    """Return a value for the command line, texts without quotes."""
    return value if isinstance(value, str) else _written(value)


def _counted(values: pd.Series[Any]) -> str:
    counts = values.map(lambda value: _word(value) or "unknown").value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    return ", ".join(f"{value} ({count} runs)" for value, count in counts.items())
