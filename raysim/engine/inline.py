"""The engine that runs all workers in this process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from raysim.config import ConfigError
from raysim.engine.engine import Engine, Ref
from raysim.engine.resources import check_memories
from raysim.limits import process_memory
from raysim.pipeline.errors import SenderStoppedError
from raysim.pipeline.messages import Key, Parts, Receive, Send, Turns
from raysim.pipeline.worker import Worker


class InlineEngine(Engine):
    """Runs all workers in this process, one at a time."""

    kind: ClassVar[str] = "inline"

    def check(self) -> None:
        if self.plan.config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "`device` = 'cuda' needs a GPU, and torch finds none here. Set `device` to 'auto' or 'cpu'."
            )
        check_memories(self.all_memories, process_memory())

    @property
    def device_kind(self) -> str:
        return "cuda" if self.plan.config.device != "cpu" and torch.cuda.is_available() else "cpu"

    def device_forecast_bytes(self) -> int:
        """Return the forecast peak memory of all workers, which share this process."""
        return sum(memory.total_bytes for memory in self.all_memories)

    def start(self) -> None:
        data, device = self.workload.data, self.device_kind
        self.workers = [
            Worker(self.plan, worker, copy.deepcopy(self._modules(worker)), data, device)
            for worker in range(self.num_workers)
        ]

    def close(self) -> None:
        self.workers = []

    def _perform(self, workers: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Run the workers in turn, each until it needs a missing message, until all are done."""
        messages: dict[tuple[int, int, Key], Parts] = {}  # by source, target and key
        running = {worker: getattr(self.workers[worker], method)(*arguments) for worker in workers}
        awaited: dict[int, Receive | None] = dict.fromkeys(running)
        outcomes: dict[int, Any] = {}
        with _forked_random():
            while running:
                moved = False
                for worker, turns in list(running.items()):
                    take = awaited[worker]
                    if take is not None and (take.source, worker, take.key) not in messages:
                        continue
                    moved = True
                    try:
                        with self.workers[worker].threads():
                            awaited[worker] = _go_on(worker, turns, take, messages)
                    except StopIteration as stop:
                        outcomes[worker] = stop.value
                        del running[worker]
                if not moved:  # the rest wait, directly or not, for workers that failed
                    for worker, turns in running.items():
                        outcomes[worker] = _break_off(turns, awaited[worker])
                    break
        return [outcomes[worker] for worker in workers]

    def _submit(self, worker: int, method: str, *arguments: Any) -> Ref:
        with _forked_random():
            return getattr(self.workers[worker], method)(*arguments)

    def _fetch(self, refs: list[Ref]) -> list[Any]:
        return refs


def _go_on(
    worker: int, turns: Turns[Any], take: Receive | None, messages: dict[tuple[int, int, Key], Parts]
) -> Receive:
    """Advance a worker to its next receive; raises StopIteration with its result at the end."""
    request = next(turns) if take is None else turns.send(messages.pop((take.source, worker, take.key)))
    while isinstance(request, Send):
        for target, key, message in request.messages:
            messages[worker, target, key] = (message, *request.everyone)
        request = next(turns)
    return request


def _break_off(turns: Turns[Any], take: Receive | None) -> Any:
    """Tell a worker that its awaited message will not come, and return its outcome."""
    assert take is not None
    try:
        turns.throw(SenderStoppedError(f"worker {take.source} stopped before it sent a message"))
    except StopIteration as stop:
        return stop.value
    raise AssertionError("A worker continued without the message that it needs.")


def _forked_random() -> AbstractContextManager[None]:
    """Restore torch's random state afterwards: stages seed the generator, which is the caller's here."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    context: AbstractContextManager[None] = torch.random.fork_rng(devices)
    return context
