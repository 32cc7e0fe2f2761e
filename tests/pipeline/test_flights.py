"""Packets that leave a GPU while it computes: the same training, and a worker that waits for its device as seldom as can be."""

import pytest
import torch
from engines import losses_of, start
from gpu import DEVICE, SlowFlight
from pipelines import DROPOUT, RUNS, TIED

from raysim.codecs import kernels, transfers
from raysim.compressors import parse
from raysim.pipeline.device import DeviceClock
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.link import Link
from raysim.pipeline.state import unpack_tensors

pytest.importorskip("triton")
if DEVICE == "cuda":
    pytest.skip("the kernels are compiled here, and not interpreted", allow_module_level=True)

COMPRESSED = {"forward": "TopK(0.3)", "backward": "ErrorFeedback(Quantize(4))"}
LATE = {
    "compressed": COMPRESSED,
    "zero-bubble": RUNS["zero-bubble"],
    "custom": RUNS["custom"],
    "shared-indices": {"forward": "TopK(0.3)", "shared_indices": True, "backward": "Quantize(8)"},
    "gpt-interleaved": {**DROPOUT, **COMPRESSED, "schedule": "Interleaved1F1B(2)", "num_stages": 4},
    "tied": {**TIED, "forward": "Quantize(4)"},
}


@pytest.fixture
def late(monkeypatch):
    """Let the workers of a context compute as on a GPU: kernels of GPUs, and packets whose bytes come when they are awaited."""

    def begin():
        monkeypatch.setattr("raysim.pipeline.row.Flight", SlowFlight)
        return kernels.interpreted()

    return begin


def trained(config, steps=2):
    engine = start(config)
    losses = [loss for step in range(steps) for loss in losses_of(engine, step)]
    return engine, losses, {name: x for part in engine.state() for name, x in unpack_tensors(part).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_packets_that_land_late_train_to_the_same_bits(small, late, name):
    config = small(**LATE[name], profile_every_steps=2)
    train_late(config, late)


def train_late(config, late):
    """Return an engine after two steps in which packets landed late, to the bits of those in which they did not."""
    _, losses, state = trained(config)
    with late():
        engine, late_losses, late_state = trained(config)
    assert late_losses == losses
    assert late_state.keys() == state.keys()
    assert all(torch.equal(late_state[name], x) for name, x in state.items())
    return engine


def test_a_worker_waits_once_a_packet_and_once_a_step(small, late):
    config = small(**COMPRESSED, profile_every_steps=0, num_microbatches=2)
    engine = train_late(config, late)
    for place, worker in enumerate(engine.workers):
        sent = config.num_microbatches * (2 if 0 < place < len(engine.workers) - 1 else 1)
        assert worker.row.flight.waits <= 2 * (sent + 1)


def test_divergence_is_located_without_waiting(small, late):
    def broken():
        engine = start(small(forward="Quantize(4)"))
        next(iter(engine.workers[0].stages[0].module.parameters())).data.fill_(torch.nan)
        with pytest.raises(DivergedError) as error:
            engine.step(0)
        return str(error.value)

    expected = broken()
    with late():
        assert broken() == expected


def test_flags_of_aborted_step_are_dropped(small, late):
    with late():
        worker = start(small(forward="Quantize(4)")).workers[0]
        with worker.row.flight.open():
            transfers.check(torch.ones(1, dtype=torch.int32), ValueError("of the broken step"))
        worker.load(0, worker.state())
        worker.row.flight.settle()


def test_kernels_are_compiled_before_a_step(small, late, monkeypatch):
    """Triton compiles a kernel for the types and constants that it is launched with."""
    made = set()

    def noted(kernel, programs, *arguments, **constants):
        types = tuple(x.dtype if isinstance(x, torch.Tensor) else type(x) for x in arguments)
        made.add((kernel.__name__, types, tuple(sorted(constants.items()))))
        kernel[(programs,)](*arguments, **constants)

    for module in ("linear", "packing", "rows", "select", "uniform"):
        monkeypatch.setattr(f"raysim.codecs.kernels.triton.{module}.launch", noted)
    with late():
        engine = start(small(**COMPRESSED, num_stages=2, num_microbatches=1))
        before = set(made)
        engine.step(0)
    assert before
    assert made == before


class Event:
    """An event of a GPU that has come as far as it was waited for."""

    recorded, come, waits = 0, 0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        Event.recorded += 1
        self.number = Event.recorded

    def query(self):
        return self.number <= Event.come

    def synchronize(self):
        Event.waits += 1
        Event.come = max(Event.come, self.number)

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "An event is read before the GPU has come past it."
        return 1.0 * (end.number - self.number)


def test_gpu_timers_are_read_after_completion(small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr("raysim.pipeline.local_stages.DeviceClock", lambda device: DeviceClock(torch.device("cuda")))
    monkeypatch.setattr("raysim.pipeline.worker.synchronize", lambda device: setattr(Event, "come", Event.recorded))
    engine = start(small(**COMPRESSED, profile_every_steps=1))
    actions = [action for step in range(2) for report in engine.step(step) for action in report.actions]
    assert actions
    assert all(action.end_s > action.start_s for action in actions)
    assert Event.waits == 0
    first, last = (Event(enable_timing=True) for _ in range(2))
    for event in (first, last):
        event.record(None)
    assert DeviceClock.between(first, last) == 1e-3  # type: ignore[arg-type]
    assert Event.waits == 1


def test_link_on_gpu_uses_gpu_timers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    link = Link(parse("TopK(0.1)"), 0, "forward", sender=True)
    with link.on(torch.device("cuda")):
        assert isinstance(link.clock.mark(), Event)
    with link.on(torch.device("cpu")):
        assert isinstance(link.clock.mark(), float)
