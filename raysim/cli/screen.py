"""Screen the compression that a model tolerates, without training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import ending_on_signals, fail
from raysim.cli.options import (
    JsonFile,
    Networks,
    Overrides,
    Recipe,
    Tried,
    check_file,
    check_picture,
    check_transport,
    check_uncompressed,
    parse_networks,
    write_json,
)
from raysim.cli.terminal import console, echo, show_notes, table_of, write_line
from raysim.units import apart, format_seconds, plural, two_digits

if TYPE_CHECKING:
    from raysim.screening.screen import Screen, Screened
    from raysim.screening.verdicts import Difference

ComputeDevice = Annotated[
    str | None, typer.Option(help="Price compute of this GPU, by its datasheet (default: as measured here).")
]
ComputeProfile = Annotated[Path | None, typer.Option(help="Price compute of this file written by `raysim profile`.")]
Packets = Annotated[str, typer.Option(callback=check_transport, help="The transport of packets: ray, nccl or gloo.")]
StudyFile = Annotated[
    Path | None, typer.Option(callback=check_file, help="Write a study of the settings worth training.")
]
PlotFile = Annotated[
    Path | None, typer.Option(callback=check_picture, help="Draw the loss at once over the speed-up here, as PNG.")
]


def screen(
    recipe: Recipe,
    overrides: Overrides = None,
    network: Networks = None,
    tried: Tried = None,
    only_tried: Annotated[bool, typer.Option("--only-tried", help="Leave out the default settings.")] = False,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Measure backwards too, or activations alone: faster.")
    ] = True,
    batches: Annotated[int, typer.Option(help="Batches of the test data to screen on.")] = 1,
    device: ComputeDevice = None,
    profile: ComputeProfile = None,
    transport: Packets = "ray",
    engine: Annotated[
        str, typer.Option(help="inline: in this process. ray: settings at the same time, on Ray.")
    ] = "inline",
    out: Annotated[Path | None, typer.Option(help="Write the records here, as Parquet.")] = None,
    study: StudyFile = None,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Measure what compression does to a model at once, with its own weights and data: nothing is trained.

    For example: raysim screen hf model.path=FOLDER data=text data.path=FILE num_stages=4 --network 200mbps+30ms
    """
    networks = parse_networks(network) if network else []
    for option, value in {"--plot": plot, "--device": device, "--profile": profile}.items():
        if value is not None and not networks:
            fail(f"`{option}` is for speed-ups, which need a network: add --network 200mbps+30ms.", 2)
    if networks and not gradients and device is None and profile is None:
        fail(
            "without a backward, `--no-gradients` cannot price steps: leave out `--network`, or add `--device` or `--profile`.",
            2,
        )
    if only_tried and not tried:
        fail("`--only-tried` leaves out the default settings, so it needs a setting of `--try`.", 2)
    from raysim.config import make_config, read_values

    with ending_on_signals():
        base = read_values(recipe, overrides or [])
        check_uncompressed(base)
        config = make_config(base)
        from raysim.engine.connection import listen_on_loopback

        listen_on_loopback()
        from raysim.forecast.inputs import parse_setting
        from raysim.pipeline.errors import WorkerLostError
        from raysim.screening import screen as measure
        from raysim.screening.outputs import check_folder
        from raysim.storage.places import local_path

        if out is not None:
            out = local_path(out)
            check_folder(out)
        try:
            done = measure(
                config,
                networks,
                tried=[parse_setting(text) for text in tried or []],
                only_tried=only_tried,
                num_batches=batches,
                device=device,
                profile=str(profile) if profile is not None else None,
                transport=transport,
                gradients=gradients,
                engine=engine,
                say=partial(echo, err=True),
            )
        except WorkerLostError as error:
            fail(f"the screen failed: {str(error).rstrip('.')}.", 1)
    figures = screen_figures(done)
    show_screen(done, figures)
    write_json(figures, json_file)
    _write_files(done, base, transport, out, plot, study)


def _write_files(
    done: Screen, base: dict[str, Any], transport: str, out: Path | None, plot: Path | None, study: Path | None
) -> None:
    from raysim.screening.outputs import draw_screen, write_records, write_screen_study

    if out is not None:
        write_records(done, out)
        echo(f"Records: {out}")
    if plot is not None:
        draw_screen(done, plot)
        echo(f"Plot: {plot}")
    if study is not None:
        echo(write_screen_study(done, base, study, transport))


# --- its table, and its figures for JSON --------------------------------------------------------------------------------------


def show_screen(done: Screen, figures: Mapping[str, Any]) -> None:
    """Print the statistics of the tensors, a row for each setting, and the conclusions."""
    out = console(width=160)
    for line in figures["findings"]:
        write_line(out, line)
    write_line(out, "")
    title = f"{done.config.name}: at once, on {plural(done.num_samples, 'test sample')}, without training"
    table = table_of([_row(done, each) for each in done.settings], title, text=["setting", "verdict"])
    table.columns[0].no_wrap = True
    table.caption = (
        "Differences from dense have a 95 % bound. Changed: predictions that differ from dense. Fidelity: of activations, / of their "
        "gradients, over all cuts. Gradient: of the stage with the largest error, against the noise of a step's dense gradient. Codec: "
        "of a microbatch, over all links."
    )
    out.print(table)
    kept = len(done.worth())
    tried = plural(len(done.settings) - 1, "setting")
    write_line(out, f"{kept} of {tried} worth training; screened in {format_seconds(done.seconds)}.")
    show_notes(out, done.notes)


def _row(done: Screen, each: Screened) -> dict[str, str]:
    from raysim.network.prices import times
    from raysim.screening.bench import CHANGED
    from raysim.screening.screen import words

    row = {"setting": words(each.setting).replace(" / ", "\n/ ")}
    judged, *others = done.plan.task.measures
    shown = (judged.name, *(measure.name for measure in others if measure.whole))  # the others are in the records
    for name in dict.fromkeys(("loss", *shown)):
        row[name] = _difference(done, each, name)
    if CHANGED in done.dense.result.measures:
        row[CHANGED] = _changed(each, each.result.measures.get(CHANGED))
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
        row[repr(network)] = f"{times(price.speedup)}x\n{format_seconds(price.step_s)}" if price else "-"
    row["verdict"] = each.verdict
    return row


def _of_gradient(each: Screened) -> dict[str, str]:
    """Return the cells of the stage whose gradient changes most."""
    worst = max(each.result.directions, key=lambda direction: direction.error, default=None)
    return {
        "gradient": "-" if worst is None else f"cos {worst.cosine:.3f}\nx{worst.norm_ratio:.2f}",
        "error, noise": "-" if worst is None else _beside(worst.error, worst.noise),
    }


def _changed(each: Screened, share: Difference | None) -> str:
    if share is None or not each.linked:
        return "-"
    return f"{two_digits(100 * share.value)} %"


def _difference(done: Screen, each: Screened, name: str) -> str:
    difference = each.result.measures.get(name)
    if difference is None:
        return "-"
    if not each.linked:
        return f"{difference.value:.4f}" if each is done.dense else "as dense"
    bound = "" if math.isnan(difference.bound) else f" +-{difference.bound:.2g}"
    return f"{difference.value:.4f}\n{difference.difference:+.2g}{bound}"


def _beside(error: float, noise: float) -> str:
    """Format an error against the noise of a step; an error below the noise does not matter."""
    if math.isnan(noise):
        return f"{error:.2f}"
    shown = apart(lambda value, more: f"{value:.{2 + more}f}", error, noise)
    return f" {'<' if error < noise else '>'} ".join(shown)


def _range(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:.4g}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f}..{high:.3f}"


def screen_figures(done: Screen) -> dict[str, Any]:
    """Return the content of `show_screen`, for JSON."""
    from raysim.screening.findings import findings

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
        **each.setting.methods(),
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
