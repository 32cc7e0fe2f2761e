"""Messages between workers: the requests of a worker to its engine while it runs a step or an evaluation.

The parts of a step that need packets of other workers are generators. They yield `Send` and `Receive`, and the engine delivers:
in one process from list to list, on Ray by calls from actor to actor. Both see the same messages under the same keys.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from raysim.codecs.message import Message

Result = TypeVar("Result")

Key: TypeAlias = "tuple[Any, ...]"
"""The name of a message, which its sender and its receiver work out alike; no two messages of a step have the same."""

Parts: TypeAlias = "tuple[Message | None, ...]"


class OutgoingMessage(NamedTuple):
    """A message to one worker."""

    target: int
    key: Key
    message: Message | None


class Send(NamedTuple):
    """Asks to send messages. Each receiver also gets the message to `everyone`, where one is given."""

    messages: tuple[OutgoingMessage, ...]
    everyone: tuple[Message | None] | tuple[()] = ()


class Receive(NamedTuple):
    """Asks for the message of another worker under a key. The answer: that message, and the one to everyone."""

    source: int
    key: Key


Turns: TypeAlias = Generator[Send | Receive, Parts, Result]
"""Work of a worker that sends and takes messages on its way to a result."""
