"""Lists of recipes, studies, sites, and the keys and options of runs and studies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raysim.cli.exits import fail
from raysim.cli.options import JsonFile, write_json
from raysim.cli.terminal import echo
from raysim.units import plural

SECTIONS = ("run", "model", "data", "study")
Row = tuple[str, str, str]


def recipes(json_file: JsonFile = None) -> None:
    """List the recipes, each with a line about its model and data."""
    from importlib import resources

    from raysim.config import recipe_names

    files = resources.files("raysim.recipes")
    texts = {name: files.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in recipe_names()}
    _print_titles("recipes", texts, json_file)


def studies(json_file: JsonFile = None) -> None:
    """List the studies of this package, each with a line about its subject."""
    from raysim.sweeps.study_file import study_names, study_text

    _print_titles("studies", {name: study_text(name) for name in study_names()}, json_file)


def sites(
    network: Annotated[str, typer.Argument(metavar="FILE", help="A network's .toml file with sites.")],
    address: Annotated[
        str | None,
        typer.Option(envvar="RAY_ADDRESS", help="The address of a cluster, to list its nodes with their sites."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """List the sites of a network's file, with the option of `ray start` that puts a node on each.

    For example: raysim sites sites.toml
    """
    from raysim.engine.nodes import label_option, labels
    from raysim.network.presets import parse_network

    try:
        parsed = parse_network(network)
    except ValueError as error:
        fail(f"`FILE`: {error}", 2)
    if not parsed.sites:
        fail(f"`FILE` must be a network with sites, but got {network!r}, which has none.", 2)
    hosts = list(parsed.host_sites or ())
    width = max(map(len, parsed.sites))
    rows: list[dict[str, Any]] = [
        {"site": site, "hosts": hosts.count(site), "option": label_option(site)} for site in parsed.sites
    ]
    for row in rows:
        echo(f"{row['site']:<{width}}  {plural(row['hosts'], 'host')}  ray start ... {row['option']}")
    nodes = []
    if address is not None:
        from raysim.engine.connection import connected, node_address

        with connected("command", address, "`--address`"):
            nodes = [{"node": node_address(node), "site": site or None} for node, site in labels().items()]
    for node in nodes:
        note = "" if node["site"] in parsed.sites else ": not used by a run that is placed by this file"
        echo(f"node {node['node']}: {node['site'] or 'no label'}{note}")
    write_json({"sites": rows, "nodes": nodes}, json_file)


def _print_titles(kind: str, files: Mapping[str, str], json_file: Path | None) -> None:
    """Print the names of files, each with the comment in its first line."""
    titles = {name: text.splitlines()[0].lstrip("# ") for name, text in files.items()}
    for name, title in titles.items():
        echo(f"{name:<{max(map(len, files))}}  {title}")
    write_json({kind: [{"name": name, "about": title} for name, title in titles.items()]}, json_file)


def keys(
    section: Annotated[str, typer.Argument(help="run, model, data or study.")] = "run",
    name: Annotated[str | None, typer.Argument(help="A model or a data set, for its options.")] = None,
    json_file: JsonFile = None,
) -> None:
    """List every key of a run with its default and meaning, the keys of a study, or the options of a model or a data set.

    For example: raysim keys model resnet18
    """
    from raysim.notation import suggestion

    if section not in SECTIONS:
        near = suggestion(section, SECTIONS)
        fail(f"`SECTION` must be one of {', '.join(SECTIONS)}, but got {section!r}.{near}", 2)
    if section in ("run", "study"):
        if name is not None:
            fail(f"`NAME` belongs to `model` or `data`, but got {name!r} with {section}.", 2)
        from raysim.config import run_keys

        of_run = [(key.name, _written(key.default), key.meaning) for key in run_keys()]
        _print(of_run if section == "run" else _of_study(), json_file)
        return
    functions = _functions(section)
    if name is not None and name not in functions:
        near = suggestion(name, functions)
        fail(f"`NAME` must be one of {', '.join(sorted(functions))}, but got {name!r}.{near}", 2)
    rows: list[Row] = []
    for each, function in functions.items():
        if name in (None, each):
            about = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
            rows.append((f"{section}={each}", "", about.removeprefix("Return ")))
            rows += _options(section, function)
    _print(rows, json_file)


def _of_study() -> list[Row]:
    from raysim.sweeps.study_file import StudyKeys

    rows = []
    for name, field in StudyKeys.model_fields.items():
        default = "must be given" if field.is_required() else _written(field.default)
        rows.append((name, default, field.description or ""))
    return rows


def _functions(section: str) -> Mapping[str, Callable[..., Any]]:
    """Return the models or data sets, by name."""
    if section == "data":
        from raysim.workloads.data import DATASETS

        return DATASETS
    from raysim.workloads.models import MODELS

    return MODELS


def _options(section: str, function: Callable[..., Any]) -> Iterable[Row]:
    from raysim.workloads.options import options_of

    text = " ".join((inspect.getdoc(function) or "").split("\n\n>>>")[0].split())
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", text)
    for parameter in options_of(function):
        default = "must be given" if parameter.default is parameter.empty else _written(parameter.default)
        kind, name = str(parameter.annotation).removesuffix(" | None"), f"`{parameter.name}`"
        about = [sentence for sentence in sentences[1:] if name in sentence]
        about.sort(key=lambda sentence: not sentence.startswith(name))  # the option's own before others
        meaning = f": {about[0].removeprefix(f'{name}: ')}" if about else ""
        yield f"  {section}.{parameter.name}", default, f"{kind}{meaning}"


def _written(value: object) -> str:
    """Return a default as it is written; an empty text for None and for empty values."""
    return "" if value in (None, [], {}, ()) else str(value)


def _print(rows: Sequence[Row], json_file: Path | None) -> None:
    from rich.table import Table

    from raysim.console import PlainConsole

    table = Table("key", "default", "meaning", box=None)
    for row in rows:
        table.add_row(*row)
    PlainConsole(110).print(table)
    named = [dict(zip(("key", "default", "meaning"), map(str.strip, row), strict=True)) for row in rows]
    write_json({"keys": named}, json_file)
