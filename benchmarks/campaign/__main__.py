"""The campaign against raysim: `make campaign` tries every attack and prints a table; SHARE=0.01 is a hundredth of it.

It goes in rounds and records each. Called again with the same record, it continues with the remaining attempts.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "support")]

from attacks import ATTACKS  # noqa: E402
from plans import PLANS, next_plans  # noqa: E402
from record import Round, read, row, table, tried  # noqa: E402

IN_PROCESS = ("inputs", "packets damaged")  # attacks that use this process's memory
SPARE_BYTES = 8 << 30  # that they may use


def main() -> int:
    """Try the attacks, print a row for each as it ends, then the harm of this session; return 1 if there was any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the whole campaign")
    parser.add_argument("--engine", default="ray", help="of the runs that are killed")
    parser.add_argument("--only", action="append", choices=[*ATTACKS, *PLANS], help="may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a file of rounds, to continue from")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further round begins")
    parser.add_argument("--table", action="store_true", help="print the table of the record, and try nothing")
    options = parser.parse_args()
    rounds = read(options.record)
    if options.table:
        print(table(rounds, {*ATTACKS, *PLANS}))
        return 0
    ends, began_with = time.monotonic() + 60 * options.minutes, len(rounds)
    for name in options.only or [*ATTACKS, *PLANS]:
        whole = len(PLANS[name].every()) if name in PLANS else ATTACKS[name][1]
        wanted = max(1, round(options.share * whole))
        while (left := wanted - _tried(rounds, name, whole)) > 0 and time.monotonic() < ends:
            ended = _round(name, whole, left, rounds, options.engine, options.seed)
            rounds.append(ended)
            if options.record is not None:
                ended.append(options.record)
            print(*(f"{name}: {line}" for line in ended.harm), sep="\n", end="\n" if ended.harm else "", flush=True)
            if not ended.tried:
                break  # it cannot be tried here
        if tried(rounds, name):
            print(row(rounds, name), flush=True)
    return any(each.harm for each in rounds[began_with:])


def _tried(rounds: list[Round], name: str, whole: int) -> int:
    """Return the number of tries of the plans that an attack has now."""
    return tried(rounds, name, whole if name in PLANS else None)


def _round(name: str, whole: int, left: int, rounds: list[Round], engine: str, seed: int) -> Round:
    """Try an attack a few times."""
    began, before = time.monotonic(), resource.getrlimit(resource.RLIMIT_AS)
    if name in IN_PROCESS:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1]))
    try:
        with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
            if name in PLANS:
                outcome = next_plans(name, _tried(rounds, name, whole), left, Path(folder), seed)
            else:
                attack, _, at_once = ATTACKS[name]
                chance = random.Random(f"{seed} {name} {len(rounds)}")
                outcome = attack(min(left, at_once), Path(folder), engine, chance)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    minutes = round((time.monotonic() - began) / 60, 2)
    return Round(name, whole, outcome.tried, outcome.harm, minutes, f"{datetime.now(UTC):%Y-%m-%d}")


if __name__ == "__main__":
    sys.exit(main())
