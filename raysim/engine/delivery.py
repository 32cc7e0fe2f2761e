"""Messages between workers on Ray: sent in one call, in several calls, or through the object store.

Ray sends arguments up to `max_direct_call_object_size` (100 KiB by default) within the call. A larger one stays in the object
store of its node, and the receiver fetches it: four more messages, twice the CPU time, and no order among packets. Calls from one
actor to another arrive in order, so a message sent in pieces needs no change of that setting, and stays in order.

Within one machine the store is shared memory, and faster from 1 MB on (`raysim bench hops`). Between machines a call takes one
trip, and the store five.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from threading import Condition
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from raysim.codecs.message import Message
from raysim.config import ConfigError
from raysim.engine.ray_internals import RAY_SETTING
from raysim.pipeline.errors import SenderStoppedError, WorkerLostError
from raysim.pipeline.messages import Key, Parts, Receive

Fetch: TypeAlias = Callable[[list[Any]], list[Any]]

NEAR_BYTES = 768 * 2**10
"""Largest message sent without the store between workers on one machine; the threshold of a Ray started by raysim."""
FAR_BYTES = 4 * 2**20
"""The same for workers on several machines; the threshold in raysim's cluster files."""
LEAST_CALL_BYTES = 10_000  # with smaller pieces, the cost of calls would outweigh that of bytes
ARGUMENT_BYTES = 2_048  # overhead of an argument, without its arrays
ARRAY_BYTES = 256  # overhead of each array in an argument


def argument_bytes(message: Message | None) -> int:
    """Return an upper bound of the bytes of a message as an argument of a call."""
    if message is None:
        return ARGUMENT_BYTES
    header, *arrays = message
    return ARGUMENT_BYTES + len(header) + sum(array.nbytes + ARRAY_BYTES for array in arrays)


class Limits(NamedTuple):
    """Limits of a run's messages, in bytes."""

    call: int
    """Largest argument sent within a call: the cluster's threshold."""
    message: int
    """Largest message sent without the store, in pieces if necessary."""

    def route(self, parts: Sequence[Message | None]) -> str:
        """Return how to send the parts of a message: "call", "pieces" or "store".

        >>> big = (b"", np.zeros(500_000, np.uint8))
        >>> [Limits(call, NEAR_BYTES).route([big]) for call in (700_000, 100_000)]
        ['call', 'pieces']
        >>> Limits(100_000, NEAR_BYTES).route([big + big[1:]])
        'store'
        """
        largest = max(map(argument_bytes, parts))
        if largest <= self.call:
            return "call"
        return "pieces" if largest <= self.message else "store"


def pieces(parts: Parts, call_bytes: int) -> Iterator[np.ndarray]:
    """Split the bytes of a message's parts into arrays that each fit a call."""
    whole = np.frombuffer(pickle.dumps(parts, protocol=5), np.uint8)
    for start in range(0, len(whole), size := call_bytes - ARGUMENT_BYTES):
        yield whole[start : start + size]


def join_pieces(arrays: Sequence[np.ndarray]) -> Parts:
    """Return a message's parts from all arrays of `pieces`, in order."""
    parts: Parts = pickle.loads(np.concatenate(arrays).data)
    return parts


def find_limits(actors: Sequence[Any], fetch: Fetch, *, near: bool) -> Limits:
    """Return the limits of messages between workers, given one actor on each node; `near` if all are on one machine.

    `fetch` waits for results. Raises ConfigError if the nodes' thresholds differ, or are below 10 kB.
    """
    most = NEAR_BYTES if near else FAR_BYTES
    thresholds = [min(most, threshold) for threshold in fetch([actor.call_bytes.remote() for actor in actors])]
    low, high = min(thresholds), max(thresholds)
    if low < high:
        raise ConfigError(
            f"`{RAY_SETTING}` must be the same on all nodes of the cluster, but is {low:,} bytes on one and {high:,} or more "
            "on another. Set it by `--system-config` of the head's `ray start` alone, and not by a variable of a node."
        )
    if low < LEAST_CALL_BYTES:
        raise ConfigError(
            f"`{RAY_SETTING}` of the cluster must be at least {LEAST_CALL_BYTES:,} bytes, but is {low:,}. "
            f"Leave it at Ray's default, or set it to {FAR_BYTES} at the head."
        )
    return Limits(low, most)


class Mailbox:
    """Messages of one turn of one session, by source and key.

    A session is the lifetime of an engine's workers. A turn is a joint step or evaluation. Turns are numbered;
    messages of earlier turns are dropped, and messages of later turns wait.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self.open("")

    def open(self, session: str) -> None:
        """Begin a session, and drop all messages."""
        with self._changed:
            self._session, self._turn = session, 0
            self._messages: dict[tuple[int, int, Key], Parts] = {}
            self._pieces: dict[tuple[int, int, Key], list[np.ndarray]] = {}  # of incomplete messages
            self._stopped: set[tuple[int, int]] = set()  # turn and source

    def begin(self, turn: int) -> None:
        """Begin a turn, and drop messages of earlier ones."""
        with self._changed:
            self._turn = turn
            self._messages = {label: parts for label, parts in self._messages.items() if label[0] >= turn}
            self._pieces = {label: arrays for label, arrays in self._pieces.items() if label[0] >= turn}
            self._stopped = {label for label in self._stopped if label[0] >= turn}

    def put(self, session: str, turn: int, source: int, key: Key, parts: Parts) -> None:
        """Receive a message."""
        with self._changed:
            if session == self._session and turn >= self._turn:
                self._messages[turn, source, key] = parts
                self._changed.notify()

    def put_piece(self, session: str, turn: int, source: int, key: Key, piece: np.ndarray, left: int) -> None:
        """Receive the next piece of a message; it is complete when `left` is 0."""
        with self._changed:
            if session == self._session and turn >= self._turn:
                self._pieces.setdefault((turn, source, key), []).append(piece)
                if not left:
                    self._messages[turn, source, key] = join_pieces(self._pieces.pop((turn, source, key)))
                    self._changed.notify()

    def stop(self, session: str, turn: int, source: int) -> None:
        """Mark a sender as finished for this turn."""
        with self._changed:
            if session == self._session and turn >= self._turn:
                self._stopped.add((turn, source))
                self._changed.notify()

    def take(self, take: Receive, timeout_s: float) -> Parts:
        """Wait for a message and return it.

        Raises SenderStoppedError once its sender has stopped without sending it, WorkerLostError after `timeout_s`.
        """
        label = (self._turn, take.source, take.key)
        with self._changed:
            if self._changed.wait_for(lambda: label in self._messages or label[:2] in self._stopped, timeout_s):
                if label in self._messages:
                    return self._messages.pop(label)
                raise SenderStoppedError(f"worker {take.source} stopped before it sent a message")
        raise WorkerLostError(f"no message came from worker {take.source} within `timeout_s` = {timeout_s:g} s")
