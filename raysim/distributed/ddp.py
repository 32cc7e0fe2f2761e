"""Replica methods in DistributedDataParallel, as a public communication hook, over gloo and NCCL."""

import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysim.distributed.exchange import (
    Channel,
    ReplicaError,
    Shapes,
    build_alike,
    check_parameters,
    check_same_rank,
    overflowed,
    plain_names,
    run_rounds,
)
from raysim.replication import parse_replica_method
from raysim.replication.layers import WHOLE, Layered
from raysim.replication.method import Averaged, Memory, ReplicaContext, ReplicaMethod

if TYPE_CHECKING:
    import pandas as pd


def hook(
    model: DistributedDataParallel,
    method: str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    momentum: float | None = None,
    steps_per_epoch: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> "Gradients":
    """Make DDP average a model's gradients by `method`, in raysim's notation, and return the averager.

    Call it on every rank, with the same arguments, after wrapping the model. DDP buckets are averaged separately; a model with
    one bucket gets the gradients of `raysim.train` with one stage, bit for bit. All are averaged in float32.

    Accumulate gradients under `model.no_sync()`: every other backward averages, and compresses, all that has been summed so far.

    `momentum`: SGD's momentum, for methods that apply it themselves (`DGC`). The hook then applies it to all gradients, and the
    optimiser must have none. `steps_per_epoch` is for methods that depend on epochs, `optimizer` for those
    that depend on its learning rate. `batch_size`: samples of a step over all replicas. `seed` seeds random codecs. `scaler`
    scales the loss: gradients are averaged and remembered without its scale, which may change at any step.

    Raises ValueError, on every rank, if the method needs more than gradients or a missing argument, or differs between
    ranks.
    """
    gradients = Gradients(model, method, optimizer, momentum, steps_per_epoch, batch_size, seed, scaler)
    model.register_comm_hook(gradients, _communicate)
    return gradients


class Gradients:
    """Averages the buckets of a model, and holds the memory of its replica method; made by `hook`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        method: str,
        optimizer: torch.optim.Optimizer | None,
        momentum: float | None,
        steps_per_epoch: int | None,
        batch_size: int,
        seed: int,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        every = dict(model.module.named_parameters())
        plain = plain_names(every)
        self._parameters = {plain[name]: p for name, p in every.items()}  # also frozen ones, which buckets may hold
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._order = {name: i for i, name in enumerate(self._parameters)}
        trained = {name: tuple(p.shape) for name, p in self._parameters.items() if p.requires_grad}
        self._channel = Channel(model.process_group, next(iter(every.values())).device)
        self._finds_unused = model.find_unused_parameters
        self._optimizer = optimizer
        self._momentum = momentum
        self._steps_per_epoch = steps_per_epoch
        self._batch_size = batch_size
        self._seed = seed
        self._scaler = scaler
        settings: dict[str, Any] = {
            "the method": method,
            "parameters": trained,
            "`momentum`": momentum,
            "`steps_per_epoch`": steps_per_epoch,
            "`seed`": seed,
            "`scaler`": scaler is not None,
        }
        self.method = build_alike(
            self._channel.group, "average gradients", lambda: self._checked(method, trained), settings
        )
        self.step = 0
        self._step_s: float | None = None
        self._began: float | None = None
        self._memory: dict[str, Tensor] = {}  # of individual parameters
        self._of_bucket: dict[tuple[str, ...], dict[str, Tensor]] = {}  # of all parameters of a bucket at once
        self._velocities: dict[str, Tensor] = {}
        self._dense_bytes = 0
        self._seconds = 0.0
        self._overflows = False  # whether gradients of this step are NaN on all ranks
        self._before = (self._memory, self._of_bucket, self._velocities)  # at the start of a step, until its end
        self._loaded = False  # whether no step has followed a checkpoint
        self._steps = 0  # since `hook`
        self._broken: ReplicaError | None = None
        self._thread = _thread_of(self._channel.group)

    @property
    def _shapes(self) -> Shapes:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of this rank, for a checkpoint; every rank keeps its own."""
        buckets = {"\n".join(names): dict(kept) for names, kept in self._of_bucket.items()}
        own = bool(self._memory or self._of_bucket) and not self.method.common_memory
        return {
            "method": repr(self.method),
            "parameters": self._shapes,
            "rank": self._channel.rank if own else None,
            "step": self.step,
            "memory": dict(self._memory),
            "buckets": buckets,
            "velocities": dict(self._velocities),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the `state_dict` of the same rank; raises ValueError if its method or model differs, or it is another rank's.

        Parameters are matched by name, whether or not the model was compiled or wrapped. DDP has other buckets in a new model's
        first step: methods that decide for a whole bucket, such as `GraVAC`, then average it uncompressed.
        """
        if state["method"] != repr(self.method):
            raise ValueError(f"`method` must be {state['method']}, as in the checkpoint, but got {self.method!r}.")
        check_same_rank(state.get("rank"), self._channel.rank)
        buckets = {names: names.split("\n") for names in state["buckets"]}
        held = [*map(_parameter, state["memory"]), *state["velocities"], *chain.from_iterable(buckets.values())]
        plain, shapes = plain_names(held), state.get("parameters", self._shapes)
        saved = {name: tuple(shapes[key]) for key, name in plain_names(shapes).items()}
        check_parameters(saved | {name: () for name in plain.values() if name not in saved}, self._shapes)
        self.step, self._loaded = state["step"], True
        self._memory = {f"{key.rpartition('/')[0]}/{plain[_parameter(key)]}": x for key, x in state["memory"].items()}
        self._of_bucket = {}
        for key, saved_names in buckets.items():
            names = tuple(plain[name] for name in saved_names)
            self._keep(_split(state["buckets"][key], self._of_row(names)), names)
        self._velocities = {plain[name]: x for name, x in state["velocities"].items()}

    def report(self) -> "pd.DataFrame":
        """Return one row: steps since `hook`, the bytes that this rank sent, those of an uncompressed all-reduce, and seconds.

        `seconds` are spent in codecs and in waiting for other ranks, partly overlapping with the backward.
        """
        from raysim.nn.table import MessageTable

        row = {
            "codec": repr(self.method),
            "steps": self._steps,
            "wire_bytes": self._channel.sent_bytes,
            "dense_bytes": self._dense_bytes,
            "factor": self._dense_bytes / self._channel.sent_bytes if self._channel.sent_bytes else None,
            "seconds": self._seconds,
        }
        return MessageTable([row])

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Queue a bucket for averaging after earlier buckets, and return its future."""
        device = self._channel.device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        parameters, gradients = bucket.parameters(), bucket.gradients()
        names = [self._names[id(parameter)] for parameter in parameters]
        held = dict(sorted(zip(names, gradients, strict=True), key=lambda item: self._order[item[0]]))
        index, last, buffer = bucket.index(), bucket.is_last(), bucket.buffer()

        def work() -> None:
            with torch.cuda.stream(stream):
                try:
                    with torch.no_grad():
                        self._average(index, held, last=last)
                except Exception as error:
                    self._broken = error if isinstance(error, ReplicaError) else ReplicaError(str(error))
                future.set_result(buffer)  # on the stream that wrote the buffer, for which readers of the future wait

        def checked(done: torch.futures.Future[Tensor]) -> Tensor:
            if self._broken is not None:
                raise ReplicaError(str(self._broken))
            return done.value()

        self._thread.submit(work)
        return future.then(checked)

    def _average(self, index: int, held: dict[str, Tensor], *, last: bool) -> None:
        """Replace the gradients of a bucket by their mean over replicas."""
        if self._broken is not None:
            raise self._broken
        start = time.perf_counter()
        if index == 0:
            self._share_time(start)
            self._overflows = False
            self._before = dict(self._memory), dict(self._of_bucket), dict(self._velocities)
        if not self._overflows:
            self._exchange(index, held)
        if self._overflows:
            for gradient in held.values():
                gradient.fill_(math.nan)
        self._seconds += time.perf_counter() - start
        if last:
            self.step, self._steps, self._loaded = self.step + 1, self._steps + 1, False
            if self._overflows:
                self._memory, self._of_bucket, self._velocities = self._before
            self._before = ({}, {}, {})

    def _exchange(self, index: int, held: dict[str, Tensor]) -> None:
        """Average the gradients of a bucket, unless a rank's overflow."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        gradients = {
            name: gradient.float() if scale == 1.0 else gradient.float() / scale for name, gradient in held.items()
        }
        unused = self._unused(gradients)
        names = tuple(held)
        memory = {key: x for key, x in self._memory.items() if _parameter(key) in held} | self._of_bucket.get(names, {})
        layers = self._of_row(names)
        # DDP puts a new model into other buckets in its first step: one that decides by bucket skips it, to go on as loaded
        skips = self._loaded and bool(self._of_bucket) and names not in self._of_bucket
        method = parse_replica_method("Identity") if skips else self.method
        rounds = method.average(gradients, _join(memory, layers), self._context(index))
        num_values = sum(gradient.numel() for gradient in gradients.values())
        try:
            exchange = run_rounds(rounds, self._channel, method.table(names), names, stage=index, num_values=num_values)
        except ReplicaError as error:
            if not overflowed(error, self._channel, self._parameters.values()):
                raise
            self._overflows = True
            return
        averaged: Averaged = exchange.result
        for name, gradient in averaged.gradients.items():
            if name in unused:
                continue
            if self._momentum is not None and name not in averaged.with_momentum:
                gradient = self._velocities[name] = gradient + self._momentum * self._velocities.get(name, 0.0)
            held[name].copy_(gradient.view_as(held[name]))
            if scale != 1.0:
                held[name].mul_(scale)
        if not skips:
            after = _split(averaged.memory, layers)
            self._keep({key: x for key, x in after.items() if _parameter(key) not in unused}, names)
        itemsize = next(iter(held.values())).itemsize  # plain DDP sends them in their own type
        self._dense_bytes += exchange.account.dense_bytes * itemsize // torch.float32.itemsize

    def _keep(self, memory: Memory, names: tuple[str, ...]) -> None:
        """Keep the memory of a bucket with these parameters, in place of that of buckets which DDP has rebuilt since."""
        self._memory |= {key: x for key, x in memory.items() if _parameter(key) in names}
        of_bucket = {key: x for key, x in memory.items() if _parameter(key) not in names}
        self._of_bucket = {each: kept for each, kept in self._of_bucket.items() if not {*names} & {*each}}
        if of_bucket:
            self._of_bucket[names] = of_bucket

    def _unused(self, gradients: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the parameters whose gradients are zero on all ranks, if DDP looks for such: it drops their averages."""
        if not self._finds_unused:
            return frozenset()
        used = np.array([bool(gradient.any()) for gradient in gradients.values()])
        ranks = self._channel.gather(("used", *gradients), used)
        return frozenset(name for name, *is_used in zip(gradients, *ranks, strict=True) if not any(is_used))

    def _of_row(self, names: Iterable[str]) -> Shapes:
        """Return the shapes of those parameters that are in a row of all layers."""
        shapes = {name: tuple(self._parameters[name].shape) for name in names}
        return self.method.compressed_shapes(shapes) if isinstance(self.method, Layered) else shapes

    def _context(self, index: int) -> ReplicaContext:
        per_epoch = self._steps_per_epoch or max(1, self.step + 1)
        return ReplicaContext(
            replica=self._channel.rank,
            num_replicas=self._channel.size,
            step=self.step,
            epoch=self.step // per_epoch,
            steps_per_epoch=per_epoch,
            seed=self._seed,
            stage=index,
            batch_size=self._batch_size,
            learning_rate=self._optimizer.param_groups[0]["lr"] if self._optimizer is not None else 0.0,
            momentum=self._momentum or 0.0,
            step_s=self._step_s,
        )

    def _share_time(self, now: float) -> None:
        """Give all ranks the first one's seconds for the last step, if the method depends on them."""
        if "step_s" not in self.method.needs:
            return
        if self._began is not None:
            self._step_s = float(self._channel.gather("seconds", np.array([now - self._began]))[0, 0])
        self._began = now

    def _checked(self, notation: str, shapes: Mapping[str, tuple[int, ...]]) -> ReplicaMethod:
        """Return the parsed method; raises ValueError if it does not fit the model and the arguments."""
        method = parse_replica_method(notation)
        if method.decentralized or "stage" in method.needs:
            why = "replicas keep parameters of their own" if method.decentralized else "it needs stages of its own"
            raise ValueError(
                f"`method` cannot be {method!r} in a hook, which sees only gradients: {why}. Use `raysim.train`."
            )
        given = {"epochs": ("steps_per_epoch", self._steps_per_epoch), "learning_rate": ("optimizer", self._optimizer)}
        for need, (argument, value) in given.items():
            if need in method.needs and value is None:
                raise ValueError(
                    f"`{argument}` must be given for {method!r}, which depends on {need.replace('_', ' ')}."
                )
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        own = max((group.get("momentum") or 0.0 for group in groups), default=0.0)
        if own and self._momentum is not None:
            raise ValueError("`momentum` is applied by the hook: the optimiser must have none, but has its own.")
        if method.optimizers is not None and self._optimizer is not None:
            rule = type(self._optimizer).__name__.lower()
            if rule not in method.optimizers:
                raise ValueError(
                    f"`optimizer` must be {' or '.join(sorted(method.optimizers))} with {method!r}, but got {rule}."
                )
        try:
            momentum = self._momentum if method.keeps_momentum else self._momentum or own or None
            method.check(shapes, self._channel.size, momentum)
        except ValueError as error:
            raise ValueError(f"`method`: {error}") from None
        return method


_threads: WeakKeyDictionary[dist.ProcessGroup, ThreadPoolExecutor] = WeakKeyDictionary()


def _thread_of(group: dist.ProcessGroup) -> ThreadPoolExecutor:
    """Return the thread in which all models of a group exchange, one bucket after another: messages do not say whose they are."""
    if group not in _threads:
        threads = torch.get_num_threads()
        _threads[group] = ThreadPoolExecutor(1, "gradients", initializer=lambda: torch.set_num_threads(threads))
    return _threads[group]


def _communicate(gradients: Gradients, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    return gradients.start(bucket)


def _parameter(key: str) -> str:
    """Return the parameter in a memory's key: the last part, after the kind and the kinds of wrapping methods."""
    return key.rpartition("/")[2]


def _split(memory: Memory, layers: Shapes) -> Memory:
    """Return a memory with its rows of all layers split by layer, since DDP may put these into other buckets."""
    split: Memory = {}
    for key, x in memory.items():
        if _parameter(key) != WHOLE:
            split[key] = x
            continue
        parts = torch.split(x.view(-1), [math.prod(shape) for shape in layers.values()])
        split |= {f"{key}/{name}": part for name, part in zip(layers, parts, strict=True)}
    return split


def _join(memory: Memory, layers: Shapes) -> Memory:
    """Return a memory with the rows that `_split` has split; layers without a part get zeros."""
    joined = {key: x for key, x in memory.items() if f"/{WHOLE}/" not in key}
    parts = {key: x for key, x in memory.items() if key not in joined}
    for row in dict.fromkeys(key.rpartition("/")[0] for key in parts):
        like = next(iter(parts.values()))
        held = [parts.get(f"{row}/{name}", like.new_zeros(math.prod(shape))) for name, shape in layers.items()]
        joined[row] = torch.cat(held)[None]
    return joined
