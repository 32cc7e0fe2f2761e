"""The network that a job needs, before any training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import fail
from raysim.cli.options import (
    CostsFile,
    Efficiency,
    JsonFile,
    Networks,
    Tried,
    Window,
    check_file,
    check_picture,
    check_transport,
    complete_recipe,
    parse_costs,
    parse_networks,
    write_json,
)
from raysim.cli.terminal import echo
from raysim.units import format_bandwidth, format_bytes, format_seconds, three_digits

if TYPE_CHECKING:
    from raysim.forecast.advise import Advice, Row
    from raysim.forecast.bandwidth import Needed


ModelSource = Annotated[
    str | None,
    typer.Argument(
        help="A recipe, or a transformers config.json or its folder; or give --layers, --width, --length and --vocabulary.",
        autocompletion=complete_recipe,
    ),
]
Sharding = Annotated[
    str | None, typer.Option(help="Parameters divided among replicas, as FSDP does: FSDP(8), HSDP by FSDP(4).")
]
StudyFile = Annotated[
    Path | None,
    typer.Option(callback=check_file, help="Write a study of the settings that would pay on the first network."),
]
PlotFile = Annotated[
    Path | None, typer.Option(callback=check_picture, help="Draw utilisation over bandwidth here, as PNG.")
]


def advise(
    devices: Annotated[
        str, typer.Option(help="Hosts and GPUs by their datasheets: 8xA100, or 14x8xH100 with 8 a host.")
    ],
    model: ModelSource = None,
    network: Networks = None,
    window: Window = None,
    layers: Annotated[int | None, typer.Option(help="Blocks of a transformer.")] = None,
    width: Annotated[int | None, typer.Option(help="Its width.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Its tokens.")] = None,
    stages: Annotated[int | None, typer.Option(help="Hosts of a pipeline (default: all).")] = None,
    replicas: Annotated[int | None, typer.Option(help="Pipelines (default: hosts / stages).")] = None,
    sharding: Sharding = None,
    schedule: Annotated[str, typer.Option(help="Order of forwards and backwards.")] = "1F1B",
    batch: Annotated[int | None, typer.Option(help="Samples of a step (default: 8 a host, or the recipe's).")] = None,
    microbatch: Annotated[
        int | None, typer.Option(help="Samples of a microbatch (default: 1, or the recipe's).")
    ] = None,
    local_steps: Annotated[str, typer.Option(help="Steps between two exchanges of DiLoCo.")] = "10,100,500",
    tried: Tried = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute forwards again, to save memory, as the recipe may.")
    ] = False,
    efficiency: Efficiency = 0.4,
    transport: Annotated[
        str, typer.Option(callback=check_transport, help="The transport of packets: nccl, gloo, ray or bare.")
    ] = "nccl",
    costs: CostsFile = None,
    study: StudyFile = None,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Say whether a network is enough for a job, and which compression would hide it: nothing is trained.

    For example: raysim advise --layers 32 --width 4096 --length 4096 --vocabulary 128000 --devices 8xA100 --network 1gbps
    """
    networks = parse_networks(network, window) if network or window else []
    if costs is not None and not networks:
        fail("`--costs` needs a network: add --network 1gbps.", 2)
    if study is not None and not networks:
        fail("`--study` needs a network to price settings on: add --network 1gbps.", 2)
    from raysim.forecast.advise import advise as ask
    from raysim.forecast.fleet import Fleet
    from raysim.forecast.inputs import find_model, make_job, parse_layout, parse_setting

    job = make_job(
        find_model(model, length, {"layers": layers, "width": width, "vocabulary": vocabulary}),
        Fleet.parse(devices),
        schedule=schedule,
        batch=batch,
        microbatch=microbatch,
        efficiency=efficiency,
        transport=transport,
        recompute=recompute,
    )
    advice = ask(
        job,
        networks,
        layout=parse_layout(job, stages, replicas, sharding),
        local_steps=_steps(local_steps),
        tried=[parse_setting(text) for text in tried or []],
        costs=parse_costs(costs),
    )
    figures = advice_figures(advice, model)
    show_advice(advice, figures)
    _write_files(advice, model, plot, study)
    write_json(figures, json_file)


def _write_files(advice: Advice, model: str | None, plot: Path | None, study: Path | None) -> None:
    if plot is not None:
        from raysim.forecast.answer import draw

        draw(advice, plot)
        echo(f"Plot: {plot}")
    if study is not None:
        from raysim.forecast.study import write_study

        echo(write_study(advice, model, study))


def _steps(text: str) -> list[int]:
    """Parse the numbers of `--local-steps`."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        fail(f"`--local-steps` must be numbers such as 10,100,500, but got {text!r}.", 2)
    return numbers


def show_advice(advice: Advice, figures: Mapping[str, Any]) -> None:
    """Print the `advice_figures`: answer, bandwidth for each utilisation, steps on each network, and assumptions."""
    from raysim.cli.terminal import console, show_notes, table_of, write_line
    from raysim.forecast.answer import percent
    from raysim.forecast.bandwidth import LEVELS

    out, ways = console(), ("layout", "setting")
    for sentence in figures["answer"]:
        write_line(out, sentence)
    if (command := figures["screen"]) is not None:
        write_line(
            out,
            f"Some settings are untried on a model like this. To try them on its weights, without training: {command}",
        )
    write_line(out, "")
    if advice.dense.needed:
        latency = advice.networks[0].latency_s if advice.networks else 0.0
        assert isinstance(latency, float)
        wait = f", latency {format_seconds(latency)}" if latency else ", without latency"
        rows = [
            names
            | {f"{level:.0%}": _bandwidth(needed) for level, needed in zip(LEVELS, row.needed, strict=True)}
            | {"memory": _memory(row), "known": str(row.known)}
            for row, names in _named(advice)
        ]
        out.print(table_of(rows, f"Bandwidth for a utilisation{wait}", fold=ways))
    for i, network in enumerate(advice.networks):
        rows = []
        for row, names in _named(advice):
            on = row.networks[i]
            cells = {
                "step": format_seconds(on.step_s),
                "samples/s": three_digits(on.samples_per_s),
                "utilisation": f"{percent(on.utilisation)} ({percent(on.low)} to {percent(on.high)})",
                "GPUs busy": percent(on.busy),
                "latency": percent(on.parts.latency / on.step_s),
                "mostly": f"{on.limit} {getattr(on.parts, on.limit) / on.step_s:.0%}",
            }
            rows.append(names | cells)
        out.print(table_of(rows, f"A step on {network!r}", fold=ways, no_wrap=True))
        if advice.costs is not None:
            rows = [
                names | advice.costs.cells(on.expected)
                for row, names in _named(advice)
                if (on := row.networks[i]).expected is not None
            ]
            out.print(table_of(rows, f"A step with churn and money on {network!r}", fold=ways))
    show_notes(out, figures["notes"])


def _named(advice: Advice) -> list[tuple[Row, dict[str, str]]]:
    """Return the rows with layout and setting names; a layout is named on its first row only."""
    layouts = ["", *(str(row.way.layout) for row in advice.rows)]
    return [
        (row, {"layout": "" if layout == last else layout, "setting": str(row.way)})
        for row, last, layout in zip(advice.rows, layouts, layouts[1:], strict=False)
    ]


def _bandwidth(level: Needed) -> str:
    return "none" if math.isinf(level.bps) else format_bandwidth(level.bps).replace("bit/s", "")


def _memory(row: Row) -> str:
    return f"{format_bytes(row.memory_bytes)}{'' if row.fits else ' too large'}"


def advice_figures(advice: Advice, source: str | None) -> dict[str, Any]:
    """Return the advice for JSON and `show_advice`; `source`: the model as it was named on the command line."""
    from raysim.forecast.answer import answer, assumptions
    from raysim.forecast.bandwidth import LEVELS
    from raysim.forecast.study import screen_command

    return {
        "answer": answer(advice),
        "screen": screen_command(advice, source),
        "model": advice.job.model.name,
        "parameters": advice.job.model.num_parameters,
        "devices": repr(advice.job.fleet),
        "batch": advice.job.batch,
        "rows": [
            {
                "workers": row.way.layout.workers,
                "replicas": row.way.layout.replicas,
                "sharding": None if row.way.layout.sharding is None else repr(row.way.layout.sharding),
                "setting": str(row.way),
                "memory_bytes": row.memory_bytes,
                "fits": row.fits,
                "known": row.known.verdict,
                "known_of": row.known.scope and row.known.scope._asdict(),
                "bandwidths": [
                    {"utilisation": level} | needed._asdict() for level, needed in zip(LEVELS, row.needed, strict=False)
                ],
                "networks": [
                    {name: value for name, value in vars(on).items() if name != "expected"}
                    | {"network": repr(on.network), "busy": on.busy, "parts": on.parts._asdict()}
                    | ({} if on.expected is None else {"expected": on.expected._asdict()})
                    for on in row.networks
                ],
            }
            for row in advice.rows
        ],
        "notes": assumptions(advice),
    }
