"""The runs that the laws of the pipeline hold for: every memory, direction, model kind and option that changes a step."""

from pathlib import Path
from typing import Any

import pytest

from raysim.schedules.actions import Action, rows_to_csv

GPT: dict[str, Any] = {
    "model": {"name": "gpt", "num_blocks": 3, "width": 16, "num_heads": 2},
    "data": {"name": "topics", "length": 16, "train_samples": 64, "test_samples": 16},
}
ANSWERS = {
    "model": GPT["model"],
    "data": {"name": "brackets", "length": 5, "kinds": 2, "train_samples": 64, "test_samples": 13},
    "metrics": ["exact_match", "accuracy"],
}
TIED = {**GPT, "model": {**GPT["model"], "tied": True}}
DROPOUT = {**GPT, "model": {**GPT["model"], "dropout": 0.2}}
REPLICAS = {"num_replicas": 2, "num_microbatches": 2}
SUBSPACE = {**GPT, "model": {**GPT["model"], "subspace": 4}}
PROJECTED = {**GPT, "model": {**SUBSPACE["model"], "subspace_form": "projected"}}
MARKED = {
    "model": {"name": "own_modules:marked"},
    "data": {"name": "topics", "length": 16, "train_samples": 64, "test_samples": 16},
    "num_stages": None,
    "cuts": ["0", "1", "2"],
}
SKIPS = {"model": {"name": "own_modules:skipping"}, "num_stages": None, "cuts": ["0", "1", "2"]}
ADAM = {"optimizer": {"name": "adamw", "learning_rate": 1e-3}}

# torch's ScheduleZBVZeroBubble: backwards in two parts, and on worker 1 two neighbours, which pass packets to themselves
ZBV = {"schedule": f"Custom({str(Path(__file__).parents[1] / 'golden' / 'zbv.csv')!r})", "num_stages": 4}

RUNS: dict[str, dict[str, Any]] = {
    "identity": {},
    "gpipe": {"schedule": "GPipe"},
    "extra-warmup": {"schedule": "1F1B(extra_warmup=1)"},
    "zero-bubble": {"schedule": "ZBH1", "forward": "AQSGD(Quantize(4))", "backward": "ErrorFeedback(TopK(0.2))"},
    "zero-bubble-gpt": {**DROPOUT, **ADAM, "schedule": "ZBH1", "recompute": True, "dtype": "bfloat16"},
    "interleaved": {"schedule": "Interleaved1F1B(2)", "num_stages": 4, "forward": "AQSGD(TopK(0.3), warmup=0)"},
    "interleaved-tied-clip": {
        **TIED,
        "schedule": "Interleaved1F1B(2)",
        "num_stages": 4,
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 0.1},
    },
    "custom": {**ZBV, "forward": "EF21(TopK(0.3))", "backward": "EF21(Quantize(4))"},
    "custom-tied-clip": {
        **TIED,
        **ZBV,
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 0.1},
    },
    "zero-bubble-h2": {"schedule": "ZBH2", "forward": "ErrorFeedback(TopK(0.2))", "backward": "Quantize(4)"},
    "zbv": {**DROPOUT, **ADAM, "schedule": "ZBV", "num_stages": 4, "backward": "EF21(TopK(0.3))"},
    "dual-pipe-v": {
        **TIED,
        "schedule": "DualPipeV",
        "num_stages": 4,
        "forward": "AQSGD(Quantize(4))",
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 0.1},
    },
    "post-validated": {
        "weights": "PostValidated",
        "schedule": "ZBH2",
        "forward": "TopK(0.2)",
        "optimizer": {"learning_rate": 0.1, "momentum": 0.9, "clip_norm": 1.0},
    },
    "topk-quantize": {"forward": "TopK(0.1)", "backward": "Quantize(4)"},
    "per-boundary": {"forward": ["TopK(0.3)", "Quantize(2)"], "backward": ["Cast('bfloat16')", "Nonzero"]},
    "stochastic": {"forward": "Quantize(4, rounding='stochastic')", "backward": "Quantize(3, rounding='stochastic')"},
    "feedback": {"forward": "ErrorFeedback(TopK(0.1))", "backward": "ErrorFeedback(TopK(0.1), key='sample')"},
    "mixed": {"forward": "MixedErrorFeedback(TopK(0.1))", "backward": "MixedErrorFeedback(TopK(0.2), union=True)"},
    "ef21": {"forward": "EF21(TopK(0.2))", "backward": "EF21(Quantize(4), key='link')"},
    "aqsgd": {"forward": "AQSGD(Quantize(4))", "backward": "Quantize(8)"},
    "aqsgd-capacity": {"forward": "AQSGD(TopK(0.3), warmup=0, dtype='bfloat16', capacity=24)"},
    "shared": {"forward": "TopK(0.3)", "backward": "Quantize(8)", "shared_indices": True},
    "recompute": {"recompute": True, **DROPOUT},
    "clip": {"optimizer": {"learning_rate": 0.1, "clip_norm": 0.5}},
    "gpt": {**GPT, **ADAM, "forward": "TopK(0.1)"},
    "gpt-tied": {**TIED, **ADAM},
    "gpt-tied-clip": {**TIED, "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 0.1}},
    "gpt-dropout": {**DROPOUT, **ADAM},
    "answers": {**ANSWERS, **ADAM, "forward": "AQSGD(Quantize(2, rounding='stochastic'))", "backward": "Quantize(4)"},
    "gpt-tied-muon": {**TIED, "loss": {"label_smoothing": 0.1}, "optimizer": {"name": "muon", "learning_rate": 1e-2}},
    "mlp-rmsprop": {"model": {"name": "mlp", "width": 8}, "optimizer": {"name": "rmsprop", "centered": True}},
    "bfloat16": {**GPT, "dtype": "bfloat16", "forward": "TopK(0.3)"},
    "batchnorm": {
        "model": {"name": "tests.support.models:normed"},
        "num_stages": None,
        "cuts": ["norm1", "norm2"],
        "evaluate_batchnorm_batches": 2,
    },
    "no-parameters": {"model": {"name": "tests.support.models:flat"}, "num_stages": None, "cuts": ["0", "1"]},
    "no-parameters-clip": {
        "model": {"name": "tests.support.models:flat"},
        "num_stages": None,
        "cuts": ["0", "1"],
        "optimizer": {"learning_rate": 0.1, "clip_norm": 0.1},
    },
    "frozen-tied": {**GPT, "model": {"name": "tests.support.models:frozen"}, "num_stages": None, "cuts": ["1"]},
    "replicas": {**REPLICAS, "forward": "TopK(0.3)", "backward": "Quantize(4, rounding='stochastic')"},
    "replicas-feedback": {**REPLICAS, "num_stages": 2, "forward": "ErrorFeedback(TopK(0.1), key='sample')"},
    "replicas-tied-clip": {**REPLICAS, **TIED, "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 0.1}},
    "replicas-fused": {**REPLICAS, **TIED, **ADAM, "fused_embedding": True},
    "tied-feedback": {**REPLICAS, **TIED, **ADAM, "tied_gradient": "ErrorFeedback(TopK(0.3))"},
    "tied-two-shot": {**TIED, "tied_gradient": "TwoShot(Quantize(8))", "compress_from": 2},
    "tied-fused-low-rank": {
        **REPLICAS,
        **TIED,
        "fused_embedding": True,
        "replica_gradient": "TopK(0.3)",
        "tied_gradient": "PowerSGD(1)",
    },
    "replicas-batchnorm": {
        **REPLICAS,
        "model": {"name": "tests.support.models:normed"},
        "evaluate_batchnorm_batches": 2,
    },
    "replicas-gravac": {
        **REPLICAS,
        "replica_gradient": "GraVAC(2, 50, epsilon=0.5, window=1, ewma_alpha=1, min_values=16)",
    },
    "links-gravac": {
        "forward": "GraVAC(epsilon=0.5, window=1, promote='passing')",
        "backward": "GraVAC(epsilon=0.5, window=2, ladder='bits', memory='slot')",
    },
    "replicas-marina": {
        **REPLICAS,
        "forward": "TopK(0.3)",
        "backward": "Quantize(4, rounding='stochastic')",
        "replica_gradient": "MARINA(RandomK(0.25, unbiased=True), probability=0.4, min_values=16)",
    },
    "replicas-gossip": {
        **REPLICAS,
        "forward": "ErrorFeedback(TopK(0.3))",
        "optimizer": {"learning_rate": 0.1, "momentum": 0.9, "clip_norm": 0.5},
        "replica_gradient": "PowerGossip(rank=2, min_values=16)",
    },
    "replicas-marina-tied": {
        **REPLICAS,
        **TIED,
        "schedule": "ZBH1",
        "recompute": True,
        "model": {**TIED["model"], "dropout": 0.2},
        "replica_gradient": "MARINA(Natural, probability=0.3, min_values=16)",
    },
    "acgc": {"forward": "ACGC(0.1)"},
    "replicas-acgc": {**REPLICAS, "forward": ["ACGC(0.1)", "TopK(0.3)"], "replica_gradient": "EF21(TopK(0.3))"},
    "replicas-optimus": {
        **REPLICAS,
        **TIED,
        **ADAM,
        "backward": "Epilogue(LazyErrorPropagation(WarmStart(LowRank(2))))",
        "replica_gradient": "PowerSGD(1, min_values=16)",
        "fused_embedding": True,
    },
    "replicas-dgc": {
        **REPLICAS,
        "optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9},
        "replica_gradient": "DGC(0.1, ramp=1, min_values=16)",
    },
    "replicas-local": {
        **REPLICAS,
        "forward": "ErrorFeedback(TopK(0.3))",
        "optimizer": {"learning_rate": 0.05},
        "replica_gradient": [
            "DiLoCo(3, codec=Gathered(ErrorFeedback(TopK(0.3)), min_values=16))",
            "DeMo(kept=8, side=16)",
            "SparseLoCo(3, kept=4, side=8, min_values=16)",
        ],
    },
    "replicas-apart": {
        **REPLICAS,
        "optimizer": {"learning_rate": 0.1, "momentum": 0.9, "clip_norm": 0.5},
        "replica_gradient": ["StreamingDiLoCo(3, delay=1, blend=0.5)", "SPARTA(share=0.1)", "DiLoCo(1, momentum=0.5)"],
    },
    "look-ahead": {"replica_gradient": "DiLoCo(3, rate=0.5, momentum=0.5)"},
    "four-replicas": {"num_replicas": 4, "num_microbatches": 1, "num_stages": 1},
    "bottleneck-residual": {**GPT, **ADAM, "bottleneck": 4, "bottleneck_form": "residual", "forward": "Quantize(8)"},
    "bottleneck-orthonormal": {
        "bottleneck": 2,
        "bottleneck_form": "orthonormal",
        "backward": "ErrorFeedback(TopK(0.2))",
    },
    "bottleneck": {"bottleneck": 2, "forward": "Quantize(8)", "backward": "ErrorFeedback(TopK(0.2))"},
    "stashed": {
        **DROPOUT,
        "weights": "Stashed",
        "recompute": True,
        "forward": "ErrorFeedback(TopK(0.3))",
        "backward": "ErrorFeedback(TopK(0.3))",
        "optimizer": {"name": "nadam", "learning_rate": 1e-3, "clip_norm": 0.1},
    },
    "double-buffered": {
        **REPLICAS,
        **TIED,
        **ADAM,
        "num_stages": 2,
        "weights": "DoubleBuffered",
        "forward": "AQSGD(Quantize(4))",
        "replica_gradient": "PowerSGD(1, min_values=16)",
    },
    "pipemare": {"weights": "PipeMare(4)", "schedule": "1F1B(ahead=2)", "optimizer": {"learning_rate": 0.05}},
    "predicted": {**ADAM, "weights": "Predicted", "forward": "EF21(TopK(0.3))"},
    "replicas-differ": {
        **REPLICAS,
        "forward": {"0": ["TopK(0.5)", "Identity"], "1": "AQSGD(Quantize(4))"},
        "backward": {"1": "ErrorFeedback(TopK(0.2))"},
        "replica_gradient": "ErrorFeedback(TopK(0.3))",
    },
    "subspace": {**SUBSPACE, **ADAM, "forward": "Quantize(8)", "backward": "ErrorFeedback(TopK(0.5))"},
    "replicas-subspace": {
        **REPLICAS,
        **SUBSPACE,
        "dtype": "bfloat16",
        "optimizer": {"name": "muon", "learning_rate": 1e-2},
        "replica_gradient": "DiLoCo(3)",
    },
    "replicas-projected": {
        **REPLICAS,
        **PROJECTED,
        "recompute": True,
        "schedule": "ZBH1",
        "forward": "AQSGD(Quantize(4))",
        "optimizer": {"name": "adamw", "learning_rate": 1e-2, "clip_norm": 0.1},
    },
    "one-stage": {"num_stages": 1},
    "one-microbatch": {"num_microbatches": 1},
}


def with_slow(names, *slow):
    """Return names as parameters, some of them marked slow."""
    assert {*slow} < {*names}
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


def few_of_each(variants, most, kind):
    """Return variants as parameters, marked slow but for the first `most` of each kind."""
    kinds = [kind(variant) for variant in variants]
    return [
        pytest.param(variant, marks=pytest.mark.slow if kinds[:i].count(kinds[i]) >= most else ())
        for i, variant in enumerate(variants)
    ]


def shares(*parts, names=RUNS, of=14):
    """Return the names of runs as parameters, marked slow but for these parts (from 0) of so many.

    Laws over all runs take different parts, so that most runs are in the fast suite with a law.
    """
    places = {name: place for place, name in enumerate(RUNS) if name in names}
    return with_slow(places, *(name for name, place in places.items() if place % of not in parts))


def two_workers(num_stages, num_microbatches, path):
    """Write rows for two workers that own every other stage, all weights' backwards at the end; return their notation."""
    rows = []
    for worker in range(min(2, num_stages)):
        own = range(worker, num_stages, 2)
        passes = [(stage, "F") for stage in own] + [(stage, "B") for stage in reversed(own)]
        passes += [(stage, "W") for stage in own]
        rows.append([Action(stage, op, m) for stage, op in passes for m in range(num_microbatches)])
    path.write_text(rows_to_csv(rows))
    return f"Custom({str(path)!r})"
