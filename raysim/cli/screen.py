"""Screen the compression that a model tolerates, without training."""

from __future__ import annotations

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
    parse_networks,
    write_json,
)

if TYPE_CHECKING:
    from raysim.screening.screen import Screen

ComputeDevice = Annotated[
    str | None, typer.Option(help="Price compute of this GPU, by its datasheet (default: as measured here).")
]
ComputeProfile = Annotated[Path | None, typer.Option(help="Price compute of this file of `raysim profile`.")]
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
        fail("`--no-gradients` times no backward: leave out `--network`, or add `--device` or `--profile`.", 2)
    if only_tried and not tried:
        fail("`--only-tried` leaves out the default settings, so it needs a setting of `--try`.", 2)
    from raysim.config import make_config, read_values

    with ending_on_signals():
        base = read_values(recipe, overrides or [])
        config = make_config(base)
        from raysim.forecast.inputs import parse_setting
        from raysim.screening import screen as measure
        from raysim.screening.outputs import check_folder

        if out is not None:
            check_folder(out)
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
            say=lambda line: typer.echo(line, err=True),
        )
    from raysim.cli.screen_tables import show_screen

    show_screen(done)
    _write_files(done, base, transport, out=out, study=study, plot=plot, json_file=json_file)


def _write_files(
    done: Screen,
    base: dict[str, Any],
    transport: str,
    *,
    out: Path | None,
    study: Path | None,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    from raysim.screening.outputs import draw_screen, write_records, write_screen_study

    if out is not None:
        write_records(done, out)
        typer.echo(f"Records: {out}")
    if plot is not None:
        draw_screen(done, plot)
        typer.echo(f"Plot: {plot}")
    if json_file is not None:
        from raysim.cli.screen_tables import screen_figures

        write_json(screen_figures(done), json_file)
    if study is not None:
        typer.echo(write_screen_study(done, base, study, transport))
