"""Exits of commands: errors in one sentence with an exit code, and signals."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from raysim.notation import InputError, cut_middle, printable
from raysim.signals import take
from raysim.storage.files import os_sentence

if TYPE_CHECKING:
    from raysim.training.events import Interruption

LONGEST = 4000  # characters of a sentence
ELSEWHERE = {"bench": "benchmarks", "validate": "benchmarks", "findings": "findings"}
"""Commands of the distributions raysim-NAME, by NAME, their folder in a clone."""


class Commands(TyperGroup):
    """raysim's commands and those of installed packages, which register a `typer.Typer` as an entry point `raysim.commands`.

    Errors end a command with one sentence: bad input with exit code 2, errors of the system (a full disk, a missing folder, too
    little memory) with 1.
    """

    own: ClassVar[dict[str, Callable[..., None]]] = {}
    """raysim's functions by command. Each becomes a command when it is asked for: all together take a tenth of a second."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.commands: Any = dict.fromkeys(self.own)  # the names, which are listed and suggested

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; `--json` without a file prints the figures."""
        filled = []
        for word, following in zip(args, [*args[1:], "--"], strict=True):
            alone = word == "--json" and following.startswith("-") and following != "-"
            filled += [word, "-"] if alone else [word]
        return super().parse_args(ctx, filled)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *sorted(_installed_commands())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name, importing those of other packages."""
        if cmd_name in self.own:
            return _command(self.own[cmd_name])
        installed = _installed_commands().get(cmd_name)
        if installed is not None:
            command = get_command(installed.load())
            command.name = cmd_name
            return command
        if cmd_name in ELSEWHERE:
            name = ELSEWHERE[cmd_name]
            fail(
                f"`raysim {cmd_name}` is in raysim-{name}, which is not installed: run `pip install ./{name}` in a clone of raysim.",
                2,
            )
        return None

    def invoke(self, ctx: Any) -> Any:
        """Run a command and flush its output; its errors become one sentence."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except InputError as error:
            fail(str(error), 2)
        except SystemExit as error:  # of a user's own code: no run has ended
            if isinstance(error.__context__, BrokenPipeError):  # rich's, after the reader has closed the pipe
                raise
            fail(f"the command was ended by sys.exit({error.code!r}) in code that it ran.", 1)
        except MemoryError as error:
            fail(f"this machine has too little memory: {str(error) or 'none is left'}.", 1)
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC and not error.filename:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python writes the rest of the buffer again at exit
            fail(os_sentence(error), 2 if error.errno == errno.ENAMETOOLONG else 1)


@cache
def _command(function: Callable[..., None]) -> Any:
    alone = typer.Typer(add_completion=False)
    alone.command()(function)
    return get_command(alone)


def _installed_commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="raysim.commands")}


def fail(sentence: str, code: int) -> NoReturn:
    """Print an error on the error stream and exit."""
    from raysim.console import PlainConsole

    sentence = printable(sentence)
    text = cut_middle(sentence, LONGEST)
    with suppress(OSError):  # the error stream may be closed
        PlainConsole(stderr=True, soft_wrap=True).print(f"raysim: {text}")
    raise typer.Exit(code)


def leave(loss: str, again: str, ending: Interruption) -> NoReturn:
    """End the process with one sentence after Ray's servers are lost; callable from any thread, as the main one waits in Ray."""
    from raysim.engine.watch import end_process

    ending.notice()
    end_process(
        f"raysim: {'interrupted' if ending.wanted else loss}. {again}", ending.exit_code if ending.wanted else 1
    )


@contextmanager
def ending_on_signals() -> Iterator[Interruption]:
    """Yield an Interruption set by the process's signals; before a run has begun, a signal ends the command with one sentence."""
    from raysim.training.events import Interruption

    ending = Interruption()
    with ending.on_signals():
        try:
            yield ending
        except KeyboardInterrupt:
            fail("interrupted before anything began.", ending.exit_code)


def end_on_sigterm() -> None:
    """Let SIGTERM end the command as Ctrl-C does, so that it cleans up."""
    take(signal.SIGTERM, _interrupt)


def _interrupt(number: int, _frame: object) -> NoReturn:
    # `timeout` sends it twice, and the second one must not interrupt the clean-up.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
