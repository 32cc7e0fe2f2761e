"""Decide about compression: price it, screen it, and race what is left within a budget."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import ending_on_signals, fail
from raysim.cli.options import JsonFile, Overrides, Recipe, Tried, parse_networks, write_json
from raysim.cli.screen import ComputeDevice, ComputeProfile, Packets
from raysim.cli.sweep import Price, Resume, arguments, run_job, run_sweep

if TYPE_CHECKING:
    from raysim.network.topology import Network
    from raysim.sweeps.decide import DecisionState
    from raysim.training.events import Interruption

TOKENIZER = "tokenizer.json"


def decide(
    recipe: Recipe,
    overrides: Overrides = None,
    network: Annotated[str, typer.Option(help="The network: a preset, text such as 200mbps+30ms, or a file.")] = ...,  # type: ignore[assignment]
    budget: Annotated[str, typer.Option(help="What it may take: 90min, 3h, '2 GPU hours', or money, '40 EUR'.")] = "1h",
    data: Annotated[
        Path | None, typer.Option(help="A text to train on; other data by keys, such as data=images.")
    ] = None,
    tried: Tried = None,
    device: ComputeDevice = None,
    profile: ComputeProfile = None,
    transport: Packets = "ray",
    price_per_hour: Price = None,
    out: Annotated[
        str | None,
        typer.Option(help="A folder for all of it, or a bucket's URI (default: results/<name>-decision/<time>)."),
    ] = None,
    resume: Resume = False,
    address: Annotated[str | None, typer.Option(help="A running cluster for the race, host:port or auto.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Decide as a job of this cluster, the file of `ray up`; needs --out."),
    ] = None,
    files: Annotated[Path | None, typer.Option(help="With --cluster: a folder to send along.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Decide which compression to use on a network: price it, screen it on the model's weights, race what is left.

    Ends as soon as the answer is known. For example: raysim decide digits-cnn --network 200mbps+30ms --budget 10min
    """
    (wire,) = parse_networks([network])
    given: dict[str, Any] = {"network": network, "budget": budget, "data": data, "device": device, "profile": profile}
    given |= {"transport": transport, "price_per_hour": price_per_hour}
    tries = [word for text in tried or [] for word in ("--try", text)]
    if cluster is not None:
        _submit([recipe, *(overrides or []), *tries], given, cluster, out, files, resume=resume)
        return
    if files is not None:
        fail("`--files` sends a folder to a cluster: add --cluster FILE.", 2)
    if device is not None and profile is not None:
        fail("`--device` and `--profile` both say how fast compute is: give one of them.", 2)
    if resume and out is None:
        fail("`--resume` needs `--out`, the folder of the decision to go on with.", 2)
    from raysim.sweeps.budget import Budget

    allowed = Budget.parse(budget, price_per_hour)
    changes = [*_data_keys(recipe, data), *(overrides or [])]
    from raysim.config import make_config, read_values

    base = read_values(recipe, changes)
    name = make_config(base).name
    out = out or f"results/{name}-decision/{datetime.now(UTC):%Y%m%d-%H%M%S}"
    words = arguments("decide", recipe, [*(overrides or []), *tries], **given, address=address, out=out, resume=True)
    again = shlex.join(["raysim", *words])
    with ending_on_signals() as ending, ExitStack() as stack:
        from raysim.forecast.inputs import parse_setting
        from raysim.sweeps.decide import DecisionState, Question

        settings = tuple(parse_setting(text, trained=True) for text in tried or [])
        question = Question(base, wire, transport, device, str(profile.absolute()) if profile else None, settings)
        decision = DecisionState.begin(question, out, resume=resume)
        stack.enter_context(decision.locked())
        try:
            _prepare(decision, wire)
        except KeyboardInterrupt:
            fail(f"interrupted. To go on: {again}", ending.exit_code)
        if decision.left and not decision.settled:
            _race(decision, allowed, again, ending, address=address)
        from raysim.cli.decide_tables import show_decision

        show_decision(decision)
    if json_file is not None:
        write_json(decision.as_mapping(), json_file)


def _prepare(decision: DecisionState, network: Network) -> None:
    """Price and screen what an earlier session has not; show what is left."""
    from raysim.cli.decide_tables import show_candidates, show_step
    from raysim.sweeps.decision import stay_priced, stay_screened

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if not decision.ended:
        decision.price(say)
    show_step(decision)
    if not decision.left and decision.ended == "priced":
        decision.end(stay_priced(decision))
    if decision.left and decision.ended == "priced":
        say(f"2 of 3: {len(decision.left)} settings may gain 5 % on {network!r}; the model's own weights screen them.")
        decision.screen(say)
    if decision.ended == "screened":
        show_candidates(decision)
        if not decision.left:
            decision.end(stay_screened(decision))


def _race(decision: DecisionState, budget: Any, again: str, ending: Interruption, *, address: str | None) -> None:
    """Race the candidates left, and conclude."""
    from raysim.engine.connection import listen_on_loopback
    from raysim.plugins import trusting
    from raysim.sweeps.decide import RACE
    from raysim.training.start import check_least_memory

    study = decision.study(budget)
    typer.echo(
        f"3 of 3: {len(decision.left)} settings race beside dense within {study.budget.text if study.budget else budget.text}.",
        err=True,
    )
    listen_on_loopback(address)
    if not (address or os.environ.get("RAY_ADDRESS")):
        check_least_memory("ray")
    with trusting(*study.modules):
        from raysim.sweeps.decision import conclude
        from raysim.sweeps.runner import Sweep

        race = f"{decision.store.out.rstrip('/')}/{RACE}"
        sweep = Sweep(study, out=race, resume=decision.raced, address=address)
        run_sweep(sweep, again, ending, show=lambda ended: None)
        conclude(decision, sweep)


def _data_keys(recipe: str, data: Path | None) -> list[str]:
    """Return the keys of `--data`: a text, by the tokenizer of a folder's model if it has one."""
    if data is None:
        return []
    if not data.is_file():
        fail(
            f"`--data` must be a text file, but got {str(data)!r}; other data by keys, such as data=images data.path=FOLDER.",
            2,
        )
    folder = Path(recipe).expanduser()
    tokens = [f"data.tokenizer={folder.absolute()}"] if (folder / TOKENIZER).is_file() else []
    return ["data=text", f"data.path={data.absolute()}", *tokens]


def _submit(
    words: list[str], given: dict[str, Any], cluster: str, out: str | None, files: Path | None, *, resume: bool
) -> None:
    """Run the same command as a job of a cluster."""
    from raysim.sweeps.submit import Cluster

    if out is None:
        fail("`--cluster` needs `--out`, a bucket's URI or an absolute path that every node sees.", 2)
    sent = arguments("decide", words[0], words[1:], **given, out=out, address="auto", resume=resume)
    run_job(sent, Cluster.named(cluster, None), out, files=files)
