"""Messages between workers, as requests to the engine that delivers them.

The parts of a step that exchange messages are generators that yield `Send` and `Receive`. The inline engine delivers messages
through lists, Ray through calls between actors; the messages and their keys are the same.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from raysim.codecs.message import Message

Result = TypeVar("Result")

Key: TypeAlias = "tuple[Any, ...]"
"""The name of a message, unique within a step, and derived independently by sender and receiver."""

Parts: TypeAlias = "tuple[Message | None, ...]"


class OutgoingMessage(NamedTuple):
    """A message to one worker."""

    target: int
    key: Key
    message: Message | None


class Send(NamedTuple):
    """A request to send messages; each receiver also gets the message to `everyone`, if any."""

    messages: tuple[OutgoingMessage, ...]
    everyone: tuple[Message | None] | tuple[()] = ()


class Receive(NamedTuple):
    """A request for another worker's message under a key; the answer is that message and the one to everyone."""

    source: int
    key: Key


Turns: TypeAlias = Generator[Send | Receive, Parts, Result]
"""A generator that sends and receives messages, and returns a result."""
