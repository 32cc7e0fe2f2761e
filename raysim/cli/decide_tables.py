"""The parts of a decision in the terminal."""

from __future__ import annotations

from raysim.cli.terminal import console, table_of, write_line
from raysim.screening.screen import words
from raysim.sweeps.contenders import Candidate
from raysim.sweeps.decide import DecisionState
from raysim.sweeps.decision import step_causes, way_words
from raysim.units import plural


def show_step(decision: DecisionState) -> None:
    """Print dense's step by cause; if nothing can gain enough, the other ways to run the training."""
    out = console()
    assert decision.parts is not None
    write_line(out, step_causes(decision.parts, decision.dense_s, decision.question.network))
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
    out.print(table_of([_row(each) for each in rows], title, text=["setting", "outcome"], fold=["setting", "outcome"]))


def show_decision(decision: DecisionState) -> None:
    """Print the decision, the lines for the user's training, and the paths of all files."""
    out = console(width=160)
    if decision.ended == "raced":
        rows = sorted(decision.candidates, key=lambda each: (not each.harm, -(each.speedup or 0.0)))
        out.print(
            table_of(
                [_raced(each) for each in rows],
                "What became of each setting",
                text=["setting"],
                fold=["setting", "harm", "outcome"],
            )
        )
    if decision.code:
        write_line(out, decision.code)
    for sentence in decision.sentences[1:]:
        write_line(out, sentence)
    write_line(out, f"All of it: {decision.store.out}")
    write_line(out, f"Decision: {decision.sentences[0]}")


def _row(candidate: Candidate) -> dict[str, str]:
    speedup = "-" if candidate.speedup is None else f"{candidate.speedup:.2f}x"
    loss = "-" if candidate.difference is None else f"{candidate.difference:+.2g}"
    outcome = "to be trained" if candidate.open else f"{candidate.outcome}: {candidate.reason}"
    return {"setting": words(candidate.setting), "speed-up": speedup, "loss at once": loss, "outcome": outcome}


def _raced(candidate: Candidate) -> dict[str, str]:
    row = _row(candidate)
    return {
        "setting": row["setting"],
        "speed-up": candidate.faster or row["speed-up"],
        "loss at once": row["loss at once"],
        "harm": candidate.harm or "-",
        "outcome": candidate.verdict or row["outcome"],
    }
