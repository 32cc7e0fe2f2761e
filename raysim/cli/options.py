"""Options shared by several commands, their checks, and their output files."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from raysim.cli.exits import fail
from raysim.cli.terminal import echo
from raysim.storage.files import is_stream, output_file

if TYPE_CHECKING:
    from raysim.network.costs import FleetCosts
    from raysim.network.topology import Network


STDOUT = Path("-")


class _Muted(io.StringIO):
    """An output that prints nothing, in place of another."""

    def __init__(self, replaced: TextIO) -> None:
        super().__init__()
        self.replaced = replaced

    def write(self, text: str) -> int:
        return len(text)


def complete_recipe(typed: str) -> list[str]:
    """Return the names of recipes with this prefix."""
    from raysim.config import recipe_names

    return [name for name in recipe_names() if name.startswith(typed)]


def check_transport(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Return the text of a transport, or of averaging over it, unchanged; fails if it cannot be parsed."""
    from raysim.network.transport import parse_averaging, parse_transport

    parse = parse_averaging if parameter.name == "averaging" else parse_transport
    try:
        if value is not None:
            parse(value)
    except ValueError as error:
        fail(str(error).replace(f"`{parameter.name}`", f"`{parameter.opts[0]}`"), 2)
    return value


def check_file(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the file of an option; fails if it cannot be written."""
    check_writable(parameter.opts[0], value)
    return value


def _json_target(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the file of `--json`; with `-`, JSON is all that the command prints on its output."""
    if value != STDOUT:
        return check_file(parameter, value)
    context.find_root().with_resource(redirect_stdout(_Muted(sys.stdout)))
    return value


def check_picture(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return the file of a picture; fails if it is not named .png, or cannot be written."""
    if value is not None and value.suffix.lower() != ".png":
        fail(f"`{parameter.opts[0]}` must end in .png, but got {str(value)!r}.", 2)
    return check_file(parameter, value)


def _trust(context: typer.Context, modules: list[str] | None) -> None:
    """Let a command that reads records import only trusted modules until it ends."""
    from raysim.plugins import from_record, trusting

    root = context.find_root()  # closed even if another option is refused
    root.with_resource(from_record())
    try:
        root.with_resource(trusting(*(modules or [])))
    except ValueError as error:
        fail(f"`--trust`: {error}", 2)


Recipe = Annotated[
    str,
    typer.Argument(
        help="A recipe's name (see `raysim recipes`), a .toml file, or a folder with a model of transformers.",
        autocompletion=complete_recipe,
    ),
]

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")]

Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        help="A preset (free, 100mbps, 10gbps, worldwide, ...), text such as 100mbps+20ms, or a file; may be repeated. "
        "A .csv file has a line for each link, with columns source, target, bandwidth_bps and latency_s; a .toml file has "
        "sites with hosts and the links between them, or keys such as bandwidth_bps and latency_s, each one number or a matrix.",
    ),
]

Window = Annotated[
    str | None,
    typer.Option(
        "--window",
        help="TCP's window on every network, such as 4MiB, or 2x4MiB of two streams: a connection sends at most a window a round trip.",
    ),
]

Efficiency = Annotated[float, typer.Option(help="Share of the datasheet's 16-bit peak that training reaches.")]

Transport = Annotated[
    str,
    typer.Option(
        "--transport",
        callback=check_transport,
        help="The transport of packets: ray, nccl or gloo, or bare, which costs nothing but wires.",
    ),
]

Averaging = Annotated[
    str | None,
    typer.Option(
        "--averaging",
        callback=check_transport,
        help="How replicas average gradients: direct, ring, tree, sites (hierarchical), server (central) or chain, and with "
        "/25MiB in buckets of that size during the last backward, as DDP does (default: ring/25MiB with nccl and gloo, else direct).",
    ),
]

StudyTransport = Annotated[
    str | None,
    typer.Option(
        "--transport",
        callback=check_transport,
        help="The transport of packets in prices: ray, nccl or gloo (default: a study's own, as in step_s@1gbps/nccl; else ray).",
    ),
]

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

Tried = Annotated[
    list[str] | None,
    typer.Option("--try", help="A further setting: 'forward=TopK(0.05) backward=Quantize(8)'; may be repeated."),
]

Compute = Annotated[
    str, typer.Option(help="Seconds of compute that are pooled: cpu, wall, or auto (cpu on CPUs, wall on GPUs).")
]

StudyCompute = Annotated[
    str | None,
    typer.Option("--compute", help="Seconds of compute that are pooled: cpu, wall or auto (default: a study's own)."),
]

ComputeProfile = Annotated[
    Path | None, typer.Option(help="A file written by `raysim profile` whose compute takes the place of the recorded.")
]

Dashboard = Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard, on loopback.")]

CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        help="A .toml file of your own costs: gpu_hour and egress_gb in money; departure_hours, restart_s, checkpoint_s, step_times.",
    ),
]

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", callback=_json_target, help="Write the figures here; alone or with -, print them, and nothing else."
    ),
]

TraceFile = Annotated[
    Path | None,
    typer.Option(
        callback=check_file, help="Write a step on the first network here, for chrome://tracing or ui.perfetto.dev."
    ),
]


def check_writable(option: str, file: Path | None) -> None:
    """Fail if a file cannot be written, before anything starts; leaves nothing behind."""
    if file is None:
        return
    try:
        if is_stream(file):
            os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        elif file.is_symlink():
            fail(f"`{option}` must not be a link, which could lead to another file, but got {str(file)!r}.", 2)
        elif file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
            raise OSError(0, "it is a folder" if file.is_dir() else "it is write-protected")
        else:  # a file at that path might be another process's by the time it is removed
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        fail(f"`{option}` must be a file that can be written, but got {str(file)!r}: {error.strerror}.", 2)


def check_runs(folder: str, lacking: str) -> None:
    """Fail like analysis if a local folder holds no run, but before pandas is imported."""
    from raysim.analysis.data.folders import find_runs
    from raysim.records.packs import open_folder
    from raysim.storage.places import in_bucket, local_path

    if in_bucket(folder):
        return
    root = open_folder(folder)
    if not root.is_dir():
        fail(
            f"{folder} is a file, not a folder." if local_path(folder).exists() else f"There is no folder {folder}.", 2
        )
    contents = find_runs([root])
    if not contents.runs:
        fail(" ".join([*contents.problems, f"There is no run in {folder}: {lacking}."]), 2)


def check_uncompressed(values: Mapping[str, Any]) -> None:
    """Fail if the values of a run compress it, where the command itself chooses the compression."""
    from raysim.config.identity import DENSE, METHOD_KEYS

    for key, default in DENSE._asdict().items():
        if key != "weights" and (value := values.get(key, default)) != default:
            instead = f"give --try '{key}={value}', or " if key in METHOD_KEYS and isinstance(value, str) else ""
            fail(f"`{key}` has no effect, as settings are tried in its place: {instead}leave it out.", 2)


def check_averaging(averaging: str | None, replicas: int) -> None:
    """Fail if `--averaging` is given for a single replica, which averages nothing."""
    if averaging is not None and replicas == 1:
        fail("`--averaging` is for replicas, but the run has one. Leave it out.", 2)


def parse_networks(texts: list[str] | None, window: str | None = None) -> list[Network]:
    """Return the networks of `--network`, at least one, with the windows of `--window`."""
    if not texts:
        fail("`--network` must be given once or more, as in --network 100mbps.", 2)
    from raysim.network.notation import read_window
    from raysim.network.presets import parse_network

    if window is not None and read_window(window) is None:
        fail(f"`--window` must be bytes, such as 4MiB, or 2x4MiB for two streams, but got {window!r}.", 2)
    try:
        return [parse_network(f"{text}/{window}" if window else text) for text in texts]
    except ValueError as error:
        fail(f"`--network`: {error}", 2)


def parse_costs(file: Path | None) -> FleetCosts | None:
    """Return the costs of `--costs`."""
    from raysim.network.costs import load_costs

    return None if file is None else load_costs(file)


def write_json(figures: Mapping[str, Any], file: Path | None) -> None:
    """Write JSON to the file of `--json`, if there is one, or print it; missing and infinite figures are null."""
    if file is None:
        return
    text = json.dumps(_finite(figures), indent=1, allow_nan=False)
    if file == STDOUT:
        assert isinstance(sys.stdout, _Muted)
        print(text, file=sys.stdout.replaced, flush=True)
        return
    with output_file(file) as stream:
        stream.write(text.encode())
    echo(f"Figures: {file}")


def _finite(value: Any) -> Any:
    """Return figures as Python's own values; None if they are missing or infinite."""
    from raysim.config.identity import plain

    if not isinstance(value, (Mapping, list, tuple)):
        value = plain(value)
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def write_trace_file(events: Iterator[dict[str, Any]], file: Path, step: str) -> None:
    """Write the trace to the file of `--trace`, and print its path."""
    from raysim.network.timeline_views import write_trace

    echo(f"Trace of {step}: {file}, {write_trace(events, file):,} events")
