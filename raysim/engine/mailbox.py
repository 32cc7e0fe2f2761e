"""A mailbox: one thread puts messages in, while a worker's thread computes and waits for those that it needs."""

from __future__ import annotations

from threading import Condition

import numpy as np

from raysim.engine.delivery import joined
from raysim.pipeline.errors import SenderStoppedError, WorkerLostError
from raysim.pipeline.messages import Key, Parts, Receive


class Mailbox:
    """Messages by their source and key, of one turn of one session.

    A session is the life of an engine's workers. A turn is a step or an evaluation that they do together. Turns are numbered;
    messages of earlier turns are dropped, and messages of later turns wait.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self.open("")

    def open(self, session: str) -> None:
        """Begin a session, and drop all that is here."""
        with self._changed:
            self._session, self._turn = session, 0
            self._letters: dict[tuple[int, int, Key], Parts] = {}
            self._pieces: dict[tuple[int, int, Key], list[np.ndarray]] = {}  # of messages under way
            self._stopped: set[tuple[int, int]] = set()  # turn and source

    def begin(self, turn: int) -> None:
        """Begin a turn."""
        with self._changed:
            self._turn = turn
            self._letters = {place: parts for place, parts in self._letters.items() if place[0] >= turn}
            self._pieces = {place: arrays for place, arrays in self._pieces.items() if place[0] >= turn}
            self._stopped = {place for place in self._stopped if place[0] >= turn}

    def put(self, session: str, turn: int, source: int, key: Key, parts: Parts) -> None:
        """Receive a message."""
        with self._changed:
            if session == self._session and turn >= self._turn:
                self._letters[turn, source, key] = parts
                self._changed.notify()

    def put_piece(self, session: str, turn: int, source: int, key: Key, piece: np.ndarray, left: int) -> None:
        """Receive the next piece of a message, which is whole when none is left."""
        with self._changed:
            if session == self._session and turn >= self._turn:
                self._pieces.setdefault((turn, source, key), []).append(piece)
                if not left:
                    self._letters[turn, source, key] = joined(self._pieces.pop((turn, source, key)))
                    self._changed.notify()

    def stop(self, session: str, turn: int, source: int) -> None:
        """Mark a sender as finished for this turn."""
        with self._changed:
            if session == self._session and turn >= self._turn:
                self._stopped.add((turn, source))
                self._changed.notify()

    def take(self, take: Receive, timeout_s: float) -> Parts:
        """Return a message once it is there.

        Raises SenderStoppedError as soon as it cannot come any more, WorkerLostError after `timeout_s`.
        """
        place = (self._turn, take.source, take.key)
        with self._changed:
            if self._changed.wait_for(lambda: place in self._letters or place[:2] in self._stopped, timeout_s):
                if place in self._letters:
                    return self._letters.pop(place)
                raise SenderStoppedError(f"no message came from worker {take.source}, which broke off")
        raise WorkerLostError(f"no message came from worker {take.source} within `timeout_s` = {timeout_s:g} s")
