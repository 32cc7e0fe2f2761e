"""Runs of the command line, forked one after another from a process that has imported all: that takes half of a short run's CPU time.

A line of JSON has the arguments of one, and the file for its errors; its process and, at its end, its exit code are printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import ray  # noqa: F401
import torch._dynamo  # noqa: F401

import raysim.engine.ray
import raysim.training.run  # noqa: F401
from raysim.cli import main
from raysim.signals import SIGNALS


def forks() -> bool:
    """Fork a process for each line; return True in each of them, and False at the end."""
    for line in iter(sys.stdin.readline, ""):
        arguments, errors = json.loads(line)
        if not (process := os.fork()):
            for number in SIGNALS:  # as on a terminal
                signal.signal(number, signal.SIG_DFL)
            sys.argv[1:] = arguments
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(0, 1)
            os.dup2(os.open(errors, os.O_WRONLY), 2)
            return True
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return False


if __name__ == "__main__" and forks():
    main()
