"""Runs whose process kills itself with SIGKILL in the middle of a step: `python killed.py FOLDER < configurations in JSON`.

Every run is a process of its own, forked before anything was computed, so that torch is imported once.
"""

import json
import os
import signal
import sys
from pathlib import Path

from raysim.config import make_config
from raysim.pipeline.worker import Worker
from raysim.training.run import Training

KILLED_IN = 3  # the step


def die(config, folder):
    """Train until the last worker is about to end a step, in which others have ended theirs."""
    update = Worker.update

    def deadly(self, step, *arguments):
        if step == KILLED_IN and self.index == self.plan.num_replicas * len(self.plan.rows) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, step, *arguments)

    Worker.update = deadly
    for _ in Training(config, engine="inline", out=folder).events():
        pass


if __name__ == "__main__":
    for name, values in json.load(sys.stdin).items():
        child = os.fork()
        if not child:
            die(make_config(values), Path(sys.argv[1]) / name)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, name
