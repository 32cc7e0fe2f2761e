"""The hot loops of codecs in numba and in Triton, and the choice between them and the plain torch reference.

A kernel is named after the torch function that it replaces. It exists in numba for tensors in host memory, and often also in
the package `triton` for tensors on GPUs, with the same arguments; only `find` chooses, by the tensor. Codecs fall back to the
torch reference for float64 and wherever no kernel exists; kernels match the reference bit for bit. Numba is imported when a
kernel is first needed, and compiled kernels are cached on disk; `raysim.codecs.warm` does both before a step is timed. Large
tensors are split among torch's threads, with the same result.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from raysim.on_demand import torch

T = TypeVar("T")

_mode: ContextVar[str | None] = ContextVar("mode", default=None)  # "reference" or "interpreted", on this thread
_lock = threading.Lock()
_outputs: list[np.ndarray] = []  # the latest large outputs, some still in use
_pools: dict[int, ThreadPoolExecutor] = {}
_PART = 1 << 18  # least number of values per thread
_probe = [np.empty(1)]
_UNHELD = sys.getrefcount(_probe[0])  # reference count of an array that only a list refers to, in this Python version
_LARGE, _KEPT = 1 << 20, 1 << 26  # bytes: least size of an output to reuse, and most for all unused outputs together
_TRACKED = 64  # most outputs tracked, including those in use
_MOST = 2**31 - 2**20  # most values of a GPU tensor: Triton kernels use 32-bit indices
_OLDEST = (7, 0)  # lowest compute capability supported by Triton
_TRITON = ("linear", "packing", "rotated", "select", "uniform")  # modules


def find(name: str, x: torch.Tensor) -> Any:
    """Return the kernel `module.function` for `x`, or None if only the torch reference supports it."""
    return find_on(name, x.device, x.numel(), x.dtype)


def find_on(name: str, device: torch.device | str, count: int = 1, dtype: torch.dtype | None = None) -> Any:
    """Return the kernel `module.function` for tensors of `count` values of `dtype` on `device`, or None."""
    if not count or dtype == torch.float64:
        return None
    if serves(device):
        return _kernel(name)
    if name.partition(".")[0] in _TRITON and gpu_serves(device, count):
        return _kernel(f"triton.{name}")
    return None


@functools.cache
def _kernel(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), function, None)


def serves(device: torch.device | str) -> bool:
    """Return whether the numba kernels support tensors on `device`."""
    if str(device) != "cpu" or _mode.get():
        return False
    _drop_stale()
    return True


def gpu_serves(device: torch.device | str, count: int = 0) -> bool:
    """Return whether the Triton kernels support tensors of `count` values on `device`."""
    if count >= _MOST or _mode.get() == "reference":
        return False
    return _mode.get() == "interpreted" or (torch.device(device).type == "cuda" and _has_triton())


@contextlib.contextmanager
def _within(mode: str) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def reference() -> contextlib.AbstractContextManager[None]:
    """Use only the torch reference within this context, on this thread."""
    return _within("reference")


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run the Triton kernels on tensors in host memory within this context, on this thread.

    Needs Triton, and `TRITON_INTERPRET=1` in the environment when the kernels are first imported.
    """
    with _within("interpreted"), np.errstate(invalid="ignore", over="ignore"):  # a GPU does not warn of these
        yield


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton supports this machine's GPUs; warns once if it does not."""
    if importlib.util.find_spec("triton") is None:
        warnings.warn("Triton is not installed: codecs run on the GPU as plain torch, which is slower.", stacklevel=2)
        return False
    if torch.cuda.get_device_capability() < _OLDEST:
        warnings.warn("Triton does not serve this GPU: codecs run on it as plain torch, which is slower.", stacklevel=2)
        return False
    return True


def bits_of(x: torch.Tensor) -> np.ndarray:
    """View a contiguous tensor's bit patterns as a flat array of signed integers of the same width."""
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32).view(-1).numpy()


def opened(array: np.ndarray) -> np.ndarray:
    """Return a view of the bytes that is marked as writable; kernels never write to their inputs.

    Packets from the object store are read-only, and numba would compile every kernel again for read-only arrays.
    """
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(SimpleNamespace(__array_interface__=interface, kept_alive=array))


def empty(count: int, dtype: type | np.dtype) -> np.ndarray:
    """Return an uninitialised array; reuses the memory of an earlier array of equal size that is no longer referenced.

    The system zeroes fresh memory first, which takes longer for many megabytes than the codec itself.
    """
    if count * np.dtype(dtype).itemsize < _LARGE:
        return np.empty(count, dtype)
    with _lock:
        for i in range(len(_outputs)):
            fits = _outputs[i].dtype == dtype and len(_outputs[i]) == count
            if fits and sys.getrefcount(_outputs[i]) == _UNHELD:
                _outputs.append(_outputs.pop(i))
                return _outputs[-1]
        array = np.empty(count, dtype)
        free = _KEPT - array.nbytes
        for i in reversed(range(len(_outputs))):  # the latest are at the end
            if sys.getrefcount(_outputs[i]) == _UNHELD:
                free -= _outputs[i].nbytes
                if free < 0:
                    del _outputs[i]
        del _outputs[: -_TRACKED + 1]
        _outputs.append(array)
    return array


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised float32 tensor like `x`; in host memory it comes from `empty`."""
    if x.device.type != "cpu":
        return torch.empty_like(x, dtype=torch.float32)
    return torch.from_numpy(empty(x.numel(), np.float32)).view(x.shape)


def in_parts(work: Callable[[int, int], T], count: int, multiple: int) -> list[T]:
    """Split `count` values among torch's threads and return the results; part sizes, except the last, are multiples of `multiple`.

    Kernels release the GIL, so threads suffice. Small counts run on the calling thread.
    """
    threads = max(1, min(torch.get_num_threads(), count // _PART))
    size = -(-count // (threads * multiple)) * multiple
    parts = [(start, min(start + size, count)) for start in range(0, count, max(1, size))]
    if len(parts) < 2:
        return [work(0, count)]
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="codec")
    return list(_pools[threads].map(work, *zip(*parts, strict=True)))


def added(memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return memory + x as a new float32 tensor."""
    if not serves(memory.device) or memory.dtype != torch.float32 or memory.shape != x.shape:
        return (memory.float() + x.detach()).float()
    return torch.add(memory, x.detach(), out=empty_like(memory))


@functools.cache
def _drop_stale() -> None:
    """Delete cached kernels older than any source here: numba checks only the file that defines the function."""
    folder = Path(__file__).parent
    newest = max(path.stat().st_mtime for path in folder.glob("*.py"))
    for index in folder.glob("__pycache__/*.nbi"):
        with contextlib.suppress(OSError):
            if index.stat().st_mtime < newest:
                index.unlink()
