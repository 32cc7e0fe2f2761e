"""Screen the compression that a model tolerates, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.cli.exits import ending_on_signals
from raysim.cli.options import JsonFile, Networks, Overrides, Recipe, check_transport, parse_networks, write_json

if TYPE_CHECKING:
    pass

Tried = Annotated[
    list[str] | None,
    typer.Option("--try", help="A further setting: 'forward=TopK(0.05) backward=Quantize(8)'; may be repeated."),
]


def screen(
    recipe: Recipe,
    overrides: Overrides = None,
    network: Networks = None,
    tried: Tried = None,
    only_tried: Annotated[bool, typer.Option("--only-tried", help="Leave out the default candidates.")] = False,
    batches: Annotated[int, typer.Option(help="Batches of the test data.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="Price steps on this GPU, by its datasheet (default: as measured here).")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Price steps by a file of `raysim profile`.")] = None,
    transport: Annotated[
        str, typer.Option(callback=check_transport, help="The transport of packets: ray, nccl or gloo.")
    ] = "ray",
    json_file: JsonFile = None,
) -> None:
    """Measure what compression does to a model at once, by its own weights and data: nothing is trained.

    For example: raysim screen hf model.path=FOLDER data=text data.path=FILE num_stages=4 --network 200mbps+30ms
    """
    networks = parse_networks(network) if network else []
    from raysim.config import read_config

    with ending_on_signals():
        config = read_config(recipe, overrides or [])
        from raysim.cli.screen_tables import screen_figures, show_screen
        from raysim.forecast.inputs import parse_setting
        from raysim.screening import screen as measure

        done = measure(
            config,
            networks,
            tried=[parse_setting(text) for text in tried or []],
            only_tried=only_tried,
            num_batches=batches,
            device=device,
            profile=str(profile) if profile is not None else None,
            transport=transport,
            say=lambda line: typer.echo(line, err=True),
        )
    show_screen(done)
    if json_file is not None:
        write_json(screen_figures(done), json_file)
