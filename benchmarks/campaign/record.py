"""The record of a campaign: one JSON line per round, so that nights and machines add up."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple

KEPT = Path(__file__).parent / "record.jsonl"
"""The record of raysim's own campaign, from which docs/measurements/robustness.md has its table."""

ALIKE = 0.02  # of the plans: how many operations a process makes depends a little on its timing


class Round(NamedTuple):
    """Tries of an attack in one round and in a whole campaign, and its failures."""

    attack: str
    whole: int
    tried: int
    harm: list[str]
    minutes: float
    date: str

    def append(self, record: Path) -> None:
        """Add the round to a record."""
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(self._asdict())}\n")


def read(record: Path | None) -> list[Round]:
    """Return the rounds of a record, without an incomplete line at its end."""
    if record is None or not record.is_file():
        return []
    rounds = []
    for line in record.read_text(encoding="utf-8").splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        rounds.append(Round(**values))
    return rounds


def tried(rounds: Iterable[Round], attack: str, whole: int | None = None) -> int:
    """Return how often an attack was tried; with `whole`, of about so many: a number that differs more is of other plans."""
    own = [each for each in rounds if each.attack == attack]
    return sum(each.tried for each in own if whole is None or abs(each.whole - whole) <= ALIKE * whole)


def row(rounds: Iterable[Round], attack: str) -> str:
    """Return the row of an attack in the table of a campaign."""
    own = [each for each in rounds if each.attack == attack]
    harm, last = sum(len(each.harm) for each in own), own[-1]
    return f"| {attack} | {last.whole:,} | {tried(own, attack):,} | {harm} | {last.date} |"


def table(rounds: Iterable[Round], attacks: Container[str]) -> str:
    """Return the table of a campaign: a row for each of the attacks that was tried."""
    kept = [each for each in rounds if each.attack in attacks]
    head = "| attack | in a whole campaign | tried | failures | last tried |\n|---|---|---|---|---|"
    return "\n".join([head, *(row(kept, attack) for attack in dict.fromkeys(each.attack for each in kept))])
