"""The driver of the cases, a process on the first host: training runs that pause before every step, for links to be shaped.

A line of input is JSON, `{"config": {...}, "out": FOLDER}`. Before every step it answers {"step": NUMBER} and waits for a line;
at the end {"error": null} or a sentence. Evaluations and checkpoints are left out, since they are not measured.
"""

from __future__ import annotations

import json
import sys
import traceback

from raysim.config import make_config
from raysim.training.run import Training


def main() -> None:
    """Serve the input until it ends."""
    for line in sys.stdin:
        try:
            _train(**json.loads(line))
            _say(error=None)
        except Exception as error:  # the parent says which case failed
            traceback.print_exc()
            _say(error=f"{type(error).__name__}: {error}")


def _train(config: dict[str, object], out: str) -> None:
    training = Training(make_config(config), out=out)
    events = training.events()
    for step in range(1, training.plan.num_steps + 1):
        next(event for event in events if event.kind == "step")
        if step < training.plan.num_steps:
            _say(step=step)
            sys.stdin.readline()
    events.close()


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
