"""Passes over memory of codecs on a GPU: the bytes that kernels and torch read and write, counted in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raysim.codecs import Codec, kernels

DEFAULTS = (
    "Quantize(8)",
    "Quantize(8, per='row')",
    "Quantize(4, per='block', block=1024)",
    "TopK(0.1)",
    "Hadamard(Quantize(4))",
    "Rotated(4)",
)
SHAPE = (8, 64, 576)  # a microbatch of SmolLM2's activations
_KEY = 1
_SMALL = 64  # a tensor of this part of the one that is sent, or less, stays in a cache


class Moved(TorchDispatchMode):
    """Counts the bytes read and written by torch's operations other than views; `counted` adds the kernels' bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused and not func.is_view and "empty" not in str(func):
            ends = [*tree_leaves((args, kwargs)), *tree_leaves(out)]
            self.bytes += sum(end.nbytes for end in ends if isinstance(end, torch.Tensor))
        return out


@contextmanager
def counted(cached: int = 0) -> Iterator[Moved]:
    """Yield a count of all bytes moved within, by Triton's kernels too, which run on the CPU.

    Left out: atomic additions, and what a kernel reads of tensors of up to `cached` bytes, such as tables.
    """
    from triton.runtime import interpreter

    builder, executor, moved = interpreter.InterpreterBuilder, interpreter.GridExecutor, Moved()
    load, store = builder.create_masked_load, builder.create_masked_store
    call, bring = executor.__call__, executor._init_args_hst
    tables: list[range] = []

    def loading(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded = load(self, pointers, mask, *rest)
        if not any(int(pointers.data.flat[0]) in table for table in tables):
            moved.bytes += int(mask.data.sum()) * loaded.data.itemsize
        return loaded

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved.bytes += int(mask.data.sum()) * value.data.itemsize
        return store(self, pointers, value, mask, *rest)

    def bringing(self: Any, arguments: Any, named: Any) -> Any:
        brought = bring(self, arguments, named)
        tensors = [leaf for leaf in tree_leaves(brought) if isinstance(leaf, torch.Tensor) and leaf.nbytes <= cached]
        tables[:] = [range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
        return brought

    def calling(self: Any, *arguments: Any, **named: Any) -> Any:
        moved.paused = True  # the interpreter copies tensors
        try:
            return call(self, *arguments, **named)
        finally:
            moved.paused = False

    builder.create_masked_load, builder.create_masked_store = loading, storing
    executor.__call__, executor._init_args_hst = calling, bringing
    try:
        with kernels.interpreted(), moved:
            yield moved
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor.__call__, executor._init_args_hst = call, bring


def bench_passes(codecs: Sequence[Codec], shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Return the bytes that each codec's encode and decode move, and the minimum: a float32 tensor and its packet.

    Needs `TRITON_INTERPRET=1` in the environment when Triton is first imported.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = []
    for codec in codecs:
        with counted(x.nbytes // _SMALL) as encoding:
            packet = codec.encode(x, _KEY)
        with counted(x.nbytes // _SMALL) as decoding:
            packet.decode()
        row = {"codec": repr(codec), "encode_bytes": encoding.bytes, "decode_bytes": decoding.bytes}
        rows.append(row | {"tensor_bytes": x.nbytes, "least_bytes": x.nbytes + packet.array_bytes})
    return {"shape": shape, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """Return the record as a table for the terminal."""
    shown = Table(title=f"passes over a float32 tensor of {'x'.join(map(str, result['shape']))} on a GPU")
    for title in ("codec", "encode", "decode", "least of each"):
        shown.add_column(title, justify="left" if title == "codec" else "right")
    for row in result["rows"]:
        passes = (f"{row[f'{name}_bytes'] / row['tensor_bytes']:.2f}" for name in ("encode", "decode", "least"))
        shown.add_row(row["codec"], *passes)
    return shown
