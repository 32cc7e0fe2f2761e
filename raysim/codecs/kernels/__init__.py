"""The hot loops of codecs in numba, and what decides between them and the plain torch reference.

Kernels serve tensors in host memory; the torch code beside their callers serves CUDA and float64, and is the oracle that they
must equal bit for bit. Numba is imported when a kernel is first wanted, and what it compiles is kept on disk: `warm` does
both before it counts. Kernels run on the calling thread alone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

_state = threading.local()
_checked = False
_outputs: list[np.ndarray] = []  # the latest large outputs, some still in use
_LARGE, _KEPT = 1 << 22, 1 << 26  # bytes: of an output worth keeping, and of all that are kept


def serve(x: Tensor) -> bool:
    """Return whether kernels work on `x`; else the reference does."""
    return x.dtype != torch.float64 and serves(x.device)


def serves(device: torch.device | str) -> bool:
    """Return whether kernels work on what lies on `device`."""
    if str(device) != "cpu" or getattr(_state, "reference", False):
        return False
    if not _checked:
        _drop_stale()
    return True


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Within this context, and on this thread, the torch reference does everything."""
    before = getattr(_state, "reference", False)
    _state.reference = True
    try:
        yield
    finally:
        _state.reference = before


def bits_of(x: Tensor) -> np.ndarray:
    """Return the bit patterns of a contiguous tensor as a flat array of signed integers of its width, over its memory."""
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32).view(-1).numpy()


def opened(array: np.ndarray) -> np.ndarray:
    """Return a flat view of bytes that looks writable, though no kernel writes to what it reads.

    Packets from the object store are read-only, for which numba would compile every kernel once more.
    """
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(SimpleNamespace(__array_interface__=interface, kept_alive=array))


def empty(count: int, dtype: type | np.dtype) -> np.ndarray:
    """Return memory for decoded values: that of an earlier tensor of the size, where nobody holds it any more.

    Fresh memory of many megabytes has to be zeroed by the system first, which takes longer than decoding into it.
    """
    if count * np.dtype(dtype).itemsize < _LARGE:
        return np.empty(count, dtype)
    for index in range(len(_outputs)):
        array = _outputs[index]
        if (
            array.dtype == dtype and len(array) == count and sys.getrefcount(array) <= 3
        ):  # the list, `array`, the argument
            _outputs.append(_outputs.pop(index))
            return array
    array = np.empty(count, dtype)
    _outputs.append(array)
    while sum(kept.nbytes for kept in _outputs) > max(_KEPT, array.nbytes):
        _outputs.pop(0)
    return array


def warm() -> None:
    """Compile every kernel for every dtype it serves, or load it from disk; quick where that was done before."""
    from raysim.codecs.quantize import Quantize
    from raysim.codecs.sparse import Nonzero, TopK

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.linspace(-1, 1, 96).view(4, 24).to(dtype)
        for codec in (
            TopK(0.5, index="bitmap"),
            TopK(0.5, index="elias_fano", values=Quantize(4)),
            Quantize(3, per="channel", rounding="stochastic"),
            Nonzero(),
        ):
            packet, _ = codec.encode_with_residual(x.float(), dtype, key=1)
            packet.decode()


def _drop_stale() -> None:
    """Drop kernels that were compiled before any source here changed: numba looks at the file of a function alone."""
    global _checked
    folder = Path(__file__).parent
    newest = max(path.stat().st_mtime for path in folder.glob("*.py"))
    for index in folder.glob("__pycache__/*.nbi"):
        with contextlib.suppress(OSError):
            if index.stat().st_mtime < newest:
                index.unlink()
    _checked = True
