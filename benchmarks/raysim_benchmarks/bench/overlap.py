"""Share of a codec's time that a GPU hides behind matrix products, with the codec on a stream of its own."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from raysim.codecs import Codec
from raysim.codecs.transfers import Flight
from raysim_benchmarks.harness import in_turn

DEFAULTS = ("Quantize(8, per='row')", "Quantize(4, per='row')", "TopK(0.1)", "Hadamard(Quantize(4))")
_KEY = 1


def bench_overlap(
    codecs: Sequence[Codec],
    *,
    numel: int = 1 << 22,
    width: int = 4096,
    rounds: int = 7,
    device: str = "cuda",
) -> dict[str, Any]:
    """Return the seconds of only encodes and decodes, of only matrix products, and of both together, and the hidden share.

    The tensor has `numel` float32 values; the products are of `width` x `width` matrices in bfloat16, as many as take as long as the
    codec. The share is (codec + products - together) / codec: 1 if the codec costs nothing, 0 if they take turns, as on a CPU.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, numel // 8192, 1024, generator=generator).to(device)
    left = torch.randn(width, width, generator=generator).to(device, torch.bfloat16)
    right = left.clone()

    def products(count: int) -> Callable[[], Any]:
        return lambda: [torch.mm(left, right) for _ in range(count)]

    rows = []
    product_s = statistics.median(_seconds([products(1)], device) for _ in range(rounds))
    for codec in codecs:
        packet = codec.encode(x, _KEY)
        actions: dict[str, Callable[[], Any]] = {
            "encode": partial(codec.encode, x, _KEY),
            "decode": partial(packet.decode, device),
        }
        for action, run in actions.items():
            alone = statistics.median(_seconds([run], device) for _ in range(rounds))
            beside = products(max(1, round(alone / product_s)))
            sides = {"codec": [run], "products": [beside], "together": [run, beside]}
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(rounds):
                for name, runs in in_turn(list(sides.items()), turn):
                    seconds[name].append(_seconds(runs, device))
            medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
            hidden = (medians["codec_s"] + medians["products_s"] - medians["together_s"]) / medians["codec_s"]
            rows.append({"codec": repr(codec), "action": action, **medians, "hidden": hidden})
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "numel": numel, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """Return the record as a table for the terminal."""
    shown = Table(title=f"codecs beside matrix products, {result['device']}, {result['numel']:,} float32 values")
    for title in ("codec", "action", "codec alone", "products alone", "together", "hidden"):
        shown.add_column(title, justify="left" if title in ("codec", "action") else "right")
    for row in result["rows"]:
        times = (f"{1e6 * row[name]:,.0f} us" for name in ("codec_s", "products_s", "together_s"))
        shown.add_row(row["codec"], row["action"], *times, f"{row['hidden']:.0%}")
    return shown


def _seconds(runs: list[Callable[[], Any]], device: str) -> float:
    """Return the wall seconds of all `runs`, each on a stream of its own, until the device has finished them."""
    gpu = device == "cuda"
    streams: list[Any] = [contextlib.nullcontext()] * len(runs)
    if gpu:
        streams = [torch.cuda.stream(torch.cuda.Stream()) for _ in runs]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    start = time.perf_counter()
    with Flight().open():
        for run, stream in zip(runs, streams, strict=True):
            with stream:
                run()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start
