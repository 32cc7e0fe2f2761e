"""Parts that commands share: options of the same name, and the refusal of bad input in one sentence."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from raysim.files import os_sentence
from raysim.notation import printable

if TYPE_CHECKING:
    from raysim.network.topology import Network
    from raysim.training.ending import Ending


def _complete_recipe(typed: str) -> list[str]:
    from raysim.config import recipe_names

    return [name for name in recipe_names() if name.startswith(typed)]


Recipe = Annotated[
    str,
    typer.Argument(help="A recipe's name (see `raysim recipes`), or a .toml file.", autocompletion=_complete_recipe),
]


LONGEST = 4000  # characters of a sentence


Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        help="A preset (free, 100mbps, 10gbps, worldwide, ...), text such as 100mbps+20ms, or a file; may be repeated. "
        "A .csv file has a line for each link, with columns source, target, bandwidth_bps and latency_s; a .toml file has "
        "sites with hosts and the links between them, or keys such as bandwidth_bps and latency_s, each one number or a matrix.",
    ),
]


TraceFile = Annotated[
    Path | None,
    typer.Option(help="Write a step on the first network here, for chrome://tracing or ui.perfetto.dev."),
]


Transports = Annotated[
    str,
    typer.Option(
        "--transport", help="The transport of packets: ray, nccl or gloo, or bare, which costs nothing but wires."
    ),
]


def _trust(context: typer.Context, modules: list[str] | None) -> None:
    """Import trusted modules alone until the command, which reads records, has ended."""
    from raysim.plugins import from_record, trusting

    context.with_resource(from_record())
    try:
        context.with_resource(trusting(*(modules or [])))
    except ValueError as error:
        fail(f"`--trust`: {error}", 2)


Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        callback=_trust,
        expose_value=False,
        help="A module that the records may name, and that is then imported: your own, never a stranger's; may be repeated.",
    ),
]


StudyTransport = Annotated[
    str | None,
    typer.Option(
        "--transport",
        help="The transport of packets in prices: ray, nccl or gloo (default: a study's own, as in step_s@1gbps/nccl; else ray).",
    ),
]


JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]


@contextmanager
def bad_input_in_one_sentence() -> Iterator[None]:
    """Turn a ConfigError into one sentence on the error stream and exit code 2."""
    from raysim.config import ConfigError

    try:
        yield
    except ConfigError as error:
        fail(str(error), 2)


def fail(sentence: str, code: int) -> NoReturn:
    """Print an error on the error stream and exit."""
    from rich.console import Console

    sentence = printable(sentence)
    text = sentence if len(sentence) <= LONGEST else f"{sentence[: LONGEST // 2]} ... {sentence[-LONGEST // 2 :]}"
    with suppress(OSError):  # the error stream may lead nowhere
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"raysim: {text}", markup=False)
    raise typer.Exit(code)


def leave(loss: str, again: str, ending: Ending) -> NoReturn:
    """End the process with one sentence on a loss of Ray's servers, from any thread: the main one waits in Ray."""
    from raysim.engine.watch import end_process

    ending.notice()
    end_process(
        f"raysim: {'interrupted' if ending.wanted else loss}. {again}", ending.exit_code if ending.wanted else 1
    )


class Commands(TyperGroup):
    """Commands that report errors of the system in one sentence: a full disk, a folder that has gone, too little memory."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; its output is written out before it counts as done."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except MemoryError as error:
            fail(f"this machine has too little memory: {str(error) or 'none is left'}.", 1)
        except BrokenPipeError:  # the reader has enough
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC and not error.filename:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the rest of the buffer is written again at exit
            fail(os_sentence(error), 2 if error.errno == errno.ENAMETOOLONG else 1)


def parse_networks(texts: list[str] | None) -> list[Network]:
    """Return the networks that `--network` names, at least one."""
    if not texts:
        fail("`--network` must be given once or more, as in --network 100mbps.", 2)
    from raysim.network.presets import parse_network

    try:
        return [parse_network(text) for text in texts]
    except ValueError as error:
        fail(f"`--network`: {error}", 2)


def check_transport(name: str | None) -> None:
    """Fail if `--transport` names none."""
    from raysim.network.transport import parse_transport

    try:
        parse_transport(name or "ray")
    except ValueError as error:
        fail(f"`--transport`: {error}", 2)


def parse_range(text: str) -> list[Network]:
    """Return the networks of `--bandwidths`."""
    from raysim.network.presets import parse_bandwidths

    try:
        return parse_bandwidths(text)
    except ValueError as error:
        fail(f"`--bandwidths`: {error}", 2)


def check_writable(option: str, file: Path | None) -> None:
    """Fail where a file cannot be written, before anything starts; leaves nothing behind."""
    if file is None:
        return
    try:
        if file.exists():
            file.open("a").close()
        else:  # a file in its place might be another process's by the time it is removed
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        fail(f"`{option}` must be a file that can be written, but got {str(file)!r}: {error.strerror}.", 2)


def check_runs(folder: str, lacking: str) -> None:
    """Fail where a folder of this machine holds no run, before pandas is imported: by the sentence of analysis."""
    from raysim.analysis.data.folders import find
    from raysim.places import in_bucket, local_path
    from raysim.records.packs import open_folder

    if in_bucket(folder):
        return
    here = open_folder(folder)
    if not here.is_dir():
        fail(
            f"{folder} is a file, not a folder." if local_path(folder).exists() else f"There is no folder {folder}.", 2
        )
    found = find([here])
    if not found.runs:
        fail(" ".join([*found.problems, f"There is no run in {folder}: {lacking}."]), 2)


def write_json(figures: dict[str, Any], file: Path) -> None:
    """Write the file of `--json` and say where."""
    file.write_text(json.dumps(figures, indent=1, allow_nan=False), encoding="utf-8")
    typer.echo(f"Figures: {file}")


def write_trace_file(events: Iterator[dict[str, Any]], file: Path, what: str) -> None:
    """Write the file of `--trace` and say where."""
    from raysim.network.trace import write_trace

    typer.echo(f"Trace of {what}: {file}, {write_trace(events, file):,} events")


@contextmanager
def ending_on_signals() -> Iterator[Ending]:
    """Yield an Ending that the process's signals set; before a run has begun, a signal ends the command with one sentence."""
    from raysim.training.ending import Ending

    ending = Ending()
    with ending.on_signals():
        try:
            yield ending
        except KeyboardInterrupt:
            fail("interrupted before anything began.", ending.exit_code)


def end_on_sigterm() -> None:
    """Let SIGTERM end the command as Ctrl-C does, so that it cleans up."""
    signal.signal(signal.SIGTERM, _interrupt)


@contextmanager
def on_made_hosts() -> Iterator[None]:
    """Let a command that makes hosts on this machine remove them at SIGTERM, and end in one sentence where it fails."""
    with bad_input_in_one_sentence():
        from raysim.validate.runs import FailedError

        end_on_sigterm()
        try:
            yield
        except FailedError as error:
            fail(str(error), 1)


def _interrupt(number: int, _frame: object) -> NoReturn:
    signal.signal(
        number, signal.SIG_IGN
    )  # `timeout` sends it twice, and the second one must not break off the clean-up
    raise KeyboardInterrupt
