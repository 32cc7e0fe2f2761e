"""The engine that runs all workers in this process."""

from __future__ import annotations

import copy
from typing import Any

import torch

from raysim.config import ConfigError
from raysim.engine.base import Engine, Ref
from raysim.engine.room import check_room, host_memory_bytes
from raysim.pipeline.worker import Worker


class InlineEngine(Engine):
    """All workers in this process, one action after the other."""

    def check(self) -> None:
        if self.plan.config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "`device` = 'cuda' needs a GPU, and torch finds none here. Set `device` to 'auto' or 'cpu'."
            )
        check_room(self.all_memories, host_memory_bytes())

    @property
    def device_kind(self) -> str:
        return "cuda" if self.plan.config.device != "cpu" and torch.cuda.is_available() else "cpu"

    def start(self) -> None:
        device = self.device_kind
        self.workers = [
            Worker(
                self.plan, worker, copy.deepcopy(self._modules(worker)), self.workload.data, device, self.incarnation
            )
            for worker in range(self.num_workers)
        ]

    def close(self) -> None:
        self.workers = []

    def clock_offsets_s(self) -> list[float]:
        return [0.0] * self.num_workers

    def _submit(self, worker: int, method: str, *arguments: Any, num_returns: int = 1) -> Ref:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # stages seed torch's generator, which here is the caller's
            return getattr(self.workers[worker], method)(*arguments)

    def _fetch(self, refs: list[Ref]) -> list[Any]:
        return refs

    def _put(self, value: Any) -> Ref:
        return value
