"""The tables of a study's page of findings: its runs, settings and verdicts, and the seconds to a target on each network."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from itertools import chain, combinations
from statistics import fmean

import pandas as pd
from raysim_findings.finding import Finding

from raysim.analysis import Results, replay, settings
from raysim.analysis.comparison.contexts import MODES, ComparedRuns, Mode, contexts
from raysim.config.identity import Setting
from raysim.quality import measures_of
from raysim.storage.places import read_place

HEADS: dict[Mode, str] = {
    "on": "",
    "off": ", compression off",
    "on_estimated": ", estimated statistics",
    "off_estimated": ", estimated statistics, compression off",
}
KEY = re.compile(r"([\w.]+)'?(?:=|: )('[^']*'|[^,{}]+)")  # of a job's label, or within a table that is its value


def blocks_of(results: Results, verdicts: Sequence[Finding]) -> dict[str, str]:
    """Return the blocks of a study's page, by name; without `verdicts` if no claim bears on it."""
    blocks = {"runs": _runs(results), "settings": _settings(results)}
    blocks |= {"verdicts": _verdicts(verdicts)} if verdicts else {}
    return blocks | ({"networks": _networks(results)} if races(results) else {})


def _runs(results: Results) -> str:
    runs = results.runs
    seeds = sorted(set(runs["seed"].astype(int)))
    began, hours = pd.to_datetime(runs["started_at"], utc=True), runs["seconds"].sum() / 3600
    settings = len(runs[["job", "setting"]].drop_duplicates())
    days = " to ".join(dict.fromkeys(f"{day:%Y-%m-%d}" for day in (began.min(), began.max())))
    of = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{settings} settings, {of}: {len(runs)} runs, {hours:.1f} hours on CPU, {days}."


def _settings(results: Results) -> str:
    """Return the table of a job or of each of two; of more, one table with a column for each job."""
    judged = settings(results)
    runs = results.runs.set_index("run")
    sent = runs["wire_bytes"] / runs["steps_done"]
    compared = with_reference(results)
    if len(compared) > 2:
        return _side_by_side(compared, judged, sent)
    tables = []
    for context in compared:
        name = context.quality.name
        verdicts = judged[judged["context"] == context.label].set_index("setting")
        modes = _distinct(context)
        heads = [f"{name}{HEADS[mode]}" for mode in modes]
        counted = len({len(rows) for rows in context.settings.values()}) > 1
        heads = [*(["seeds"] if counted else []), *heads]
        columns = ["setting", *heads, "fewer bytes", f"harm ({context.unit})", "bounds", "verdict"]
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        dense = sent[list(context.settings[Setting()]["run"])].mean()
        for setting in sorted(context.settings, key=lambda setting: _harm(verdicts, str(setting))):
            rows = context.settings[setting]
            cells = [
                f"`{setting}`",
                *([str(len(rows))] if counted else []),
                *(f"{rows[f'{name}_{mode}'].mean():.4g}" for mode in modes),
                f"{dense / sent[list(rows['run'])].mean():.1f}x",
            ]
            lines.append(f"| {' | '.join([*cells, *_judgement(verdicts, str(setting))])} |")
        tables += [f"`{context.label}`", "\n".join(lines)]
    return "\n\n".join(tables if len(tables) > 2 else tables[1:])


def _side_by_side(compared: Sequence[ComparedRuns], judged: pd.DataFrame, sent: pd.Series) -> str:
    """Return a table with a row for each setting and, for each job, its harm with bounds, and the verdict if it is decided."""
    names = _short([context.label for context in compared])
    fewer: dict[str, list[float]] = {}
    columns = []
    compared = sorted(
        compared,
        key=lambda context: [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", names[context.label])
        ],
    )
    for context in compared:
        verdicts = judged[judged["context"] == context.label].set_index("setting")
        reference = context.settings[Setting()]
        cells = {}
        for setting, rows in context.settings.items():
            factor = sent[list(reference["run"])].mean() / sent[list(rows["run"])].mean()
            fewer.setdefault(str(setting), []).append(factor)
            harm, interval, verdict = _judgement(verdicts, str(setting))
            interval = f" ({interval})" if interval != "none" else ""
            word = verdict.partition(":")[0]
            cells[str(setting)] = f"{harm}{interval}{'' if word == 'undecided' else f', {word}'}"
        name = context.quality.name
        columns.append(cells | {"dense": f"{name} {reference[f'{name}_on'].mean():.4g}"})
    head = [
        "setting",
        "fewer bytes",
        *(f"`{names[context.label]}`" if names[context.label] else "base" for context in compared),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    least = judged.groupby("setting")["harm"].min()
    for setting in ["dense", *least.sort_values().index]:
        factors = dict.fromkeys(f"{bound:.1f}x" for bound in (min(fewer[setting]), max(fewer[setting])))
        lines.append(
            f"| `{setting}` | {' to '.join(factors)} | {' | '.join(cells.get(setting, '') for cells in columns)} |"
        )
    return "\n".join(lines)


def _short(labels: Sequence[str]) -> dict[str, str]:
    """Return what tells jobs apart: the fewest keys of their labels that do, the first ones first, and keys that others lack."""
    keys = {label: label.partition(", ")[2] for label in labels}
    parts = {label: dict(KEY.findall(text)) for label, text in keys.items()}
    every = set.intersection(*map(set, parts.values())) if parts else set()
    differ = [
        key
        for key in next(iter(parts.values()), ())
        if key in every and len({each[key] for each in parts.values()}) > 1
    ]
    for chosen in chain.from_iterable(combinations(differ, count) for count in range(bool(differ), len(differ) + 1)):
        short = {
            label: ", ".join(f"{key}={value}" for key, value in each.items() if key in chosen or key not in every)
            for label, each in parts.items()
        }
        if len(set(short.values())) == len(short):
            return short
    return keys


def _distinct(context: ComparedRuns) -> list[Mode]:
    """Return the modes of evaluation without those that agree in every run with one of fewer differences."""
    values = {mode: context.rows[f"{context.quality.name}_{mode}"] for mode in MODES}
    simpler: dict[Mode, Mode] = {"off": "on", "on_estimated": "on", "off_estimated": "off"}
    return [
        "on",
        *(mode for mode, other in simpler.items() if ((values[mode] != values[other]) & values[mode].notna()).any()),
    ]


def with_reference(results: Results) -> list[ComparedRuns]:
    """Return the jobs that have runs without compression, with which others are compared."""
    return [context for context in contexts(results) if Setting() in context.settings]


def races(results: Results) -> dict[str, str]:
    """Return a study's target by the networks on which it prices steps; empty for a study without a target."""
    named = tomllib.loads(read_place(results.folders[0] / "study.toml").decode())["objectives"]
    targets = [objective["target"] for objective in named if "target" in objective]
    steps = [name.partition("@")[2] for objective in named if (name := objective["name"]).startswith("step_s@")]
    return dict.fromkeys(steps, targets[0]) if targets else {}


def _networks(results: Results) -> str:
    """Return a table of all settings of all jobs: mean harm against dense, bytes, and seconds to the target on each network."""
    named = races(results)
    runs = results.runs.set_index("run")
    names = pd.Series({run: name_of(row) for run, row in runs.iterrows()})
    prices = replay(results, list(named), target=next(iter(named.values())), split=False)
    times = prices.assign(name=prices["run"].map(names)).groupby(["name", "network"], sort=False)
    networks = list(dict.fromkeys(prices["network"]))
    sent = _sent(results).groupby(names).mean()
    measure = next(iter(measures_of(results.runs.iloc[0].to_dict()).values()))
    reached_by = runs.assign(name=names).set_index(["name", "seed"])[f"final_{measure.name}_on"]
    rows = []
    for name in dict.fromkeys(names):
        pairs = pd.concat([reached_by[name], reached_by["dense"]], axis=1).dropna()
        harm = fmean(measure.harm(quality, dense) for quality, dense in pairs.to_numpy())
        reached = [times.get_group((name, network)) for network in networks]
        cells = [
            f"`{name}`",
            f"{harm:+.1f}" if name != "dense" else "",
            *(
                f"{factor:.3g}x" if factor < 1000 else f"{factor:,.0f}x"
                for factor in (sent.loc["dense"] / sent.loc[name])[["stages", "replicas"]]
            ),
            *(_seconds(each) for each in reached),
        ]
        rows.append((harm, f"| {' | '.join(cells)} |"))
    head = [
        "setting",
        f"harm ({measure.unit})",
        "fewer bytes between stages",
        "between replicas",
        *named,
    ]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(row for _, row in sorted(rows))])


def _seconds(prices: pd.DataFrame) -> str:
    """Return the mean seconds to the target with the interval of the prices, or "not reached" if a seed missed it."""
    steps = prices["steps_to_target_on"]
    if steps.isna().any():
        return "not reached"
    value, low, high = ((steps * prices[column]).mean() for column in ("step_s", "step_low_s", "step_high_s"))
    return f"{value:.3g} ({low:.3g} to {high:.3g})"


def _sent(results: Results) -> pd.DataFrame:
    """Return the bytes sent by each run: in all, between stages, and between replicas."""
    links = results.links
    replicas = links["direction"].astype(str) == "replica_gradient"
    parts = {"all": links, "stages": links[~replicas], "replicas": links[replicas]}
    return pd.DataFrame({name: part.groupby("run", observed=True)["wire_bytes"].sum() for name, part in parts.items()})


def name_of(row: pd.Series) -> str:
    """Return the keys in which a run differs from dense, its subspace among them."""
    size = row.get("model.subspace")
    setting = [row["setting"]] if row["setting"] != "dense" else []
    return " ".join([*([] if pd.isna(size) else [f"subspace={size:g}"]), *setting]) or "dense"


def _harm(verdicts: pd.DataFrame, setting: str) -> float:
    return float(verdicts.loc[setting, "harm"]) if setting in verdicts.index else -math.inf


def _judgement(verdicts: pd.DataFrame, setting: str) -> tuple[str, str, str]:
    """Return the harm of a setting, its bounds and its verdict."""
    if setting not in verdicts.index:
        return "", "", "the reference"
    row = verdicts.loc[setting]
    bounds = f"{row['harm_low']:+.2f} to {row['harm_high']:+.2f}" if math.isfinite(row["harm_low"]) else "none"
    return f"{row['harm']:+.2f}", bounds, ": ".join(filter(None, (row["verdict"], row["lacking"])))


def _verdicts(findings: Sequence[Finding]) -> str:
    """Return a table with a row for each claim and verdict; differences of several jobs share a row."""
    names = _short(sorted({finding.context for finding in findings}))
    rows: dict[str, list[str]] = {}
    for finding in findings:
        interval = "" if finding.low is None else f" ({finding.low:+.3g} to {finding.high:+.3g})"
        job = f", {name}" if len(names) > 1 and (name := names[finding.context]) else ""
        chance = ", near chance" if "clearly above chance" in finding.reason else ""
        required = f"{finding.side} {finding.threshold:g}"
        effect = "not run" if finding.effect is None else f"{finding.effect:+.3g} {finding.unit}{interval}{job}{chance}"
        row = f"| {finding.claim.text} | **{finding.verdict}** | {required} |"
        rows.setdefault(row, []).append(effect)
    lines = [f"{row} {'; '.join(effects)} |" for row, effects in rows.items()]
    return "\n".join(["| claim | verdict | required | decisive difference |", "|---|---|---|---|", *lines])
