"""Costs and savings of codecs on this machine: seconds relative to a tensor copy, wire bytes and error.

On a GPU, seconds are device time between the first and the last kernel of an encode, or of a decode whose packet is on the device.
Copies over the bus are left out, and so is the host's time to launch kernels, unless a codec waits for the device.
All contestants are measured in turn, round by round; figures are medians. Besides raysim's codecs these are plain torch versions of
the same methods and, on the CPU, numcodecs.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from raysim.codecs import CODECS, Codec, warm
from raysim.codecs.codec import to_tensor
from raysim.codecs.message import CodecTable, Entry, wire_bytes
from raysim.codecs.transfers import Flight
from raysim.notation import InputError, parse_notation
from raysim.on_demand import OnDemand
from raysim.plugins import plug_ins
from raysim.units import format_bandwidth
from raysim_benchmarks.harness import in_turn, seconds_of, torch_threads

numcodecs = OnDemand("numcodecs")  # measured on CPUs only
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
KINDS = ("normal", "relu", "heavy tail")
DEFAULTS = (
    "Identity",
    "Cast('bfloat16')",
    "Quantize(8)",
    "Quantize(4)",
    "Quantize(3)",
    "Quantize(4, per='sample')",
    "Quantize(4, per='channel')",
    "Quantize(4, rounding='stochastic')",
    "Quantize(8, range='absmax', per='block')",
    "TopK(0.1)",
    "TopK(0.01)",
    "TopK(0.1, index='bitmap')",
    "TopK(0.1, values=Quantize(4))",
    "Nonzero",
    "RandomK(0.1)",
    "EstimatedTopK(0.1, 'sampled')",
    "EstimatedTopK(0.1, 'bisect')",
    "NonUniform(4)",
    "NonUniform(8, fit='quantile')",
    "NonUniform(8, fit='deviation')",
    "MX('e2m1')",
    "MX('e4m3')",
    "Hadamard(Quantize(4))",
    "Rotated(4)",
    "QSGD(4)",
    "LowRank(4, per='sample')",
    "Mean",
    *(codec.variants[0] for codec in plug_ins("raysim.codecs") if codec.variants),
)
_KEY = 1
_AHEAD = 10_000_000  # cycles: some 6 ms on an H100, more than the host takes to queue an encode


class Contestant(NamedTuple):
    """A way to send a tensor: `encode` makes a packet, `decode` reads it, `wire_bytes` returns its size."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    wire_bytes: Callable[[Any], int]
    upload: Callable[[Any], Any] = lambda packet: None
    """Copies a packet's arrays to the device, the first step of `decode`."""


def bench_codecs(
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = KINDS,
    codecs: Iterable[str | Codec] = DEFAULTS,
    *,
    dtypes: Sequence[str] = ("float32",),
    shapes: Sequence[tuple[int, ...]] | None = None,
    recorded: Mapping[str, Tensor] | None = None,
    others: bool = True,
    seconds: float = 0.3,
    rounds: tuple[int, int] = (3, 15),
    threads: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return a JSON-able record of the costs of every codec on every tensor.

    A tensor of one of `sizes` has 8 samples of as many tokens of 64 values as fit. `shapes` gives shapes instead; `recorded`
    adds named tensors of your own. For float32, `others` also measures plain torch and, on the CPU, numcodecs. Each contestant
    takes about `seconds` for a tensor, within `rounds`. `device` is "cpu" or "cuda".

    >>> result = bench_codecs([1 << 12], ["normal"], ["Quantize(4)"], others=False, rounds=(1, 1))
    >>> [row["wire_bytes"] for row in result["rows"]]
    [2065]
    """
    tensors = {
        f"{kind} {'x'.join(map(str, shape))}{'' if dtype == 'float32' else f' {dtype}'}": (kind, shape, dtype)
        for shape in shapes or [(8, size // 512, 64) for size in sizes]
        for kind in kinds
        for dtype in dtypes
    }
    if others and device == "cpu" and find_spec("numcodecs") is None:
        raise InputError(
            "numcodecs, which is measured on CPUs, is not installed: `pip install numcodecs`, or give `--no-others`."
        )
    rows = []
    with torch_threads(threads):
        parsed = [parse_notation(codec, CODECS) if isinstance(codec, str) else codec for codec in codecs]
        if device == "cpu":
            warm(parsed)
        ours = [_codec(codec, device) for codec in parsed]
        for name, made in [*tensors.items(), *((name, None) for name in recorded or {})]:
            if progress is not None:
                progress(name)
            x = (draw(*made) if made else (recorded or {})[name].contiguous()).to(device)
            contestants = [*ours, *(_plain_torch(x) if others and x.dtype == torch.float32 else [])]
            if others and device == "cpu" and x.dtype == torch.float32:
                contestants += _numcodecs(x)
            rows += _measure(name, x, contestants, seconds, rounds)
    processor = platform.processor() or platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    machine = {"processor": processor, "device": device, "torch": torch.__version__, "threads": threads}
    return {"machine": machine, "rows": rows}


def draw(kind: str, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Tensor:
    """Return a tensor like a gradient (`normal`), an activation (`relu`), or harder than both (`heavy tail`: Student's t, 3)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "relu":
        x.relu_()
    elif kind == "heavy tail":
        chi = torch.zeros(shape)
        for _ in range(3):
            chi += torch.randn(shape, generator=generator).square_()
        x.div_((chi / 3).sqrt_())
    elif kind != "normal":
        raise ValueError(f"`kinds` must be among {', '.join(KINDS)}, but got {kind!r}.")
    return x.to(getattr(torch, dtype))


def break_even_bps(dense_bytes: int, wire_bytes: int, codec_s: float) -> float:
    """Return the bandwidth, in bit/s, below which the link saves more seconds than the codec takes.

    >>> break_even_bps(4_000_000, 500_000, 0.007)
    4000000000.0
    """
    return max(0.0, 8 * (dense_bytes - wire_bytes) / codec_s)


def table(result: Mapping[str, Any]) -> Table:
    """Return the record as a table for the terminal.

    GB/s count what encode reads and writes; the shares are of a copy's rate, for encode and decode.
    """
    machine = result["machine"]
    where = f"{machine['threads']} thread(s)" if machine["device"] == "cpu" else machine["processor"]
    shown = Table(title=f"codecs, {where}; x = one copy of the tensor")
    for title in (
        "tensor",
        "codec",
        "encode",
        "decode",
        "GB/s",
        "of a copy",
        "wire bytes",
        "factor",
        "error",
        "saves below",
    ):
        shown.add_column(title, justify="left" if title in ("tensor", "codec") else "right", overflow="fold")
    last = None
    for row in result["rows"]:
        if last not in (None, row["tensor"]):
            shown.add_section()
        shown.add_row(
            row["tensor"] if row["tensor"] != last else "",
            row["codec"],
            f"{row['encode_memcpys']:.1f}x",
            f"{row['decode_memcpys']:.1f}x",
            f"{row['encode_bytes_per_s'] / 1e9:.1f}",
            f"{row['encode_copy_share']:.0%}, {row['decode_copy_share']:.0%}",
            f"{row['wire_bytes']:,}",
            f"{row['factor']:.2f}",
            f"{row['relative_error']:.2g}",
            format_bandwidth(row["break_even_bps"]) if row["break_even_bps"] else "never",
        )
        last = row["tensor"]
    return shown


def _measure(
    name: str, x: Tensor, contestants: Sequence[Contestant], seconds: float, rounds: tuple[int, int]
) -> list[dict[str, Any]]:
    copy = torch.empty_like(x)
    packets = [contestant.encode(x) for contestant in contestants]
    memcpy_s: list[float] = []
    encode_s: list[list[float]] = [[] for _ in contestants]
    decode_s: list[list[float]] = [[] for _ in contestants]
    start = time.perf_counter()
    timed = _device_seconds if x.is_cuda else seconds_of
    for turn in range(rounds[1]):
        if turn >= rounds[0] and time.perf_counter() - start > seconds * len(contestants):
            break
        for i, contestant in in_turn(list(enumerate(contestants)), turn):
            memcpy_s.append(timed(partial(copy.copy_, x)))
            encode_s[i].append(timed(partial(contestant.encode, x)))
            upload_s = timed(partial(contestant.upload, packets[i])) if x.is_cuda else 0.0
            decode_s[i].append(max(0.0, timed(partial(contestant.decode, packets[i])) - upload_s))
    memcpy = statistics.median(memcpy_s)
    rows = []
    for i, (contestant, packet) in enumerate(zip(contestants, packets, strict=True)):
        encode, decode = statistics.median(encode_s[i]), statistics.median(decode_s[i])
        dense_bytes, wire_bytes = x.nbytes, contestant.wire_bytes(packet)
        rows.append(
            {
                "tensor": name,
                "numel": x.numel(),
                "codec": contestant.name,
                "rounds": len(encode_s[i]),
                "memcpy_s": memcpy,
                "encode_s": encode,
                "decode_s": decode,
                "encode_memcpys": encode / memcpy,
                "decode_memcpys": decode / memcpy,
                "encode_bytes_per_s": (dense_bytes + wire_bytes) / encode,
                "encode_copy_share": (dense_bytes + wire_bytes) * memcpy / (2 * dense_bytes * encode),
                "decode_copy_share": (dense_bytes + wire_bytes) * memcpy / (2 * dense_bytes * decode)
                if decode
                else 0.0,
                "dense_bytes": dense_bytes,
                "wire_bytes": wire_bytes,
                "factor": dense_bytes / wire_bytes,
                "relative_error": _relative_error(x, contestant.decode(packet)),
                "break_even_bps": break_even_bps(dense_bytes, wire_bytes, encode + decode),
            }
        )
    return rows


def _device_seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of a call on the GPU, without waiting for copies to the host.

    The GPU idles before it starts, so that the host can queue the whole call: its time to launch kernels is left out.
    """
    torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with Flight().open():
        start.record()
        result = run()
        end.record()
    torch.cuda.synchronize()
    del result
    return float(start.elapsed_time(end)) / 1e3


def _relative_error(x: Tensor, y: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.float() - y.float()) / torch.linalg.vector_norm(x.float()))


def _codec(codec: Codec, device: str) -> Contestant:
    table = CodecTable([Entry.of(codec)])
    return Contestant(
        repr(codec),
        lambda x: codec.encode(x, _KEY),
        lambda packet: packet.decode(device),
        lambda packet: wire_bytes(table.pack(packet)),
        lambda packet: [to_tensor(array, torch.uint8, device) for array in packet.arrays.values()],
    )


def _plain_torch(x: Tensor) -> list[Contestant]:
    """Return the same methods in plain torch, written as in their papers' code."""
    shape, rows = x.shape, len(x)
    kept = max(1, x.numel() // rows // 10)

    def topk(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(rows, -1)
        indices = flat.abs().topk(kept, dim=1).indices
        return indices.int(), flat.gather(1, indices)

    def masked(packet: tuple[Tensor, Tensor]) -> Tensor:
        indices, values = packet
        return x.new_zeros(rows, x.numel() // rows).scatter_(1, indices.long(), values).view(shape)

    def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = x.min(), x.max()
        return ((x - low) / (high - low) * 15).round().to(torch.uint8), low, high

    def dequantize(packet: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        codes, low, high = packet
        return codes.float() / 15 * (high - low) + low

    width = 1 << (x.numel().bit_length() // 2)
    start = torch.randn(
        x.numel() // (x.numel() // width or 1) if x.numel() % width == 0 else x.numel(), 4, device=x.device
    )

    def low_rank(x: Tensor) -> tuple[Tensor, Tensor]:
        matrix = x.reshape(-1, len(start))
        left = torch.linalg.qr(matrix @ start).Q
        return left, matrix.T @ left

    def weigh(packet: tuple[Tensor, ...]) -> int:
        return sum(part.nbytes for part in packet)

    return [
        Contestant("torch.topk 10 %, int32 indices", topk, masked, weigh),
        Contestant("torch min-max 4 bit, not packed", quantize, dequantize, weigh),
        Contestant("torch PowerSGD rank 4", low_rank, lambda p: (p[0] @ p[1].T).view(shape), weigh),
    ]


def _numcodecs(x: Tensor) -> list[Contestant]:
    low, high = float(x.min()), float(x.max())
    scaled = numcodecs.FixedScaleOffset(offset=low, scale=255 / (high - low), dtype="f4", astype="u1")
    zstd = numcodecs.Blosc(cname="zstd", clevel=1, shuffle=numcodecs.Blosc.SHUFFLE)

    def back(data: Any) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(x.shape)

    return [
        Contestant(
            "numcodecs FixedScaleOffset 8 bit, range known",
            lambda x: scaled.encode(x.numpy()),
            lambda data: torch.from_numpy(scaled.decode(data)).view(x.shape),
            lambda data: int(data.nbytes),
        ),
        Contestant(
            "numcodecs Blosc(zstd 1), lossless", lambda x: zstd.encode(x.numpy()), lambda d: back(zstd.decode(d)), len
        ),
    ]
