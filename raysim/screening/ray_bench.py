"""The bench of a screen on Ray: actors that measure settings at the same time, each with a bench of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from raysim.config import ConfigError, RunConfig
from raysim.config.identity import Setting
from raysim.engine.actor import pickle_model_code
from raysim.engine.connection import connected, first_reason
from raysim.engine.resources import wait_for_capacity, workers_that_fit
from raysim.pipeline.errors import WorkerLostError
from raysim.probing.stopwatch import Seconds
from raysim.screening.bench import Bench, Measurements, memory_error
from raysim.screening.passes import TensorFacts

Opened = tuple[Measurements, list[TensorFacts], dict[tuple[int, str], list[Seconds]], float]


class BenchActor:
    """A process that measures settings, one after another."""

    def __init__(self) -> None:
        self._bench: Bench | None = None

    def open(self, make: Callable[[], Bench]) -> Opened:
        """Make the bench; return its measurements of dense."""
        self._bench = bench = make()
        return bench.dense, bench.facts, dict(bench.seconds), bench.pass_s

    def warm(self, settings: Sequence[Setting]) -> None:
        """Compile the kernels of all codecs."""
        assert self._bench is not None
        self._bench.warm(settings)

    def measure(self, setting: Setting) -> Measurements:
        """Return the measurements of a setting."""
        assert self._bench is not None
        return self._bench.measure(setting)


class RayBench:
    """Actors that share the settings of a screen; all measure dense first, and the first actor's times count."""

    def __init__(self, actors: Sequence[Any], make: Callable[[], Bench], *, gradients: bool) -> None:
        import ray

        self._actors = list(actors)
        self.num_processes = len(self._actors)
        self.gradients = gradients
        pickle_model_code()
        stored = ray.put(make)
        opened = _fetch([actor.open.remote(stored) for actor in self._actors])
        self.dense: Measurements
        self.facts: list[TensorFacts]
        self.seconds: Mapping[tuple[int, str], list[Seconds]]
        self.pass_s: float
        self.dense, self.facts, self.seconds, self.pass_s = opened[0]

    def measure_all(self, settings: Sequence[Setting]) -> Iterator[Measurements]:
        """Yield the measurements of settings, in order."""
        from ray.util import ActorPool

        _fetch([self._actors[0].warm.remote(settings)])  # compile once; the others load the result from disk
        _fetch([actor.warm.remote(settings) for actor in self._actors[1:]])
        pool: Any = ActorPool(self._actors)
        with _own_errors():
            yield from pool.map(lambda actor, setting: actor.measure.remote(setting), settings)


@contextmanager
def bench_actors(config: RunConfig, needed: int, most: int) -> Iterator[list[Any]]:
    """Start actors for benches of `needed` bytes each, as many as fit, at most `most`; they end with the block.

    They are on the cluster at `RAY_ADDRESS`, or on a Ray of this machine. Raises ConfigError if none fits or the cluster cannot be
    joined, WorkerLostError if Ray does not start.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with connected("screen"):
        nodes = _places(config, needed)[:most]
        actors: list[Any] = [
            ray.remote(BenchActor)
            .options(
                num_cpus=config.cpus_per_stage,
                num_gpus=gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
            for node, gpus in nodes
        ]
        try:
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)


def _places(config: RunConfig, needed: int) -> list[tuple[str, float]]:
    """Return a node and its share of a GPU for each bench that fits; raises ConfigError if there is none."""
    free, gpus = wait_for_capacity(config, 1, None, 0.0)
    fitting = workers_that_fit(free, config.cpus_per_stage, gpus)
    if not gpus:  # on a GPU its memory counts
        sizes = {node: int(free[node].get("memory", 0.0)) for node in free}
        fitting = {node: min(count, sizes[node] // needed) for node, count in fitting.items()}
        if not any(fitting.values()):
            raise memory_error(needed, f"Ray has at most {max(sizes.values()) / 1e9:.1f} GB free on a node")
    return [(node, gpus) for node, count in fitting.items() for _ in range(count)]


def _fetch(calls: Sequence[Any]) -> list[Any]:
    import ray

    with _own_errors():
        return list(ray.get(list(calls)))


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise an actor's ConfigError as itself, and its loss as WorkerLostError."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise
    except RayError as error:
        raise WorkerLostError(f"a process of the screen is lost: {first_reason(error)}") from None
