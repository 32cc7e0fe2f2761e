"""Write the tables and pictures of docs/findings from the runs in docs/findings/data.

Run `make findings` after `keep_findings.py` has kept a study; a test compares the committed pages with this program's.

In a page, the lines between `<!-- NAME -->` and `<!-- end -->` are written here: `runs`, `settings`, `verdicts`; `networks` of a
study that asks for the time to a target; and in the index `overview` and `coverage`. All other lines are written by hand.
"""

from __future__ import annotations

import math
import re
import textwrap
import tomllib
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

from analysis import Finding, Results, findings, load, replay, safe_set
from analysis.comparison.evidence import MODES, Mode, Setting, contexts, setting_of
from analysis.comparison.statistics import bounds
from raysim.quality import Measure, measures_of

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

PAGES = Path(__file__).with_name("findings")
DATA = PAGES / "data"
PICTURES = PAGES.parent / "images" / "findings"
HEADS: dict[Mode, str] = {
    "on": "",
    "off": ", compression off",
    "on_estimated": ", estimated statistics",
    "off_estimated": ", estimated statistics, compression off",
}
COLOURS = {"safe": "#2a7f4f", "harmful": "#b3382c", "undecided": "#8a8a8a"}


def blocks_of(results: Results) -> dict[str, str]:
    """Return the blocks of a study's page, by name."""
    found = {"runs": _runs(results), "settings": _settings(results), "verdicts": _verdicts(results)}
    return found | ({"networks": _networks(results)} if races(results) else {})


def decided(results: Results) -> list[Finding]:
    """Return the findings that rest on runs of these results."""
    return [one for one in findings(results) if any(comparison.effects for comparison in one.comparisons)]


def _runs(results: Results) -> str:
    runs = results.runs
    seeds = sorted(set(runs["seed"].astype(int)))
    began, hours = pd.to_datetime(runs["started_at"], utc=True), runs["seconds"].sum() / 3600
    versions = ", ".join(
        f"{name} {'/'.join(sorted(set(runs[name].astype(str))))}" for name in ("raysim", "torch", "python")
    )
    return (
        f"{len(runs)} runs of {runs['setting'].nunique()} settings on the seeds {', '.join(map(str, seeds))}, begun from "
        f"{began.min():%Y-%m-%d %H:%M} to {began.max():%Y-%m-%d %H:%M} UTC; {hours:.1f} hours of training in all, on CPU; {versions}."
    )


def _settings(results: Results) -> str:
    judged = safe_set(results)
    runs = results.runs.set_index("run")
    sent = runs["wire_bytes"] / runs["steps_done"]
    tables = []
    for context in contexts(results):
        name = context.quality.name
        verdicts = judged[judged["context"] == context.label].set_index("setting")
        modes = [mode for mode in MODES if context.rows[f"{name}_{mode}"].notna().any()]
        heads = [f"{name}{HEADS[mode]}" for mode in modes]
        columns = ["setting", "seeds", *heads, "fewer bytes", f"harm ({context.unit})", "bounds", "verdict"]
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        dense = sent[list(context.settings[Setting()]["run"])].mean()
        for setting in sorted(context.settings, key=lambda one: _harm(verdicts, str(one))):
            rows = context.settings[setting]
            cells = [
                f"`{setting}`",
                str(len(rows)),
                *(f"{rows[f'{name}_{mode}'].mean():.4g}" for mode in modes),
                f"{dense / sent[list(rows['run'])].mean():.1f}x",
            ]
            lines.append(f"| {' | '.join([*cells, *_judgement(verdicts, str(setting))])} |")
        tables += [f"`{context.label}`", "\n".join(lines)]
    return "\n\n".join(tables if len(tables) > 2 else tables[1:])


def races(results: Results) -> dict[str, str]:
    """Return the networks that a study prices steps on, and the target whose time it asks for: empty for a study that asks for none."""
    folder = DATA / str(results.runs["study"].iloc[0])
    named = tomllib.loads((folder / "study.toml").read_text(encoding="utf-8"))["objectives"]
    targets = [one["target"] for one in named if "target" in one]
    steps = [one["name"].partition("@")[2] for one in named if one["name"].startswith("step_s@")]
    return dict.fromkeys(steps, targets[0]) if targets else {}


def _networks(results: Results) -> str:
    """Return a table of all settings, whatever their job: harm beside dense, bytes, and seconds to the target on each network."""
    named = races(results)
    runs = results.runs.set_index("run")
    names = pd.Series({run: _name(row) for run, row in runs.iterrows()})
    prices = replay(results, list(named), target=next(iter(named.values())), split=False)
    times = prices.assign(name=prices["run"].map(names)).groupby(["name", "network"], sort=False)
    networks = list(dict.fromkeys(prices["network"]))
    sent = _sent(results).groupby(names).mean()
    measure = _judged_by(results)
    reached_by = runs.assign(name=names).set_index(["name", "seed"])[f"final_{measure.name}_on"]
    rows = []
    for name in dict.fromkeys(names):
        pairs = pd.concat([reached_by[name], reached_by["dense"]], axis=1).dropna()
        found = bounds([measure.harm(mine, dense) for mine, dense in pairs.to_numpy()], 0.95)
        reached = [times.get_group((name, network)) for network in networks]
        cells = [
            f"`{name}`",
            f"{reached_by[name].mean():.4g}",
            f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})" if name != "dense" else "",
            *(
                f"{factor:.3g}x" if factor < 1000 else f"{factor:,.0f}x"
                for factor in sent.loc["dense"] / sent.loc[name]
            ),
            *(_seconds(each) for each in reached),
        ]
        rows.append((found.mean, f"| {' | '.join(cells)} |"))
    head = [
        "setting",
        measure.name,
        f"harm ({measure.unit})",
        "fewer bytes",
        "between stages",
        "between replicas",
        *named,
    ]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(row for _, row in sorted(rows))])


def _judged_by(results: Results) -> Measure:
    """Return the measure by which the settings of a study are judged."""
    return next(iter(measures_of(results.runs.iloc[0].to_dict()).values()))


def _seconds(prices: pd.DataFrame) -> str:
    """Return the mean seconds to the target with the interval of the prices; in words where a seed did not reach it."""
    steps = prices["steps_to_target_on"]
    if steps.isna().any():
        return "not reached"
    value, low, high = ((steps * prices[column]).mean() for column in ("step_s", "step_low_s", "step_high_s"))
    return f"{value:.3g} s ({low:.3g} to {high:.3g})"


def _sent(results: Results) -> pd.DataFrame:
    """Return the bytes that each run sent: in all, between stages, and between replicas."""
    links = results.links
    replicas = links["direction"].astype(str) == "replica_gradient"
    parts = {"all": links, "stages": links[~replicas], "replicas": links[replicas]}
    return pd.DataFrame({name: part.groupby("run", observed=True)["wire_bytes"].sum() for name, part in parts.items()})


def _name(row: pd.Series) -> str:
    """Return the keys in which a run differs from dense, its subspace among them."""
    setting = setting_of(row)
    size = row.get("model.subspace")
    return (
        " ".join(
            [*([] if pd.isna(size) else [f"subspace={size:g}"]), *([] if setting == Setting() else [str(setting)])]
        )
        or "dense"
    )


def _harm(verdicts: pd.DataFrame, setting: str) -> float:
    return float(verdicts.loc[setting, "harm"]) if setting in verdicts.index else -math.inf


def _judgement(verdicts: pd.DataFrame, setting: str) -> tuple[str, str, str]:
    """Return the harm of a setting, its bounds and its verdict."""
    if setting not in verdicts.index:
        return "", "", "the reference"
    row = verdicts.loc[setting]
    bounds = f"{row['harm_low']:+.2f} to {row['harm_high']:+.2f}" if math.isfinite(row["harm_low"]) else "none"
    return f"{row['harm']:+.2f}", bounds, f"{row['verdict']}: {row['lacking']}" if row["lacking"] else row["verdict"]


def _verdicts(results: Results) -> str:
    lines = ["| claim | verdict | because |", "|---|---|---|"]
    lines += [f"| {one.claim.text} | **{one.verdict}** | {_plain(one.reason)} |" for one in decided(results)]
    return "\n".join(lines)


def _overview(pages: dict[str, Results]) -> str:
    lines = ["| claim | source | where | verdict | seeds |", "|---|---|---|---|---|"]
    for name, results in pages.items():
        for one in decided(results):
            source = one.claim.source.replace("|", "\\|")
            lines.append(f"| {one.claim.text} | {source} | [{name}]({name}.md) | **{one.verdict}** | {one.seeds} |")
    return "\n".join(lines)


def deviations(results: Results) -> list[float]:
    """Return the harms of all seeds less their setting's mean, in standard deviations of that setting.

    Settings that are exact, whose harms differ by less than an evaluation can show, are left out.
    """
    found: list[float] = []
    for context in contexts(results):
        dense = context.settings[Setting()]
        for setting, runs in context.settings.items():
            seeds = dense.index.intersection(runs.index)
            if setting != Setting() and len(seeds) >= 5:
                harms = np.array([context.harm(runs.loc[seed], "on", dense.loc[seed], "on") for seed in seeds])
                spread = harms.std(ddof=1)
                found += list((harms - harms.mean()) / spread) if spread > context.step else []
    return found


def coverage(spread: list[float], draws: int = 20_000) -> tuple[float, float]:
    """Return how often the lower and the upper 95 % bound of five values drawn from a spread with mean 0 hold that mean."""
    drawn = np.random.default_rng(0).choice(spread, (draws, 5))
    found = [bounds(values, 0.95) for values in drawn]
    return float(np.mean([one.low < 0 for one in found])), float(np.mean([one.high > 0 for one in found]))


def _coverage(pages: dict[str, Results]) -> str:
    spreads = {f"[{name}]({name}.md)": deviations(results) for name, results in pages.items()}
    spreads["all"] = [value for spread in spreads.values() for value in spread]
    lines = ["| spreads of | lower bound | upper bound |", "|---|---|---|"]
    for name, spread in spreads.items():
        low, high = coverage(spread)
        lines.append(f"| {name} | {100 * low:.1f} % | {100 * high:.1f} % |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "\\<")


def draw(results: Results, path: Path) -> None:
    """Draw the harm of each setting with its one-sided bounds, beside the margin."""
    judged = safe_set(results).dropna(subset="harm").sort_values("harm", ascending=False)
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.42 * len(judged)), layout="constrained")
    many = judged["context"].nunique() > 1
    for place, row in enumerate(judged.to_dict("records")):
        colour = COLOURS[row["verdict"]]
        low, high = row["harm_low"], row["harm_high"]
        if math.isfinite(low):
            axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(row["harm"], place, "o", color=colour)
        name = f"{row['context']}: {row['setting']}" if many else row["setting"]
        name = "\n".join(textwrap.wrap(name, 120, break_long_words=False, break_on_hyphens=False))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(0.005, place + 0.2, name, fontsize=8, bbox=box, transform=axes.get_yaxis_transform())
    axes.axvline(0, color="black", linewidth=0.8)
    axes.axvline(judged["within"].iloc[0], color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("symlog", linthresh=2)
    axes.set_yticks([])
    axes.set_xlabel(f"harm beside dense, {judged['unit'].iloc[0]} (dashed: the margin)")
    axes.set_ylim(-0.6, len(judged) - 0.2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for verdict, colour in COLOURS.items():
        axes.plot([], [], "o-", color=colour, label=verdict)
    figure.legend(loc="outside upper right", ncols=len(COLOURS), fontsize=8, frameon=False)
    _save(figure, path)


def draw_networks(results: Results, path: Path) -> None:
    """Draw the mean quality of each setting, whatever its job, against seconds on each network and against bytes."""
    runs = results.runs.set_index("run")
    names = pd.Series({run: _name(row) for run, row in runs.iterrows()})
    prices = replay(results, list(races(results)), split=False)
    seconds = prices.assign(name=prices["run"].map(names)).groupby(["network", "name"], sort=False)["step_s"].mean()
    sent = (runs["wire_bytes"] / runs["steps"] / 1e6).groupby(names).mean()
    measure = _judged_by(results)
    evals = results.evals[results.evals["mode"] == "on"]
    curves = evals.groupby([evals["run"].map(names), "step"], observed=True)[measure.name].mean().unstack(0)
    panels = {f"seconds, {network}": seconds[network] for network in dict.fromkeys(prices["network"])} | {"MB": sent}
    figure, grid = plt.subplots(2, 3, figsize=(13, 9), layout="constrained", sharey=True)
    order = curves.iloc[-1].sort_values(ascending=not measure.higher).index
    for axes, (title, factors) in zip(grid.flat, panels.items(), strict=False):
        for place, name in enumerate(order):
            style = (
                {"color": plt.get_cmap("tab20")(place % 20)} if name != "dense" else {"color": "black", "linewidth": 3}
            )
            axes.plot(curves.index * factors[name], curves[name], label=name, **style)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(title)
    end, start = curves["dense"].iloc[[-1, 0]]  # of a setting far from dense its end alone is in sight, or nothing
    for axes in grid[:, 0]:
        axes.set_ylim(*sorted((end - 0.1 * (start - end), start + 0.6 * (start - end))))
        axes.set_ylabel(measure.name)
    (last,) = list(grid.flat)[len(panels) :]
    last.set_axis_off()
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7.5)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def filled(text: str, blocks: dict[str, str]) -> str:
    """Return a page with its blocks written anew; raises SystemExit where it lacks one."""
    for name, block in blocks.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda found, block=block: f"{found[1]}\n{block}\n\n{found[2]}",
            text,
            flags=re.S,
        )
        if count != 1:
            raise SystemExit(f"A page of findings must have one block `<!-- {name} -->`, but got {count}.")
    return text


def pages() -> dict[str, Results]:
    """Return the kept studies by the names of their pages."""
    return {folder.name: load(folder) for folder in sorted(DATA.iterdir()) if folder.is_dir()}


def written(studies: dict[str, Results]) -> dict[Path, str]:
    """Return the text of every page."""
    found = {}
    for name, results in studies.items():
        page = PAGES / f"{name}.md"
        found[page] = filled(page.read_text(encoding="utf-8"), blocks_of(results))
    index = PAGES / "index.md"
    return found | {
        index: filled(
            index.read_text(encoding="utf-8"), {"overview": _overview(studies), "coverage": _coverage(studies)}
        )
    }


if __name__ == "__main__":
    studies = pages()
    for name, results in studies.items():
        draw(results, PICTURES / f"{name}.png")
        if races(results):
            draw_networks(results, PICTURES / f"{name}-networks.png")
    for page, text in written(studies).items():
        page.write_text(text, encoding="utf-8")
