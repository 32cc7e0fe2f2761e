"""Tables of runs, branches, a probe's candidates and harm at another size, and the importance of a study's parameters."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from raysim.analysis.comparison.branches import ASSUMPTION, branch_harms
from raysim.analysis.comparison.carry import Asked, carry, law_sentence
from raysim.analysis.comparison.objectives import importance
from raysim.analysis.data.folders import over
from raysim.analysis.report.frontier import faster
from raysim.analysis.report.material import MODES, JobRuns, Material, SettingRuns
from raysim.analysis.report.page import COLOURS, Block, Chart, Panel, Section, Style, Table, Text, axis, bar_trace
from raysim.analysis.report.words import measure_text, quality_formats, seconds
from raysim.analysis.runs.results import Results
from raysim.config.identity import IDENTITY, is_missing
from raysim.network.prices import times
from raysim.units import decimals, format_parameters

# --- all runs, to be sorted and filtered --------------------------------------------------------------------------------------


def runs_tables(material: Material) -> list[Block]:
    """Return one table for each job, and one for unfinished runs."""
    tables: list[Block] = [_runs_table(job, material) for job in material.jobs]
    shown = {str(run) for job in (*material.jobs, *material.probes) for run in job.runs["run"]}
    rows = material.results.runs
    rest = rows[~rows["run"].astype(str).isin(shown)] if len(rows) else rows
    if len(rest):
        frame = rest.reindex(columns=["run", "status", "setting", "error"])
        tables.append(Table("open-runs", "These runs are not finished, and are in no figure.", frame))
    return tables + _dropped(material.results.trials)


def _dropped(trials: pd.DataFrame) -> list[Block]:
    """Return a table of the trials that a sweep ended early, each with the reason."""
    if not {"status", "error", "notation"} <= {*trials}:
        return []
    left = trials[(trials["status"] == "pruned") & trials["error"].notna()]
    frame = left.reindex(columns=["folder", "trial", "notation", "error"])
    frame = frame.rename(columns={"folder": "study", "notation": "setting", "error": "reason"})
    caption = "The sweep ended these trials early. Those hopeless at once were not trained."
    return [Table("dropped", caption, frame)] if len(frame) else []


def _runs_table(job: JobRuns, material: Material) -> Table:
    owners = {run: setting for setting in job.settings for run in setting.runs}
    return Table(
        f"{job.key}-runs",
        f"The runs of {job.title}. On and off: {measure_text(job.measure)} of the last evaluation with compression on and off. "
        f"Simulated step: step time on the chosen network {over(job.transport)}, mean of the setting's seeds with its 90 % "
        f"interval (compute: {job.source}). Front: the modes in which no other setting is both faster and better there.",
        pd.DataFrame([_run_row(job, owners[str(row["run"])], row, material) for row in job.runs.to_dict("records")]),
        quality_formats(job.measure),
    )


def _run_row(job: JobRuns, setting: SettingRuns, row: dict[Any, Any], material: Material) -> dict[str, Any]:
    done = max(1.0, _number(row.get("steps_done")))  # a missing value (NaN) gives 1, in this order only
    wire, dense = _number(row.get("wire_bytes")), _number(row.get("dense_bytes"))
    fronts = {
        network: " ".join(mode for mode, members in job.fronts[network].items() if setting in members)
        for network in material.networks
    }
    return {
        "run": str(row["run"]),
        "forward": setting.forward,
        "backward": setting.backward,
        "seed": None if is_missing(row.get("seed")) else row["seed"],
        "status": str(row["status"]),
        "steps": done,
        "bytes a step": wire / done,
        "factor": dense / wire if wire > 0 else math.nan,
        **{mode: (_number(row.get(f"final_{job.measure.name}_{mode}")), math.nan) for mode in MODES},
        "train loss": _number(row.get("final_train_loss")),
        "step, simulated": setting.step_s or "not priced",
        "recorded": _number(row.get("seconds")),
        "front": fronts if setting.step_s else "",
    }


def _number(value: Any) -> float:
    return math.nan if is_missing(value) else float(value)


# --- the importance of a study's parameters for each objective ----------------------------------------------------------------


def importance_charts(material: Material) -> list[Block]:
    """Return a chart per study, with a panel per objective."""
    if not len(material.results.trials):
        return []
    frame = importance(material.results)
    studies = frame[frame["importance"].notna()].groupby("study", sort=False)
    caption = (
        "A bar is the share of an objective's variance explained by a parameter in the searched range; it does not say in which "
        "direction. Shares add up to 1 over the parameters that all trials have; a parameter of some trials is judged over these. "
        "Hover over a bar for their number."
    )
    return [
        Chart(f"study{i}-importance", f"{study}: importance of settings", caption, [*_importance_panels(rows)])
        for i, (study, rows) in enumerate(studies, start=1)
    ]


def _importance_panels(rows: pd.DataFrame) -> Iterator[Panel]:
    for objective, of_objective in rows.groupby("objective", sort=False):
        ordered = of_objective.sort_values("importance", ascending=False)
        labels = [
            f"{row['parameter']}: {row['importance']:.2f}, over {row['trials']} trials{' that have it' if row['conditional'] else ''}"
            for row in ordered.to_dict("records")
        ]
        bars = bar_trace("importance", ordered["parameter"], ordered["importance"], Style(COLOURS[0]), labels)
        yield Panel(str(objective), axis("parameter"), axis("share of importance"), [bars], height=280)


# --- branches: the harm of compressing each part of training, and from which step on a setting is safe --------------------


def has_branches(results: Results) -> bool:
    """Return whether runs branch from another one at several steps; a single step needs no table of branches."""
    if "parent" not in results.runs:
        return False
    starts = results.runs[results.runs["parent"].notna()].groupby("parent")["first_step"].nunique()
    return bool((starts > 1).any())


def branch_blocks(material: Material) -> list[Block]:
    """Return, for each dense run with branches, a sentence on where each setting is safe, and a table of settings by branch point."""
    harms, blocks = branch_harms(material.results), list[Block]()
    for i, (job, rows) in enumerate(harms.groupby("job", sort=False), start=1):
        safe = " ".join(safe_from(of_setting) for _, of_setting in rows.groupby("setting", sort=False))
        caption = f"{job}: harm in {rows['unit'].iloc[0]}, with a margin of {rows['within'].iloc[0]:g}"
        blocks += [Text(safe, "lead"), Table(f"branches{i}", caption, branch_frame(rows))]
    return [*blocks, Text(ASSUMPTION, "note")] if blocks else []


def branch_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Format rows of `branch_harms` as texts for display."""
    parts = [f"{first:,} to {end:,}" for first, end in zip(rows["first_step"], rows["end_step"], strict=True)]
    frame = pd.DataFrame({"setting": rows["setting"], "compressed steps": parts, "seeds": rows["seeds"].map(str)})
    for prefix, end in (("", ""), ("rest_", " to the end")):
        why = rows[f"{prefix}lacking"].map(lambda lacking: f" ({lacking})" if lacking else "")
        for column, name in (("harm", "harm"), ("at most", "harm_high")):
            harms = zip(rows[f"{prefix}{name}"], rows["within"], strict=True)
            frame[f"{column}{end}"] = [decimals(harm, 2, margin, sign="+") for harm, margin in harms]
        frame[f"verdict{end}"] = rows[f"{prefix}verdict"] + why
    return frame


def safe_from(rows: pd.DataFrame) -> str:
    """Return a sentence on the step from which a setting is safe, and where it harms most; `rows` are from `branch_harms`."""
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


# --- candidates of a probe: their bytes, errors and prices, and the training that would judge them ----------------------------


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
FIDELITIES = {
    "forward": "fidelity, activations",
    "backward": "fidelity, gradients",
    "replica_gradient": "fidelity of the average",
}


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
            if row.get(key) not in (None, IDENTITY)
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


def probe_blocks(job: JobRuns, material: Material) -> Iterator[Block]:
    """Yield a table of the candidates of a probe, and the commands that train them at a smaller size."""
    rows = {str(row["run"]): row for row in job.runs.to_dict("records")}
    if job.priced:
        yield Text({network: _probe_lead(job, network) for network in material.networks}, "lead")
    yield Text(f"{job.title}: {cost_words(next(iter(rows.values())))} {job.compute}")
    links = material.results.select(job.runs["run"]).table("links", ["direction", "fidelity"])
    yield Table(
        f"{job.key}-candidates",
        f"The candidates of {job.title}: their errors as fidelity (1 if messages arrive exactly, 0 if they arrive as "
        f"zeros), and their steps and speed-ups on the chosen network {over(job.transport)} with 90 % intervals. Compute: "
        f"{job.source}.",
        pd.DataFrame([_candidate_row(setting, links) for setting in job.settings]),
    )
    yield Text(LIMIT)
    yield Text("\n".join(smaller_runs(rows[setting.runs[0]] for setting in job.settings)), "code")


def _probe_lead(job: JobRuns, network: str) -> str:
    faster = [setting for setting in job.priced if setting.speedup and setting.speedup[network].low > 1]
    best = max(faster, key=lambda setting: setting.speedup[network].value, default=None)
    limit = "A probe does not say whether training stays sound under it."
    if best is None:
        dense = f", which takes {seconds(job.dense.step_s[network].value)} a step" if job.dense is not None else ""
        return f"On {network} {over(job.transport)}, no candidate of the probe is faster than dense{dense}."
    value, low, high = map(times, best.speedup[network])
    return (
        f"On {network} {over(job.transport)}, the fastest candidate of the probe is `{best.name}`: {value} times as fast as "
        f"dense ({low} to {high}). {limit}"
    )


def _candidate_row(setting: SettingRuns, links: pd.DataFrame) -> dict[str, Any]:
    means = links[links["run"].isin(setting.runs)].groupby("direction", observed=True)["fidelity"].mean()
    return {
        "candidate": setting.name,
        "bytes a step": setting.wire_bytes,
        "factor": setting.factor,
        **{text: float(means.get(direction, math.nan)) for direction, text in FIDELITIES.items()},
        "step": setting.step_s or "not priced",
        "speed-up": faster(setting),
    }


# --- harm at another size of the model: a table of `raysim.analysis.carry` ---------------------------------------------------


def carried_section(results: Results, asked: Asked) -> tuple[list[Section], list[str]]:
    """Return the report's section on harm at another size, and a sentence for each setting.

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
