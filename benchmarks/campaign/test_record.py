"""The record of the campaign: its table stands in the docs, and rounds add up."""

from functools import reduce
from importlib import import_module
from pathlib import Path

from asking import PHASES
from attacks import ATTACKS
from on_servers import RUN_PHASES, SWEEP_PHASES
from plans import PLANS
from record import KEPT, Round, read, table, tried

DOCS = Path(__file__).parents[2] / "docs" / "measurements" / "robustness.md"


def test_the_docs_have_the_table_of_the_record():
    assert table(read(KEPT), {*ATTACKS, *PLANS}) in DOCS.read_text()


def test_rounds_add_up_and_an_incomplete_line_is_left_out(tmp_path):
    record = tmp_path / "record.jsonl"
    rounds = [
        Round("disk full", 20, 2, [], 0.5, "2026-11-24"),
        Round("disk full", 20, 3, ["it hung"], 0.5, "2026-11-25"),
    ]
    for each in rounds:
        each.append(record)
    with record.open("a") as file:
        file.write('{"attack": "disk')
    assert read(record) == rounds
    assert tried(rounds, "disk full") == 5
    rounds.append(Round("no longer an attack", 20, 3, [], 0.5, "2026-11-25"))
    assert table(rounds, {"disk full"}).splitlines()[-1] == "| disk full | 20 | 5 | 1 | 2026-11-25 |"


def test_the_functions_that_begin_a_phase_exist():
    for phase in [*PHASES.values(), *RUN_PHASES.values(), *SWEEP_PHASES.values()]:
        module, name = phase.function.split(":")
        assert callable(reduce(getattr, name.split("."), import_module(module)))
