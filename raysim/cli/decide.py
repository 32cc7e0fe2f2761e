"""Decide about compression: price it, screen it, and race the remaining settings within a budget."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import ending_on_signals, fail
from raysim.cli.options import (
    CostsFile,
    JsonFile,
    Overrides,
    Recipe,
    Tried,
    check_uncompressed,
    parse_costs,
    parse_networks,
    write_json,
)
from raysim.cli.screen import ComputeDevice, ComputeProfile, Packets
from raysim.cli.sweep import Price, Resume, arguments, run_job, run_sweep
from raysim.cli.terminal import console, echo, table_of, write_line
from raysim.units import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raysim.network.costs import FleetCosts
    from raysim.network.topology import Network
    from raysim.sweeps.contenders import Candidate
    from raysim.sweeps.decide import DecisionState
    from raysim.training.events import Interruption

TOKENIZER = "tokenizer.json"
WORDS = ["links", "replicas", "tied", "outcome"]
"""Columns of words in the tables of settings."""


def decide(
    recipe: Recipe,
    overrides: Overrides = None,
    network: Annotated[str, typer.Option(help="The network: a preset, text such as 200mbps+30ms, or a file.")] = ...,  # type: ignore[assignment]
    budget: Annotated[str, typer.Option(help="What it may take: 90min, 3h, '2 GPU hours', or money, '40 EUR'.")] = "1h",
    data: Annotated[
        Path | None, typer.Option(help="A text to train on; give other data as keys, such as data=images.")
    ] = None,
    tried: Tried = None,
    device: ComputeDevice = None,
    profile: ComputeProfile = None,
    transport: Packets = "ray",
    price_per_hour: Price = None,
    costs: CostsFile = None,
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
    if data is not None:
        _check_data_keys(overrides or [])
    (wire,), fleet = parse_networks([network]), parse_costs(costs)
    given: dict[str, Any] = {"network": network, "budget": budget, "data": data, "device": device, "profile": profile}
    given |= {"transport": transport, "price_per_hour": price_per_hour, "costs": costs}
    tries = [word for text in tried or [] for word in ("--try", text)]
    if cluster is not None:
        for option, value in {"--address": address, "--json": json_file}.items():
            if value is not None:
                fail(f"`{option}` has no effect with `--cluster`, which sends the command there. Leave it out.", 2)
        _submit([recipe, *(overrides or []), *tries], given, cluster, out, files, resume=resume)
        return
    if files is not None:
        fail("`--files` sends a folder to a cluster: add --cluster FILE.", 2)
    if device is not None and profile is not None:
        fail("`--device` and `--profile` both say how fast compute is: give one of them.", 2)
    if resume and out is None:
        fail("`--resume` needs `--out`, the folder of the decision to continue.", 2)
    from raysim.sweeps.budget import Budget

    allowed = Budget.parse(budget, price_per_hour)
    changes = [*_data_keys(recipe, data), *(overrides or [])]
    from raysim.config import make_config, read_values

    base = read_values(recipe, changes)
    check_uncompressed(base)
    name = make_config(base).name
    out = out or f"results/{name}-decision/{datetime.now(UTC):%Y%m%d-%H%M%S}"
    words = arguments("decide", recipe, [*(overrides or []), *tries], **given, address=address, out=out, resume=True)
    again = shlex.join(["raysim", *words])
    with ending_on_signals() as ending, ExitStack() as stack:
        from raysim.forecast.inputs import parse_setting
        from raysim.sweeps.decide import DecisionState, Question

        settings = tuple(parse_setting(text, trained=True) for text in tried or [])
        measured = str(profile.absolute()) if profile else None
        question = Question(base, wire, transport, device, measured, settings, fleet)
        decision = DecisionState.begin(question, out, resume=resume)
        stack.enter_context(decision.locked())
        try:
            _prepare(decision, wire)
        except KeyboardInterrupt:
            fail(f"interrupted. To continue: {again}", ending.exit_code)
        if decision.left and not decision.settled:
            _race(decision, allowed, again, ending, address=address)
        show_decision(decision)
    write_json(decision.as_mapping(), json_file)


def _prepare(decision: DecisionState, network: Network) -> None:
    """Do the pricing and screening left by earlier sessions; show the remaining candidates."""
    from raysim.sweeps.conclusion import stay_priced, stay_screened

    say = partial(echo, err=True)
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
    """Race the remaining candidates, and conclude."""
    from raysim.engine.connection import listen_on_loopback
    from raysim.limits import release_memory
    from raysim.plugins import trusting
    from raysim.sweeps.decide import RACE
    from raysim.training.start import check_least_memory

    study = decision.study(budget)
    echo(
        f"3 of 3: {len(decision.left)} settings race against dense within {study.budget.text if study.budget else budget.text}.",
        err=True,
    )
    release_memory()  # the trials need what the screen has used
    listen_on_loopback(address)
    if not (address or os.environ.get("RAY_ADDRESS")):
        check_least_memory("ray")
    with trusting(*study.modules):
        from raysim.sweeps.conclusion import conclude
        from raysim.sweeps.runner import Sweep

        race = f"{decision.store.out.rstrip('/')}/{RACE}"
        sweep = Sweep(study, out=race, resume=decision.raced, address=address)
        run_sweep(sweep, again, ending, show=lambda ended: None)
        conclude(decision, sweep)


def _check_data_keys(overrides: Sequence[str]) -> None:
    """Fail if overrides would replace the text of `--data`."""
    for override in overrides:
        if override.partition("=")[0].strip() in ("data", "data.name", "data.path"):
            fail(f"`--data` and {override} both name the data: give one of them.", 2)


def _data_keys(recipe: str, data: Path | None) -> list[str]:
    """Return the keys of `--data`: a text, by the tokenizer of a folder's model if it has one."""
    if data is None:
        return []
    if not data.is_file():
        fail(
            f"`--data` must be a text file, but got {str(data)!r}; give other data as keys, such as data=images data.path=FOLDER.",
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


# --- the parts of a decision in the terminal ----------------------------------------------------------------------------------


def show_step(decision: DecisionState) -> None:
    """Print dense's step by cause; if nothing can gain enough, the other ways to run the training."""
    from raysim.sweeps.conclusion import step_causes, way_words

    out = console()
    assert decision.parts is not None
    write_line(out, step_causes(decision.parts, decision.dense_s, decision.question.network))
    if decision.question.costs is not None and decision.money:
        write_line(out, f"{decision.money} ({decision.question.costs.words()}.)")
    if decision.ways:
        write_line(
            out, "Other ways to run it, without compression; larger batches and local steps change the training:"
        )
    for way in decision.ways:
        write_line(out, f"- {way_words(way)}")


def show_candidates(decision: DecisionState) -> None:
    """Print the screen's findings, and a row for each setting with the reason why it was dropped."""
    out = console(width=160)
    for line in decision.findings:
        write_line(out, line)
    rows = sorted(decision.candidates, key=lambda each: (not each.open, -(each.speedup or 0.0)))
    left = plural(len(decision.left), "setting")
    title = f"{left} of {len(rows)} left before training, on {decision.question.network!r}"
    table = _compact([_row(each, decision.question.costs) for each in rows])
    out.print(table_of(table, title, text=WORDS, fold=WORDS))


def show_decision(decision: DecisionState) -> None:
    """Print the decision, the lines for the user's training, and the paths of all files."""
    out = console(width=160)
    if decision.ended == "raced":
        rows = sorted(decision.candidates, key=lambda each: (not each.harm, -(each.speedup or 0.0)))
        title = "What became of each setting"
        table = _compact([_raced(each, decision.question.costs) for each in rows])
        out.print(table_of(table, title, text=WORDS, fold=[*WORDS, "harm"]))
    if decision.code:
        write_line(out, decision.code)
    for sentence in decision.sentences[1:]:
        write_line(out, sentence)
    write_line(out, f"All of it: {decision.store.out}")
    write_line(out, f"Decision: {decision.sentences[0]}")


def _row(candidate: Candidate, costs: FleetCosts | None) -> dict[str, str]:
    from raysim.config.identity import IDENTITY
    from raysim.network.prices import times

    setting, expected = candidate.setting, candidate.expected
    cells = {} if costs is None or expected is None else costs.cells(expected)
    return {
        "links": "" if setting.forward == setting.backward == IDENTITY else f"{setting.forward} / {setting.backward}",
        "replicas": "" if setting.replica_gradient == IDENTITY else setting.replica_gradient,
        "tied": "" if setting.tied_gradient == IDENTITY else setting.tied_gradient,
        "speed-up": "" if candidate.speedup is None else f"{times(candidate.speedup)}x",
        **{name: cells.get(name, "") for name in ("expected step", "1,000 steps")},
        "loss at once": "" if candidate.difference is None else f"{candidate.difference:+.2g}",
        "outcome": "to be trained" if candidate.open else f"{candidate.outcome}: {candidate.reason}",
    }


def _raced(candidate: Candidate, costs: FleetCosts | None) -> dict[str, str]:
    row = _row(candidate, costs)
    outcome, speedup = row.pop("outcome"), candidate.faster or row["speed-up"]
    return row | {"speed-up": speedup, "harm": candidate.harm, "outcome": candidate.verdict or outcome}


def _compact(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return rows without the columns that are empty in all of them, and with a dash for other empty cells."""
    used = [name for name in rows[0] if any(row[name] for row in rows)]
    return [{name: row[name] or "-" for name in used} for row in rows]
