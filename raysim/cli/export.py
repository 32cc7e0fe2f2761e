"""Writing a run's model for other libraries."""

from __future__ import annotations

from typing import Annotated

import typer

from raysim.cli.shared import Trust, bad_input_in_one_sentence, fail


def export(
    run: Annotated[str, typer.Argument(help="Folder of a run with `model` = 'hf'.")],
    folder: Annotated[str, typer.Argument(help="Folder to write.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write LoRA's adapter alone, as peft does.")] = False,
    trust: Trust = None,
) -> None:
    """Write the model of a run as transformers' `save_pretrained` does.

    For example: raysim export results/run my-model
    """
    with bad_input_in_one_sentence():
        from raysim.pipeline.state import CheckpointError
        from raysim.records import RecordsError
        from raysim.training.export import save_pretrained

        try:
            save_pretrained(run, folder, adapter=adapter)
        except (CheckpointError, RecordsError) as error:
            fail(str(error), 2)
        typer.echo(f"{folder} holds the model: `transformers` loads it with `from_pretrained({folder!r})`.")
