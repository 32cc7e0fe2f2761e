"""Candidates of a probe: their bytes, errors and prices, and the training that would judge them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from raysim.analysis.data.folders import over
from raysim.analysis.report.frontier import priced
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.page import Block, ByNetwork, Cell, Section, Table, Text, code, number
from raysim.analysis.report.words import bytes_of, seconds, speedup, step_time
from raysim.config.identity import DENSE

LIMIT = (
    "A probe measures bytes, error and time, not whether training stays sound under a candidate: its errors are not fed into the "
    "training. For that, train the same candidates in raysim at a smaller size, over seeds:"
)
SMALLER = "topics-gpt"  # an offline recipe with four stages
OF_TRANSFORMERS = re.compile(
    "LMHeadModel|For(CausalLM|SequenceClassification|ImageClassification)$"
)  # names of classes
SEEDS = (0, 1, 2)
FOLDER = "results/probed"


def cost_words(row: Mapping[Any, Any]) -> str:
    """Return the overhead of the probe of a run, in a sentence.

    >>> cost_words({"steps_done": 5, "probe_every": 10, "probe_overhead": 0.031})
    'The probe sampled 5 steps, one in 10, and took 3.1% of the time of the training.'
    """
    every, count = int(row["probe_every"]), int(row["steps_done"])
    steps = f"{count} step{'' if count == 1 else 's'}"
    return (
        f"The probe sampled {steps}, one in {every}, and took {row['probe_overhead']:.1%} of the time of the training."
    )


def smaller_runs(rows: Iterable[Mapping[Any, Any]]) -> list[str]:
    """Return the commands that train the candidates of a probe, and dense, in raysim at a smaller size, and judge them.

    A model of transformers is trained by the recipe `hf`, from a folder MODEL of its `save_pretrained`; any other model is
    replaced by a small GPT.

    >>> print(*smaller_runs([{"forward": "TopK(0.1)", "backward": "TopK(0.1)", "num_stages": 2, "num_replicas": 1}]), sep="\\n")
    for s in 0 1 2; do raysim train topics-gpt 'forward=TopK(0.1)' 'backward=TopK(0.1)' seed=$s --out results/probed/1-s$s; done
    raysim report results/probed
    >>> print(smaller_runs([{"model": "GPT2LMHeadModel", "num_stages": 2, "num_replicas": 1}])[0])
    for s in 0 1 2; do raysim train hf model.path=MODEL seed=$s --out results/probed/1-s$s; done
    """
    commands = []
    for i, row in enumerate(rows, start=1):
        changes = [
            f"{key}={row[key]}"
            for key in ("forward", "backward", "replica_gradient")
            if row.get(key) not in (None, DENSE)
        ]
        if int(row["num_replicas"]) > 1:
            # samples of a batch of 8 are enough for each replica and microbatch
            cut, most = (
                (["num_stages=1", "num_microbatches=1"], 4) if int(row["num_stages"]) == 1 else (["num_stages=2"], 2)
            )
            changes = [*cut, f"num_replicas={min(int(row['num_replicas']), most)}", *changes]
        hf = OF_TRANSFORMERS.search(str(row.get("model")))
        words = shlex.join(["raysim", "train", *(["hf", "model.path=MODEL"] if hf else [SMALLER]), *changes])
        seeds = " ".join(map(str, SEEDS))
        commands.append(f"for s in {seeds}; do {words} seed=$s --out {FOLDER}/{i}-s$s; done")
    return [*commands, f"raysim report {FOLDER}"]


FIDELITIES = {
    "forward": "fidelity, activations",
    "backward": "fidelity, gradients",
    "replica_gradient": "fidelity of the average",
}


def probes_section(material: Material) -> Section:
    """Return a table of the candidates of every probe, and the commands that train them at a smaller size."""
    return Section("probes", "Probe", [block for job in material.probes for block in _probe_blocks(job, material)])


def _probe_blocks(job: Job, material: Material) -> Iterator[Block]:
    rows = job.runs.to_dict("records")
    if job.priced:
        yield Text(ByNetwork.of(material.networks, lambda network: _probe_lead(job, network)), "lead")
    yield Text(f"{job.title}: {cost_words(rows[0])} {job.compute}")
    links = material.results.select(job.runs["run"]).table("links", ["direction", "fidelity"])
    yield Table(
        f"{job.key}-candidates",
        f"The candidates of {job.title}: their errors as fidelity (1 if messages arrive exactly, 0 if they arrive as "
        f"zeros), and their steps and speed-ups on the chosen network {over(job.transport)} with 90 % intervals. Compute: "
        f"{job.source}.",
        [_candidate_row(setting, links) for setting in job.settings],
        live=True,
    )
    yield Text(LIMIT)
    runs = {str(row["run"]): row for row in rows}
    yield Text("\n".join(smaller_runs(runs[setting.runs[0]] for setting in job.settings)), "code")


def _probe_lead(job: Job, network: str) -> str:
    faster = [setting for setting in job.priced if setting.speedup and setting.speedup[network].low > 1]
    best = max(faster, key=lambda setting: setting.speedup[network].value, default=None)
    limit = "A probe does not say whether training stays sound under it."
    if best is None:
        dense = f", which takes {seconds(job.dense.step_s[network].value)} a step" if job.dense is not None else ""
        return f"On {network} {over(job.transport)}, no candidate of the probe is faster than dense{dense}."
    value, low, high = best.speedup[network]
    return (
        f"On {network} {over(job.transport)}, the fastest candidate of the probe is `{best.name}`: {value:.2f} times as fast as "
        f"dense ({low:.2f} to {high:.2f}). {limit}"
    )


def _candidate_row(setting: SettingRuns, links: pd.DataFrame) -> list[Cell]:
    means = links[links["run"].isin(setting.runs)].groupby("direction", observed=True)["fidelity"].mean()
    fidelities = {text: float(means.get(direction, math.nan)) for direction, text in FIDELITIES.items()}
    return [
        code("candidate", setting.name),
        number("bytes a step", bytes_of(setting.wire_bytes), setting.wire_bytes),
        number("factor", f"{setting.factor:.2f}", setting.factor),
        *(number(text, "none" if math.isnan(value) else f"{value:.4f}", value) for text, value in fidelities.items()),
        priced("step", setting, step_time, setting.step_s),
        priced("speed-up", setting, speedup, setting.speedup),
    ]
