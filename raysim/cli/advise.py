"""The network that a job needs, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysim.cli.exits import fail
from raysim.cli.options import (
    JsonFile,
    Networks,
    check_file,
    check_transport,
    complete_recipe,
    parse_networks,
    write_json,
)


def _check_picture(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the file of a picture; fails if it isn't named as a PNG, or cannot be written."""
    if value is not None and value.suffix.lower() != ".png":
        fail(f"`{parameter.opts[0]}` must end in .png, but got {str(value)!r}.", 2)
    return check_file(parameter, value)


def advise(
    devices: Annotated[
        str, typer.Option(help="Hosts and GPUs by their datasheets: 8xA100, or 14x8xH100 with 8 a host.")
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, or a transformers config.json or its folder; or give --layers, --width, --length and --vocabulary.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    network: Networks = None,
    layers: Annotated[int | None, typer.Option(help="Blocks of a transformer.")] = None,
    width: Annotated[int | None, typer.Option(help="Its width.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Its tokens.")] = None,
    stages: Annotated[int | None, typer.Option(help="Hosts of a pipeline (default: all).")] = None,
    replicas: Annotated[int | None, typer.Option(help="Pipelines (default: hosts / stages).")] = None,
    sharding: Annotated[
        str | None, typer.Option(help="Parameters divided among replicas, as FSDP does: FSDP(8), HSDP by FSDP(4).")
    ] = None,
    schedule: Annotated[str, typer.Option(help="Order of forwards and backwards.")] = "1F1B",
    batch: Annotated[int | None, typer.Option(help="Samples of a step (default: 8 a host, or the recipe's).")] = None,
    microbatch: Annotated[
        int | None, typer.Option(help="Samples of a microbatch (default: 1, or the recipe's).")
    ] = None,
    local_steps: Annotated[str, typer.Option(help="Steps between two exchanges of DiLoCo.")] = "10,100,500",
    tried: Annotated[
        list[str] | None,
        typer.Option("--try", help="A further setting: 'forward=TopK(0.05) backward=Quantize(8)'; may be repeated."),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Compute forwards again, to save memory.")] = False,
    efficiency: Annotated[
        float, typer.Option(help="Share of the datasheet's 16-bit peak that training reaches.")
    ] = 0.4,
    transport: Annotated[
        str, typer.Option(callback=check_transport, help="The transport of packets: nccl, gloo, ray or bare.")
    ] = "nccl",
    study: Annotated[
        Path | None,
        typer.Option(callback=check_file, help="Write a study of the settings that would pay on the first network."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=_check_picture, help="Draw utilisation over bandwidth here, as PNG.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say whether a network is enough for a job, and which compression would hide it: nothing is trained.

    For example: raysim advise --layers 32 --width 4096 --length 4096 --vocabulary 128000 --devices 8xA100 --network 1gbps
    """
    networks = parse_networks(network) if network else []
    if study is not None and not networks:
        fail("`--study` needs a network, on which settings pay or not: add --network 1gbps.", 2)
    from raysim.advice.advise import advise as ask
    from raysim.advice.fleet import Fleet
    from raysim.advice.inputs import find_model, make_job, parse_layout, parse_setting
    from raysim.show.advice import advice_figures, show_advice

    shape = {"layers": layers, "width": width, "vocabulary": vocabulary}
    found = find_model(model, length, shape)
    job = make_job(
        found,
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
    )
    show_advice(advice)
    if plot is not None:
        from raysim.advice.plot import draw

        draw(advice, plot)
        typer.echo(f"Plot: {plot}")
    if study is not None:
        from raysim.advice.study import write_study

        typer.echo(write_study(advice, model, study))
    if json_file is not None:
        write_json(advice_figures(advice), json_file)


def _steps(text: str) -> list[int]:
    """Return the numbers of `--local-steps`."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        fail(f"`--local-steps` must be numbers such as 10,100,500, but got {text!r}.", 2)
    return numbers
