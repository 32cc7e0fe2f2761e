"""A GPU without a GPU: streams that run nothing before they must, or each before all others, over host memory.

`Device` stands for `torch.cuda` in `raysim.codecs.transfers`. Copies that are begun on a stream wait in its queue. A tensor whose
last reference is dropped gives its memory back as torch's caching allocator does: the next work of the stream that it was allocated
on may overwrite it at once, unless the tensor was recorded on the stream that still reads it.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GARBAGE = 0x5A


class Stream:
    def __init__(self, device=None):
        self.queue, self.done = [], 0

    def wait_stream(self, other):
        awaited = len(other.queue)
        self.queue.append(lambda: other.run(awaited))

    def run(self, count=None):
        """Do the first `count` pieces of work, by default all."""
        while self.done < (len(self.queue) if count is None else count):
            self.done += 1
            self.queue[self.done - 1]()

    synchronize = run


class Device(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.compute = Stream()
        self.streams = [self.compute]
        self._current = self.compute
        self._recorded = {}

    def module(self):
        """Return the stand-in for torch."""
        cuda = SimpleNamespace(Stream=self._new, current_stream=lambda device=None: self._current, stream=self._on)
        return SimpleNamespace(cuda=cuda, device=torch.device, empty=self._empty)

    def free(self, x, stream):
        """Drop a tensor that was allocated on a stream, whose next work overwrites it if the allocator may give it away."""
        if self._recorded.get(x.untyped_storage().data_ptr(), set()) <= {stream}:
            values = x.numpy()  # seen by no dispatch
            stream.queue.append(lambda: values.fill(GARBAGE))

    def _new(self, device=None):
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def _on(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def _empty(self, shape, *, dtype, device="cpu", pin_memory=False):
        return torch.full(shape, GARBAGE, dtype=dtype)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and (args[2:] or (kwargs or {}).get("non_blocking")):
            target, source = (x.numpy() for x in args[:2])
            self._current.queue.append(lambda: target.__setitem__(slice(None), source))
            return args[0]
        if func is torch.ops.aten.record_stream.default:
            raise AssertionError("`record_stream` takes torch's own streams.")
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(device):
    """Within this context `Tensor.record_stream` tells the device."""
    before = torch.Tensor.record_stream

    def record(x, stream):
        device._recorded.setdefault(x.untyped_storage().data_ptr(), set()).add(stream)

    torch.Tensor.record_stream = record
    try:
        yield
    finally:
        torch.Tensor.record_stream = before
