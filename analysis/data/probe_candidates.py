"""Candidates of `raysim.probe` among recorded runs: their limits, and the training that would judge them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from raysim.analysis.data.settings import DENSE

LIMIT = (
    "A probe measures bytes, error and time, not whether training stays sound under a candidate: its errors are not fed into the "
    "training. For that, train the same candidates in raysim at a smaller size, over seeds:"
)
SMALLER = "topics-gpt"  # a recipe that needs no network, of four stages
OF_TRANSFORMERS = re.compile(
    "LMHeadModel|For(CausalLM|SequenceClassification|ImageClassification)$"
)  # names of classes
SEEDS = (0, 1, 2)
FOLDER = "results/probed"


def is_probe(row: Mapping[Any, Any]) -> bool:
    """Return whether a run is a candidate of a probe: it has no losses of its own, so no quality."""
    return str(row.get("probe")) == "True"


def are_probes(runs: pd.DataFrame) -> pd.Series[bool]:
    """Return `is_probe` of each run of a frame."""
    return runs["probe"].astype(str) == "True" if "probe" in runs else pd.Series(False, runs.index)


def candidate_name(row: Mapping[Any, Any]) -> str:
    """Return the name of a candidate, from its run.

    >>> candidate_name({"forward": "TopK(0.1)", "replica_gradient": "SignSGD", "num_stages": 2})
    'TopK(0.1), replicas SignSGD'
    """
    both = int(row["num_stages"]) > 1
    links, replicas = (str(row[key]) for key in ("forward", "replica_gradient"))
    words = [links] if links != DENSE else []
    if replicas != DENSE:
        words.append(f"replicas {replicas}" if both else replicas)
    return ", ".join(words) or "dense"


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
            stages, most = ("1", 4) if int(row["num_stages"]) == 1 else ("2", 2)
            changes = [f"num_stages={stages}", f"num_replicas={min(int(row['num_replicas']), most)}", *changes]
        hf = OF_TRANSFORMERS.search(str(row.get("model")))
        words = shlex.join(["raysim", "train", *(["hf", "model.path=MODEL"] if hf else [SMALLER]), *changes])
        seeds = " ".join(map(str, SEEDS))
        commands.append(f"for s in {seeds}; do {words} seed=$s --out {FOLDER}/{i}-s$s; done")
    return [*commands, f"raysim report {FOLDER}"]
