"""The table of a screen, and its figures for JSON."""

from __future__ import annotations

import math
from typing import Any

from raysim.cli.terminal import console, show_notes, table_of, write_line
from raysim.screening.bench import CHANGED
from raysim.screening.findings import findings
from raysim.screening.screen import Screen, Screened, words
from raysim.units import format_seconds, plural


def show_screen(done: Screen) -> None:
    """Print the statistics of the tensors, a row for each setting, and the conclusions."""
    out = console(width=160)
    for line in findings(done):
        write_line(out, line)
    write_line(out, "")
    title = f"{done.config.name}: at once, on {plural(done.num_samples, 'test sample')}, without training"
    table = table_of([_row(done, each) for each in done.settings], title, text=["setting", "verdict"])
    table.columns[0].no_wrap = True
    table.caption = (
        "Differences from dense have a 95 % bound. Changed: predictions that differ from dense. Fidelity: of activations, / of their "
        "gradients, over all cuts. Gradient: of the stage with the largest error, beside the noise of a step's dense gradient. Codec: "
        "of a microbatch, over all links."
    )
    out.print(table)
    kept = len(done.worth())
    tried = plural(len(done.settings) - 1, "setting")
    write_line(out, f"{kept} of {tried} worth training; screened in {format_seconds(done.seconds)}.")
    show_notes(out, done.notes)


def _row(done: Screen, each: Screened) -> dict[str, str]:
    row = {"setting": words(each.setting).replace(" / ", "\n/ ")}
    for name in dict.fromkeys(("loss", *_shown_measures(done))):  # the others are in the records
        row[name] = _difference(done, each, name)
    if CHANGED in done.dense.result.measures:
        row[CHANGED] = _changed(each)
    if done.plan.boundaries:
        row["fidelity"] = "\n/ ".join(filter(None, (_range(each.fidelities(way)) for way in ("forward", "backward"))))
    if done.plan.num_replicas > 1:
        row["of replicas"] = _range(each.fidelities("replica_gradient"))
    if done.dense.result.directions:
        row |= _of_gradient(each)
    row["wire"] = f"{each.dense_bytes / each.wire_bytes:.1f}x less" if each.wire_bytes else "-"
    row["codec"] = format_seconds(each.codec_s / done.num_messages)
    for network in done.networks:
        price = each.prices.get(repr(network))
        row[repr(network)] = f"{price.speedup:.2f}x\n{format_seconds(price.step_s)}" if price else "-"
    row["verdict"] = each.verdict
    return row


def _of_gradient(each: Screened) -> dict[str, str]:
    """Return the cells of the stage whose gradient changes most."""
    worst = max(each.result.directions, key=lambda direction: direction.error, default=None)
    return {
        "gradient": "-" if worst is None else f"cos {worst.cosine:.3f}\nx{worst.norm_ratio:.2f}",
        "error, noise": "-" if worst is None else _beside(worst.error, worst.noise),
    }


def _shown_measures(done: Screen) -> list[str]:
    """Return the judged measure, and those of whole answers."""
    measures = done.plan.task.measures
    return [measures[0].name, *(measure.name for measure in measures if measure.whole)]


def _changed(each: Screened) -> str:
    share = each.result.measures.get(CHANGED)
    if share is None or not each.linked:
        return "-"
    return f"{100 * share.value:.2g} %"


def _difference(done: Screen, each: Screened, name: str) -> str:
    difference = each.result.measures.get(name)
    if difference is None:
        return "-"
    if not each.linked:
        return f"{difference.value:.4f}" if each is done.dense else "as dense"
    bound = "" if math.isnan(difference.bound) else f" +-{difference.bound:.2g}"
    return f"{difference.value:.4f}\n{difference.difference:+.2g}{bound}"


def _beside(error: float, noise: float) -> str:
    """Return an error beside the noise of a step; an error below it does not matter."""
    if math.isnan(noise):
        return f"{error:.2f}"
    return f"{error:.2f} {'<' if error < noise else '>'} {noise:.2f}"


def _range(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:.4g}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f}..{high:.3f}"


def screen_figures(done: Screen) -> dict[str, Any]:
    """Return the content of `show_screen`, for JSON."""
    return {
        "name": done.config.name,
        "cuts": list(done.plan.cuts),
        "samples": done.num_samples,
        "messages": done.num_messages,
        "seconds": done.seconds,
        "pass_s": done.pass_s,
        "chance": dict(done.chance),
        "tensors": [{**each._asdict(), "peak": each.peak, "massive": each.massive} for each in done.facts],
        "findings": findings(done),
        "shares": {network: dict(shares) for network, shares in done.shares.items()},
        "settings": [_figures(each) for each in done.settings],
        "notes": list(done.notes),
    }


def _figures(each: Screened) -> dict[str, Any]:
    return {
        **each.setting._asdict(),
        "measures": {name: difference._asdict() for name, difference in each.result.measures.items()},
        "links": each.result.measured.links,
        "gradients": [direction._asdict() for direction in each.result.directions],
        "wire_bytes": each.wire_bytes,
        "dense_bytes": each.dense_bytes,
        "codec_s": each.codec_s,
        "networks": {name: price._asdict() for name, price in each.prices.items()},
        "verdict": each.verdict,
        "reason": each.reason,
    }
