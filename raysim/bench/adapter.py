"""The cost of the adapter in one process: a transformers model as layers beside the model itself, on the same batches.

Both sides run forward, loss and backward of one microbatch on one thread, in turn. Seconds are those of the thread's CPU.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from raysim.bench.intervals import median_interval
from raysim.workloads.hf.chain import chain
from raysim.workloads.hf.load import load_model
from raysim.workloads.splits import DataShape

TEXT = DataShape((128,), "int64", 1000, target_shape=(128,))
PICTURES = DataShape((3, 64, 64), "float32", 10)
_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
MODELS: dict[str, tuple[dict[str, Any], DataShape]] = {
    "llama": ({"model_type": "llama", **_SIZES, "num_key_value_heads": 2}, TEXT),
    "gpt2": ({"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4}, TEXT),
    "vit": ({"model_type": "vit", **_SIZES, "patch_size": 8}, PICTURES),
    "resnet": ({"model_type": "resnet", "hidden_sizes": [64, 128, 256, 512], "depths": [1, 1, 1, 1]}, PICTURES),
}
BATCH = 4
WARMUP = 3


def bench_adapter(*, pairs: int = 51) -> dict[str, Any]:
    """Measure and print; return the figures, with the seconds of every pair."""
    table = Table("model", title=f"Forward and backward of a microbatch of {BATCH}, median of {pairs} pairs")
    for name in ("transformers", "adapter", "ratio", "interval (covers)"):
        table.add_column(name, justify="right")
    results = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (config, shape) in MODELS.items():
            sides = both_sides(config, shape)
            runs = [_pair(sides, pair) for pair in range(-WARMUP, pairs)][WARMUP:]
            ratios = sorted(run["adapter"] / run["transformers"] for run in runs)
            ratio, interval = statistics.median(ratios), median_interval(ratios)
            results.append(
                {
                    "model": name,
                    "runs": runs,
                    "ratio": ratio,
                    "ratio_low": interval.low,
                    "ratio_high": interval.high,
                    "ratio_coverage": interval.coverage,
                }
            )
            seconds = (statistics.median(run[side] for run in runs) for side in ("transformers", "adapter"))
            table.add_row(name, *(f"{1e3 * each:.1f} ms" for each in seconds), f"{ratio:.4f}", str(interval))
    finally:
        torch.set_num_threads(before)
    Console().print(table)
    return {"torch": torch.__version__, "pairs": pairs, "batch_size": BATCH, "results": results}


def both_sides(config: dict[str, Any], shape: DataShape) -> dict[str, Callable[[], float]]:
    """Return the model of transformers and its layers, of equal weights, as functions that train a microbatch.

    Each returns the loss.
    """
    torch.manual_seed(0)
    model = load_model(shape, config=config).train()
    layers = chain(copy.deepcopy(model)).train()
    model.config.use_cache = False  # of keys and values, which training does not need
    if shape.input_dtype == "int64":
        tokens = torch.randint(shape.num_classes, (BATCH, shape.input_shape[0] + 1))
        x, targets = tokens[:, :-1], tokens[:, 1:]
    else:
        x, targets = torch.randn(BATCH, *shape.input_shape), torch.randint(shape.num_classes, (BATCH,))

    def side(module: nn.Module, logits: Callable[[Tensor], Tensor]) -> Callable[[], float]:
        def run() -> float:
            torch.manual_seed(1)  # of dropout
            loss = nn.functional.cross_entropy(logits(x).flatten(0, -2), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            module.zero_grad(set_to_none=True)
            return float(loss.detach())

        return run

    return {"transformers": side(model, lambda x: model(x).logits), "adapter": side(layers, layers)}


def _pair(sides: dict[str, Callable[[], float]], pair: int) -> dict[str, float]:
    """Return the seconds of both sides, the second one first in every other pair."""
    seconds = {}
    for name in list(sides) if pair % 2 == 0 else list(sides)[::-1]:
        start = time.thread_time()
        sides[name]()
        seconds[name] = time.thread_time() - start
    return seconds
