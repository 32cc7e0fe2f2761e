"""Ray actors that run the workers and exchange messages.

The sending worker passes a message as an argument of an actor call, which Ray takes straight to the receiver; see `delivery`.
A separate concurrency group receives messages while the worker computes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from raysim.codecs.message import Message
from raysim.engine.delivery import Limits, Mailbox, pieces
from raysim.engine.nodes import Reach, measured_gflops, starts_slowly
from raysim.engine.ray_internals import direct_call_bytes
from raysim.limits import node_memory
from raysim.pipeline.errors import SenderStoppedError
from raysim.pipeline.messages import Key, Send, Turns
from raysim.pipeline.reports import Failure

MESSAGES = "messages"  # the concurrency group that receives them
PROBE_BYTES = 100 * 1024  # size of the test message in `greet`
GREET_AGAIN_S = 0.5  # pause before calling unreachable peers again
REACH_TRIES = 5  # calls to each peer; the fastest counts
LIFE: dict[str, Any] = {
    "max_concurrency": 1,  # calls other than messages run one after another
    "max_restarts": 0,  # a worker restarted by Ray would silently have fresh weights
    "max_task_retries": 0,
    "enable_task_events": False,  # thousands of calls a second would each send events to the head of the cluster
}


class StageActor:
    """A process that runs workers, one after another, with a mailbox filled by its peers."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._worker: Any = None
        self._kept: dict[str, Any] = {}

    def keep(self, **arguments: Any) -> None:
        """Keep large arguments for the next worker, so that their objects can be freed before it is made."""
        self._kept = arguments

    def take(self, session: str, peers: Mapping[int, Any], make: Callable[..., Any], *arguments: Any) -> None:
        """Become the worker returned by `make`, limited to this actor's share of a GPU.

        The worker exchanges messages with `peers`. `make` gets `arguments` and those of `keep`.
        """
        import ray

        self._worker = None  # free the previous worker first
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            share = ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0)  # type: ignore[no-untyped-call]
            if share < 1:
                torch.cuda.set_per_process_memory_fraction(share)
        self._session = session
        self._mailbox.open(session)
        self._peers = dict(peers)
        receiving = {"concurrency_group": MESSAGES, "num_returns": 0}
        self._deliver = {worker: peer.deliver.options(**receiving) for worker, peer in peers.items()}
        self._deliver_piece = {worker: peer.deliver_piece.options(**receiving) for worker, peer in peers.items()}
        kept, self._kept = self._kept, {}
        self._worker = make(*arguments, **kept)

    def call_bytes(self) -> int:
        """Return the largest argument that this node sends within a call."""
        return direct_call_bytes()

    def bound(self, limits: Limits) -> None:
        """Set the limits of messages."""
        self._limits = limits

    def greet(self, timeout_s: float) -> list[int]:
        """Return the peers that cannot be reached through the object store within `timeout_s`."""
        import ray

        probe = ray.put(np.zeros(PROBE_BYTES, np.uint8))
        deadline = time.monotonic() + timeout_s
        missing = set(self._peers)
        while missing and (left_s := deadline - time.monotonic()) > 0:
            calls = {
                self._peers[peer].hello.options(concurrency_group=MESSAGES).remote(probe): peer for peer in missing
            }
            ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=left_s)
            missing -= {calls[call] for call in ended if _answered(call)}
            if missing:
                time.sleep(GREET_AGAIN_S)
        return sorted(missing)

    def hello(self, probe: np.ndarray | None = None) -> None:
        """Receive a message of `greet`, or a call of `reach`."""

    def reach(self) -> Reach:
        """Return the round trip to the farthest peer, and whether TCP starts slowly after idle here."""
        import ray

        farthest_s = 0.0
        for peer in self._peers.values():
            call, tries = peer.hello.options(concurrency_group=MESSAGES), []
            for _ in range(REACH_TRIES):
                before = time.perf_counter()
                ray.get(call.remote())
                tries.append(time.perf_counter() - before)
            farthest_s = max(farthest_s, min(tries))
        return Reach(starts_slowly(), farthest_s)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker and return its result."""
        return getattr(self._worker, method)(*arguments)

    def perform(self, turn: int, method: str, *arguments: Any) -> Any:
        """Run a generator method of the worker, send and receive its messages, and return its result."""
        worker = self._worker
        assert worker is not None
        self._mailbox.begin(turn)
        finished = False
        try:
            with worker.threads():
                outcome = self._conduct(turn, getattr(worker, method)(*arguments), worker)
            finished = not isinstance(outcome, Failure)
        finally:
            if not finished:
                for deliver in self._deliver.values():
                    deliver.remote((self._session, turn, worker.index, None, None))
        return outcome

    def deliver(self, sent: tuple[str, int, int, Key | None, Message | None], *everyone: Message | None) -> None:
        """Receive a message; without a key, it marks the sender as finished for this turn."""
        session, turn, source, key, message = sent
        if key is None:
            self._mailbox.stop(session, turn, source)
        else:
            self._mailbox.put(session, turn, source, key, (message, *everyone))

    def deliver_piece(self, name: tuple[str, int, int, Key], piece: np.ndarray, left: int) -> None:
        """Receive a piece of a message; `left` more pieces follow."""
        self._mailbox.put_piece(*name, piece, left)

    def speed(self) -> float:
        """Return the speed of the node in GFLOP/s; see `measured_gflops`."""
        return measured_gflops()

    def whereabouts(self) -> tuple[str, int]:
        """Return the node's id and memory in bytes."""
        import ray

        return ray.get_runtime_context().get_node_id(), node_memory().size

    def _conduct(self, turn: int, turns: Turns[Any], worker: Any) -> Any:
        try:
            request = next(turns)
            while True:
                if isinstance(request, Send):
                    self._send(turn, worker.index, request)
                    request = next(turns)
                    continue
                try:
                    parts = self._mailbox.take(request, worker.timeout_s)
                except SenderStoppedError as error:
                    request = turns.throw(error)
                else:
                    request = turns.send(parts)
        except StopIteration as stop:
            return stop.value

    def _send(self, turn: int, index: int, send: Send) -> None:
        import ray

        ways = {id(sent): self._limits.route((sent.message, *send.everyone)) for sent in send.messages}
        everyone: tuple[Any, ...] = send.everyone
        if len(send.messages) > 1 and "store" in ways.values():
            everyone = tuple(ray.put(message) for message in everyone)  # once for all receivers
        for sent in send.messages:
            target, key, message = sent
            name = (self._session, turn, index, key)
            if target == index:
                self._mailbox.put(*name, (message, *send.everyone))
            elif ways[id(sent)] == "pieces":
                parts = list(pieces((message, *send.everyone), self._limits.call))
                for number, piece in enumerate(parts, start=1):
                    self._deliver_piece[target].remote(name, piece, len(parts) - number)
            else:
                self._deliver[target].remote((*name, message), *everyone)


def _answered(call: Any) -> bool:
    """Return whether a finished call reached its actor. If the actor cannot be reached, a call fails at once."""
    import ray
    from ray.exceptions import ActorUnavailableError

    try:
        ray.get(call)
    except ActorUnavailableError:
        return False
    return True


def start_actor(**options: Any) -> Any:
    """Start a `StageActor` with these Ray options, and return its handle."""
    import ray

    return ray.remote(concurrency_groups={MESSAGES: 1})(StageActor).options(**options, **LIFE).remote()  # type: ignore[call-overload]


def pickle_model_code() -> None:
    """Pickle classes in a model's folder by value, as other processes cannot import them."""
    import ray.cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith("transformers_modules."):
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
