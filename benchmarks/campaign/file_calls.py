"""Operations on files as steps: a forked process is held, killed or failed at one of them, while others work."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from partial_orders import CONNECTS
from power_loss import DiskLog

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "fcntl.flock"}
CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "fsync"}  # that may fail
AT_FOLDER = {"os.remove", "os.rmdir", "os.mkdir"}  # whose last argument may be the descriptor of a folder
FILLS = {"open", "os.mkdir", "fsync"}  # that a full disk fails
LIMIT_S = 120.0


class Calls:
    """Counts the operations of this process on files under its working folder, and calls `act` before one of them.

    Opening, renaming, removing, making, listing and locking are seen by Python's audit events; looks (`stat`), `fsync` and files
    that Arrow opens by wrappers.
    """

    def __init__(self, act: Callable[[int, str, object], None]) -> None:
        self.count, self._act, self._home = 0, act, str(Path.cwd()) + "/"
        self.touched: list[tuple[int | str, ...]] = []  # count, operation, and the names that it reads or changes
        self._own = threading.local()  # what `act` does itself counts for nothing
        import pyarrow.parquet as pq

        sys.addaudithook(self._hear)
        os.stat = self._before(os.stat, "stat")
        os.fsync = self._before(os.fsync, "fsync")
        for name in ("lstat", "access"):  # looks that are no steps
            setattr(os, name, self._noted(getattr(os, name)))
        for name in ("read_table", "read_metadata", "ParquetFile"):
            setattr(pq, name, self._before(getattr(pq, name), "open"))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            event = "read" if event == "open" and not _writes(arguments) else event
            self._step(event, arguments[0])
            self._note(event, arguments)
        elif event == CONNECTS:  # no step: sqlite's own operations are unseen
            self._note(event, arguments)

    def _before(self, function: Any, event: str) -> Any:
        def stepped(*arguments: Any, **options: Any) -> Any:
            self._step("read" if event == "open" else event, arguments[0])
            self._note("read" if event == "open" else event, arguments[:1])
            return function(*arguments, **options)

        return stepped

    def _noted(self, function: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            self._note("stat", arguments[:1])
            return function(*arguments, **options)

        return noted

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note the names of an operation, relative to the working folder; a sync changes nothing that others see."""
        if event == "fsync" or getattr(self._own, "acts", False):
            return
        targets = arguments[:2] if event == "os.rename" else arguments[:1]
        bases = arguments[2:4] if event == "os.rename" else arguments[-1:] if event in AT_FOLDER else ()
        names = []
        for target, base in zip_longest(targets, bases):
            if isinstance(target, int):
                path = _of_descriptor(target)
            elif isinstance(base, int) and base >= 0:
                path = str(Path(_of_descriptor(base), os.fsdecode(target)))
            elif not isinstance(target, (str, bytes, os.PathLike)):  # what Arrow reads from memory
                continue
            else:
                path = os.path.abspath(os.fsdecode(target))  # noqa: PTH100 (no look at the disk)
            if path.startswith(self._home):
                names.append(path.removeprefix(self._home))
        if names:
            self.touched.append((self.count, event, *names))

    def _step(self, event: str, target: object) -> None:
        if isinstance(target, int):
            inside = event in ("fsync", "fcntl.flock")
        elif isinstance(target, (str, bytes, os.PathLike)):
            inside = str(Path(os.fsdecode(target)).absolute()).startswith(self._home)
        else:
            inside = False
        if inside and not getattr(self._own, "acts", False):
            self.count += 1
            self._own.acts = True
            try:
                self._act(self.count, event, target)
            finally:
                self._own.acts = False


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR)) or any(one in (mode or "") for one in "wax+")


def _of_descriptor(number: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{number}").readlink())
    except OSError:
        return ""


class Process:
    """A forked process that works in a folder; at operation `at` it is held, killed, or failed by an error's number.

    `mode`: "hold", "kill", an errno's name for one failure, "ENOSPC..." for a disk that is full from then on, "list" for an
    answer that lists the operations and their kinds, or "log" for one with what a loss of power would leave, by the contents in `kept`.
    """

    def __init__(
        self,
        work: Callable[[], dict[str, Any]],
        home: Path,
        at: int | None = None,
        mode: str = "hold",
        kept: Path | None = None,
    ) -> None:
        self._said, says = os.pipe()
        hears, self._tells = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._work(work, home, says, lambda: os.read(hears, 1), at, mode, kept)
        os.close(says)
        os.close(hears)

    def _work(
        self, work: Any, home: Path, says: int, listen: Any, at: int | None, mode: str, kept: Path | None
    ) -> None:
        met: list[str] = []
        places: list[str] = []
        kinds: list[str] = []
        log = DiskLog(home, kept) if kept is not None else None

        def act(count: int, event: str, target: object) -> None:
            if log is not None:
                log.note(count, event, target)
            if mode == "list":
                met.append(event)
                places.append(str(target))
                kinds.append(f"{event} of {kind_of(str(target))} by {_callers()}")
            if at is None or count < at or (count > at and mode != "ENOSPC..."):
                return
            if mode == "hold":
                os.write(says, json.dumps({"held": f"{event} {target}"}).encode() + b"\n")
                listen()
            elif mode == "kill":
                os.write(says, json.dumps({"killed": f"{event} {target}"}).encode() + b"\n")
                os.kill(os.getpid(), signal.SIGKILL)
            elif event in (FILLS if mode == "ENOSPC..." else CHANGES | {"read"}):
                met.append(f"{event} {target}")
                number = getattr(errno, mode.removesuffix("..."))
                if event == "fsync" and isinstance(target, int):
                    os.ftruncate(target, os.fstat(target).st_size // 2)
                raise OSError(number, os.strerror(number), None if isinstance(target, int) else os.fsdecode(target))  # type: ignore[arg-type]

        try:
            os.chdir(home)
            calls = Calls(act)
            try:
                answer = work()
            except BaseException as error:
                frames = traceback.extract_tb(error.__traceback__)
                answer = {
                    "error": f"{type(error).__name__}: {error}",
                    "at": [str(frame)[14:-1] for frame in frames[-6:]],
                }
                number = getattr(errno, mode.removesuffix("..."), 0)
                named = type(error).__module__.startswith("raysim.") and os.strerror(number) in str(error)
                answer["system"] = isinstance(error, OSError) or named
            if log is not None:
                log.end()
                answer["held"] = list(log.held.values())
            answer |= (
                {"calls": calls.count, "failed": met[:1], "touched": calls.touched}
                if mode != "list"
                else {"operations": met, "places": places, "kinds": kinds, "touched": calls.touched}
            )
            _write(says, json.dumps(answer).encode() + b"\n")
        finally:
            os._exit(0)

    def wait(self, limit_s: float = LIMIT_S) -> dict[str, Any] | None:
        """Return what the process says next, None if it says nothing within the limit."""
        if not select.select([self._said], [], [], limit_s)[0]:
            return None
        line = b""
        while not line.endswith(b"\n") and (more := os.read(self._said, 65536)):
            line += more
        if not line.startswith(b'{"held": "'):
            os.waitpid(self.pid, 0)
            os.close(self._said)
            os.close(self._tells)
        return json.loads(line) if line else {"error": "it ended without a word"}

    def go_on(self) -> None:
        """Let a held process go on."""
        os.write(self._tells, b"g")


def kind_of(words: str) -> str:
    """Return words without what differs between steps and runs: numbers, and random names."""
    return re.sub(r"\d+", "#", re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{6,}\b", "*", words))


def _callers() -> str:
    """Return the lines of raysim that are being carried out, the innermost first."""
    frame, lines = sys._getframe(1), list[str]()
    while frame is not None:
        if "/raysim/" in frame.f_code.co_filename:
            lines.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " ".join(lines)


def _write(pipe: int, text: bytes) -> None:
    while text:
        text = text[os.write(pipe, text) :]
