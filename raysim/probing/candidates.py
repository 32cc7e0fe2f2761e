"""A probe: candidates encode the tensors at the cuts of a running training, beside it, and leave records that raysim prices."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from raysim.compressors import Compressor, Context
from raysim.nn.link import parse_methods
from raysim.nn.samples import current, of_microbatch
from raysim.pipeline.link import Link, LinkAccount
from raysim.probing.stopwatch import Stopwatch
from raysim.random import derive_key
from raysim.records import SCHEMA_VERSION, Recorder

DENSE = "Identity"
_DIRECTIONS = ("forward", "backward")


class _Sent(NamedTuple):
    """The measured figures of one message of a candidate."""

    encode_s: float
    decode_s: float
    wire_bytes: int
    dense_bytes: int


class _Candidate:
    """The links of one candidate, and its records."""

    def __init__(self, notation: str, folder: Path, num_boundaries: int) -> None:
        self.methods: tuple[Compressor, Compressor] = parse_methods(notation, notation)
        self.folder = folder
        self.recorder = Recorder(folder)
        self.ends = {
            (boundary, direction): tuple(
                Link(method, boundary, direction, sender=sender, device=torch.device("cpu")) for sender in (True, False)
            )
            for boundary in range(num_boundaries)
            for direction, method in zip(_DIRECTIONS, self.methods, strict=True)
        }
        self.sent: dict[tuple[str, int, int], _Sent] = {}  # by direction, boundary and microbatch

    def send(self, x: Tensor, context: Context) -> None:
        """Encode and decode one message beside the training."""
        sender, receiver = self.ends[context.boundary, context.direction]
        sender.device = receiver.device = x.device
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            message = sender.send(x, context, measure=True)
            receiver.receive(message, context)
        times = sender.last_codec_s, receiver.last_codec_s
        key = (context.direction, context.boundary, context.microbatch)
        self.sent[key] = _Sent(*times, sender.last_wire_bytes, sender.last_dense_bytes)


class Probe:
    """A context in which a training in one process is measured as if it were cut into stages; the training is not changed.

    At the modules named in `cuts`, each of `candidates`, in raysim's notation, encodes activations and gradients beside the
    training, in every `every`-th step until `steps` were sampled. `out` gets a run's folder for each candidate and one for the
    dense tensors, which `analysis.load` opens and `raysim replay` prices under `schedule`. `num_microbatches` calls of the model
    make a step. Memories keyed by sample need `raysim.nn.samples`.

    Bytes, error and seconds are measured. The effect of a candidate on the training's quality is not.

    Raises ValueError where a cut does not exist, a candidate cannot be read, or `out` holds files.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[str],
        candidates: Sequence[str],
        *,
        out: str | Path,
        steps: int = 20,
        every: int = 10,
        num_microbatches: int = 1,
        schedule: str = "1F1B",
        seed: int = 0,
    ) -> None:
        for field, value in (("steps", steps), ("every", every), ("num_microbatches", num_microbatches)):
            if value < 1:
                raise ValueError(f"`{field}` must be at least 1, but got {value}.")
        known = dict(model.named_modules())
        if not cuts:
            raise ValueError("`cuts` must name at least one module of the model, but got none.")
        for cut in cuts:
            if not cut or cut not in known:
                raise ValueError(
                    f"`cuts` must name modules of the model, as in `model.named_modules()`, but got {cut!r}."
                )
        self.folder = Path(out)
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"`out` must be a new or empty folder, but {self.folder} holds files.")
        self.steps, self.every, self.num_microbatches = steps, every, num_microbatches
        self._model, self._cuts = model, list(cuts)
        self._modules = [known[cut] for cut in cuts]
        self._schedule, self._seed = schedule, seed
        self._candidates = [
            _Candidate(text, self.folder / f"{place}-{re.sub(r'[^A-Za-z0-9.]+', '-', text).strip('-')}", len(cuts))
            for place, text in enumerate([DENSE, *(text for text in candidates if text != DENSE)])
        ]
        self._step = 0  # of the training
        self._calls = 0  # of the model in the step at hand
        self._sampled = 0
        self._rows = 0  # samples of a microbatch
        self._overhead_s = 0.0
        self._began = 0.0

    def __enter__(self) -> Self:
        for candidate in self._candidates:
            candidate.recorder.open()
        self._watch = Stopwatch(
            self._model,
            self._modules,
            on_forward=self._forward,
            on_activation=self._activation,
            on_gradient=self._gradient,
        )
        self._contexts: dict[tuple[int, int], Context] = {}
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.remove()
        if self._calls == self.num_microbatches:
            self._end_step()
        for candidate in self._candidates:
            candidate.recorder.write_run(self._row(candidate))
            candidate.recorder.compact()
            candidate.recorder.close()

    @property
    def overhead(self) -> float:
        """The share of the time since the probe began that encoding took."""
        return self._overhead_s / (time.perf_counter() - self._began)

    def _forward(self) -> None:
        """Begin a microbatch."""
        if not self._model.training or not torch.is_grad_enabled():
            self._watch.samples = False
            return
        if self._calls == self.num_microbatches:
            self._end_step()
        self._watch.microbatch = self._calls
        self._watch.samples = self._step % self.every == 0 and self._sampled < self.steps
        self._calls += 1

    def _activation(self, boundary: int, microbatch: int, x: Tensor) -> None:
        self._rows = len(x) if x.dim() else 1
        found = of_microbatch(current(), self._rows, microbatch, self.num_microbatches)
        self._contexts[boundary, microbatch] = Context(
            direction="forward",
            boundary=boundary,
            step=self._sampled,
            epoch=found.epoch,
            microbatch=microbatch,
            sample_ids=found.ids,
            num_stages=len(self._cuts) + 1,
            num_microbatches=self.num_microbatches,
            key=self._key("forward", boundary, microbatch),
        )
        self._send(x, self._contexts[boundary, microbatch])

    def _gradient(self, boundary: int, microbatch: int, gradient: Tensor) -> None:
        context = self._contexts.pop((boundary, microbatch))
        key = self._key("backward", boundary, microbatch)
        self._send(gradient, context._replace(direction="backward", key=key))

    def _send(self, x: Tensor, context: Context) -> None:
        start = time.perf_counter()
        for candidate in self._candidates:
            candidate.send(x, context)
        self._overhead_s += time.perf_counter() - start

    def _key(self, direction: str, boundary: int, microbatch: int) -> int:
        return derive_key(self._seed, 0, boundary, direction, self._sampled, microbatch)

    def _end_step(self) -> None:
        """Record a sampled step, and go on to the next."""
        seconds = self._watch.seconds
        if seconds:
            for candidate in self._candidates:
                self._record(candidate, seconds)
            self._sampled += 1
            self._watch.seconds = {}
            self._contexts.clear()
        self._step += 1
        self._calls = 0

    def _record(self, candidate: _Candidate, seconds: dict[tuple[int, str, int], float]) -> None:
        """Write the rows of a step as a run of this candidate in one process would have them."""
        step, now = self._sampled, 0.0
        for (stage, op, microbatch), compute_s in seconds.items():
            outgoing = ("forward", stage, microbatch) if op == "F" else ("backward", stage - 1, microbatch)
            incoming = ("forward", stage - 1, microbatch) if op == "F" else ("backward", stage, microbatch)
            sent, received = candidate.sent.get(outgoing), candidate.sent.get(incoming)
            encode_s, decode_s = sent.encode_s if sent else 0.0, received.decode_s if received else 0.0
            end = now + decode_s + compute_s + encode_s
            row = {
                "step": step,
                "replica": 0,
                "stage": stage,
                "op": op,
                "microbatch": microbatch,
                "start_s": now,
                "end_s": end,
                "decode_s": decode_s,
                "compute_wall_s": compute_s,
                "encode_s": encode_s,
                "wire_bytes": sent.wire_bytes if sent else 0,
                "dense_bytes": sent.dense_bytes if sent else 0,
            }
            candidate.recorder.add("actions", row)
            now = end
        accounts = [[end.end_step(measure=True) for end in ends] for ends in candidate.ends.values()]
        for sender, receiver in accounts:
            candidate.recorder.add("links", self._link_row(candidate, sender, receiver))
        wire, dense = (sum(getattr(sender, name) for sender, _ in accounts) for name in ("wire_bytes", "dense_bytes"))
        candidate.recorder.add(
            "steps", {"step": step, "epoch": 0, "seconds": now, "wire_bytes": wire, "dense_bytes": dense}
        )
        candidate.sent.clear()

    def _link_row(self, candidate: _Candidate, sender: LinkAccount, receiver: LinkAccount) -> dict[str, Any]:
        method = candidate.methods[_DIRECTIONS.index(sender.direction)]
        fidelity = (
            1 - sender.error_norm2 / sender.sent_norm2 if sender.sent_norm2 and sender.error_norm2 is not None else None
        )
        return {
            "step": self._sampled,
            "replica": 0,
            "boundary": sender.boundary,
            "direction": sender.direction,
            "codec": repr(method),
            "packets": sender.packets,
            "wire_bytes": sender.wire_bytes,
            "dense_bytes": sender.dense_bytes,
            "fidelity": 1.0 if method.exact else fidelity,
            "encode_s": sender.codec_s,
            "decode_s": receiver.codec_s,
        }

    def _row(self, candidate: _Candidate) -> dict[str, Any]:
        forward, backward = (repr(method) for method in candidate.methods)
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": f"probe-{candidate.folder.name}",
            "name": "probe",
            "probe": True,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": type(self._model).__name__,
            "data": "own",
            "num_stages": len(self._cuts) + 1,
            "cuts": self._cuts,
            "num_microbatches": self.num_microbatches,
            "num_replicas": 1,
            "batch_size": self._rows * self.num_microbatches,
            "schedule": self._schedule,
            "schedule_rows": None,
            "forward": forward,
            "backward": backward,
            "replica_gradient": DENSE,
            "shared_indices": False,
            "seed": self._seed,
            "steps": self._sampled,
            "profile_every_steps": 1,
            "threads_per_stage": torch.get_num_threads(),
            "device_kind": next(self._model.parameters()).device.type,
            "engine": "inline",
            **{name: version(name) for name in ("raysim", "torch")},
            "status": "finished",
            "seconds": time.perf_counter() - self._began,
            "start_s": 0.0,
        }
