"""Attacks by input: keys with values that they cannot have, and packets that were damaged on their way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from codec_variants import VARIANTS
from commands import LIMIT_S, Outcome
from packet_fuzz import fuzz
from typer.testing import CliRunner

from raysim.cli import app

LONGEST_S = 5.0  # of a CPU, for refusing an input: other programs may hold the CPUs
LARGEST_BYTES = 1 << 30  # of memory that refusing one takes
MEASURED = """
import re
from pathlib import Path
from raysim.cli import main
try:
    main()
finally:
    print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
ALONE = 50  # of how many inputs one goes to a process of its own

WORDS = [
    *[
        "num_stages",
        "forward",
        "backward",
        "steps",
        "model",
        "model.width",
        "data",
        "data.path",
        "optimizer.name",
        "schedule",
    ],
    *[
        "clock",
        "seed",
        "cuts",
        "bottleneck",
        "name",
        "batch_size",
        "replica_gradient",
        "forward.1",
        "model.subspace",
        "num_replicas",
        "profile",
        "dtype",
    ],
]
VALUES = [
    *[
        "",
        "0",
        "-1",
        "1e999",
        "nan",
        "9" * 5000,
        "true",
        "[]",
        "[[1]]",
        "{a=1}",
        "{1='TopK(0.1)'}",
        "[1, 2, 3]",
        "100000",
        "x" * 3000,
        "'''",
    ],
    *[
        "TopK(",
        "TopK(0.1",
        "Topk(0.1)",
        "TopK(1e-400)",
        "Quantize(10**9)",
        "GraVAC(",
        "('" * 400,
        "TopK(__import__('os'))",
    ],
    *["/dev/zero", "/proc/self/mem", "\udcff", "a\x00b", "os:system", "sys:exit", "Custom('/dev/zero')"],
    *["1" * 300 + "mbps", "100mbps+-1ms"],
]


def inputs(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Give keys values that no key can have: refused in one sentence, in under `LONGEST_S`.

    One of every `ALONE` is given to a process of its own, whose memory counts too.
    """
    harm = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number in range(count):
            keys = [f"{chance.choice(WORDS)}={chance.choice(VALUES)}" for _ in range(chance.randrange(1, 3))]
            refuse = _alone if number % ALONE == 0 and "\0" not in "".join(keys) else _here
            found = refuse([*keys, "steps=0", "--engine", engine])  # never begins
            harm += [f"{str(keys)[:200]}: {found}"] if found else []
    finally:
        os.chdir(before)
    return Outcome(count, harm)


def _here(words: list[str]) -> str | None:
    """Return the harm of a command in this process."""
    began = time.process_time()
    done = CliRunner().invoke(app, ["train", "digits-cnn", *words])
    seconds = time.process_time() - began
    if _in_a_sentence(done.exit_code, done.stderr) and seconds <= LONGEST_S:
        return None
    return f"{done.exit_code}, {seconds:.1f} CPU seconds, {done.exception!r:.100}"


def _alone(words: list[str]) -> str | None:
    """Return the harm of a command in a process of its own."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors, tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-c", MEASURED, "train", "digits-cnn", *words]
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        overdue = threading.Timer(LIMIT_S, process.kill)
        overdue.start()
        _, status, usage = os.wait4(process.pid, 0)
        overdue.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        out.seek(0)
        said, memory = errors.read(), out.read().split()
    seconds = usage.ru_utime + usage.ru_stime
    memory_bytes = 1024 * int(memory[-1]) if memory else 0  # none where the process was killed
    if _in_a_sentence(process.returncode, said) and seconds <= LONGEST_S and memory_bytes <= LARGEST_BYTES:
        return None
    return f"alone {process.returncode}, {seconds:.1f} CPU seconds, {memory_bytes:,} bytes, {said[-100:]!r}"


def _in_a_sentence(code: int, errors: str) -> bool:
    return code == 2 and len(errors.strip().splitlines()) == 1


def packets(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Damage packets of every codec: a tensor of the stated shape, or a ValueError."""
    harm, each = [], -(-count // len(VARIANTS))
    for variant in VARIANTS:
        harm += fuzz(variant, each, chance.getrandbits(32))
    return Outcome(each * len(VARIANTS), harm)
