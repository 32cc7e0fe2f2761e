"""The campaign against raysim: `make campaign` tries every attack and prints a table; SHARE=0.01 is a hundredth of it.

It goes in rounds, and writes down each. When it is called again with the same record, it goes on with the attempts that are
left, so that it may be ended at any time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from attacks import ATTACKS  # noqa: E402
from plans import PLANS, next_plans  # noqa: E402

IN_PROCESS = ("inputs", "packets damaged")  # attacks that would take memory of this very process
SPARE_BYTES = 8 << 30  # that they may take


def main() -> int:
    """Try the attacks, print a row for each as it ends, then the harm; return 1 where there was any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the whole campaign")
    parser.add_argument("--engine", default="ray", help="of the runs that are killed")
    parser.add_argument("--only", action="append", choices=[*ATTACKS, *PLANS], help="may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a file of rounds, to go on from")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further round begins")
    options = parser.parse_args()
    ends, rounds = time.monotonic() + 60 * options.minutes, _read(options.record)
    print("| attack | of | tried | harm | minutes |\n|---|---|---|---|---|", flush=True)
    for name in options.only or [*ATTACKS, *PLANS]:
        whole = len(PLANS[name].every()) if name in PLANS else ATTACKS[name][1]
        wanted = max(1, round(options.share * whole))
        while (left := wanted - _tried(rounds, name)) > 0 and time.monotonic() < ends:
            done = _round(name, left, rounds, options.engine, options.seed)
            rounds.append(done)
            if options.record is not None:
                options.record.parent.mkdir(parents=True, exist_ok=True)
                with options.record.open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(done)}\n")
            if not done["tried"]:
                break  # it cannot be tried here
        mine = [one for one in rounds if one["attack"] == name]
        harm, minutes = sum(len(one["harm"]) for one in mine), sum(one["minutes"] for one in mine)
        print(f"| {name} | {wanted:,} | {_tried(rounds, name):,} | {harm} | {minutes:.1f} |", flush=True)
    lines = [f"{one['attack']}: {line}" for one in rounds for line in one["harm"]]
    print(*lines, sep="\n")
    return bool(lines)


def _read(record: Path | None) -> list[dict[str, Any]]:
    """Return the rounds that a record holds; a line that was broken off is none."""
    rounds = []
    if record is not None and record.is_file():
        for line in record.read_text(encoding="utf-8").splitlines():
            try:
                rounds.append(json.loads(line))
            except ValueError:
                continue
    return rounds


def _tried(rounds: list[dict[str, Any]], name: str) -> int:
    return sum(one["tried"] for one in rounds if one["attack"] == name)


def _round(name: str, left: int, rounds: list[dict[str, Any]], engine: str, seed: int) -> dict[str, Any]:
    """Try an attack a few times."""
    number = len(rounds)
    began, before = time.monotonic(), resource.getrlimit(resource.RLIMIT_AS)
    if name in IN_PROCESS:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1]))
    try:
        with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
            if name in PLANS:
                found = next_plans(name, _tried(rounds, name), left, Path(folder), seed)
            else:
                attack, _, at_once = ATTACKS[name]
                found = attack(min(left, at_once), Path(folder), engine, random.Random(f"{seed} {name} {number}"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    minutes = (time.monotonic() - began) / 60
    return {"attack": name, "tried": found.tried, "harm": found.harm, "minutes": round(minutes, 2), "round": number}


if __name__ == "__main__":
    sys.exit(main())
