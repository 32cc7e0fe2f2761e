"""The campaign against raysim: `make campaign` tries every attack and prints a table; SHARE=0.01 is a hundredth of it."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from attacks import ATTACKS  # noqa: E402


def main() -> int:
    """Try the attacks, print a row for each as it ends, then the harm; return 1 where there was any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the whole campaign")
    parser.add_argument("--engine", default="ray", help="of the runs that are killed")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    harm = []
    print("| attack | tried | harm | minutes |\n|---|---|---|---|", flush=True)
    for name, (attack, whole) in ATTACKS.items():
        if options.only and name not in options.only:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            chance = random.Random(f"{options.seed} {name}")
            found = attack(max(1, round(options.share * whole)), Path(folder), options.engine, chance)
        print(f"| {name} | {found.tried:,} | {len(found.harm)} | {(time.monotonic() - began) / 60:.1f} |", flush=True)
        harm += [f"{name}: {line}" for line in found.harm]
    print(*harm, sep="\n")
    return bool(harm)


if __name__ == "__main__":
    sys.exit(main())
