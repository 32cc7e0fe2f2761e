"""The cost of the adapter: a transformers model split into layers against the model itself, in one process.

Both sides run forward, loss and backward of the same microbatches in turn, on one thread. Seconds are CPU seconds of the thread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raysim.workloads.hf_layers import chain
from raysim.workloads.hf_model import load_model
from raysim.workloads.splits import DataShape
from raysim_benchmarks.harness import Comparison, alternate, print_comparisons, seconds_of, torch_threads

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
    comparisons = []
    with torch_threads(1):
        for name, (config, shape) in MODELS.items():
            sides = {
                side: partial(seconds_of, run, time.thread_time) for side, run in both_sides(config, shape).items()
            }
            runs = alternate(sides, pairs, warm_up=WARMUP)
            comparisons.append(Comparison({"model": name}, "transformers", "adapter", runs))
    print_comparisons(f"Forward and backward of a microbatch of {BATCH}, median of {pairs} pairs", comparisons)
    results = [comparison.figures() for comparison in comparisons]
    return {"torch": torch.__version__, "pairs": pairs, "batch_size": BATCH, "results": results}


def both_sides(config: dict[str, Any], shape: DataShape) -> dict[str, Callable[[], float]]:
    """Return the transformers model and its layers, with equal weights, as functions that train a microbatch.

    Each returns the loss.
    """
    torch.manual_seed(0)
    model = load_model(shape, config=config).train()
    layers = chain(copy.deepcopy(model)).train()
    model.config.use_cache = False  # training needs no cache of keys and values
    if shape.input_dtype == "int64":
        tokens = torch.randint(shape.num_classes, (BATCH, shape.input_shape[0] + 1))
        x, targets = tokens[:, :-1], tokens[:, 1:]
    else:
        x, targets = torch.randn(BATCH, *shape.input_shape), torch.randint(shape.num_classes, (BATCH,))

    def side(module: nn.Module, logits: Callable[[Tensor], Tensor]) -> Callable[[], float]:
        def run() -> float:
            torch.manual_seed(1)  # seed of dropout
            loss = nn.functional.cross_entropy(logits(x).flatten(0, -2), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            module.zero_grad(set_to_none=True)
            return float(loss.detach())

        return run

    return {"transformers": side(model, lambda x: model(x).logits), "adapter": side(layers, layers)}
