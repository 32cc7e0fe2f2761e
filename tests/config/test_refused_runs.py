"""Settings that do not fit one another, the model or the data, each refused in its sentence before anything starts."""

from typing import Any

import pytest
from pipelines import ADAM, GPT, MARKED, PROJECTED, REPLICAS, RUNS, SKIPS, SUBSPACE, TIED

from raysim.config import ConfigError
from raysim.pipeline.prepare import prepare

FOUR = {"num_replicas": 4, "num_microbatches": 1}
REFUSED: dict[str, dict[str, Any]] = {
    "`num_microbatches` must divide `batch_size` (16), but got 4 on each of 3 replicas.": {"num_replicas": 3},
    "`replica_gradient` has no effect with one replica. Leave it out, or set `num_replicas`.": {
        "replica_gradient": "TopK(0.1)"
    },
    "`fused_embedding` has no effect with one replica. Leave it out, or set `num_replicas`.": {"fused_embedding": True},
    "`optimizer.clip_norm` must be left out with DGC(0.1), whose averages hold the momentum: sums of gradients would be "
    "clipped as one gradient is. Write DGC(..., clip_norm=0.5), which clips gradients first, in a file without the key.": {
        "num_replicas": 2,
        "replica_gradient": "DGC(0.1)",
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "clip_norm": 0.5},
    },
    **{
        f"`optimizer.{option}` must be left out with DGC(0.1), which keeps its own momentum, but got {value}.": {
            "num_replicas": 2,
            "replica_gradient": "DGC(0.1)",
            "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, option: value},
        }
        for option, value in (("nesterov", True), ("dampening", 0.5))
    },
    "`fused_embedding` needs parameters that are tied between stages, and this model has none.": {
        "num_replicas": 2,
        "fused_embedding": True,
    },
    "`replica_gradient` must be one method or a list with one per stage (3), but got 1.": {
        "num_replicas": 2,
        "replica_gradient": ["Identity"],
    },
    "`forward` and `backward` must be codecs without a memory with MARINA(Natural), which doubles messages between stages "
    "in some steps, but got ErrorFeedback(TopK(0.1)).": {
        "num_replicas": 2,
        "replica_gradient": "MARINA(Natural)",
        "backward": "ErrorFeedback(TopK(0.1))",
    },
    "`replica_gradient` cannot be PowerGossip with parameters that are tied between stages: their copies would diverge.": {
        **TIED,
        "num_replicas": 2,
        "replica_gradient": "PowerGossip",
    },
    "`replica_gradient` at stage 2: `rank` must be at most 32, the rank of the largest matrix of the stage "
    "(hidden.1.weight), but got 99.": {"num_replicas": 2, "replica_gradient": "PowerGossip(99)"},
    "`profile` has no effect with `clock` = 'measured'. Leave it out, or name a network.": {"profile": "T4"},
    "`tied_gradient` needs parameters that are tied between stages, and this model has none.": {
        "tied_gradient": "TopK(0.1)"
    },
    "`tied_gradient` must be a method that averages the gradients of every step by themselves, such as "
    "'ErrorFeedback(TopK(0.01))' or 'PowerSGD(8)', but got DiLoCo(10).": {**TIED, "tied_gradient": "DiLoCo(10)"},
    "`tied_gradient`: `rank` must be at most 16, the rank of the largest matrix of the stage (embedding.token.weight), but got 99.": {
        **TIED,
        "tied_gradient": "PowerSGD(99)",
    },
    "`tied_gradient` has no effect with `schedule` = ZBV, which keeps the stages that share a parameter on one worker. Leave it out.": {
        **TIED,
        "num_stages": 4,
        "schedule": "ZBV",
        "tied_gradient": "TopK(0.1)",
    },
    "`tied_gradient` must be a valid string, but got ['TopK(0.1)'].": {**TIED, "tied_gradient": ["TopK(0.1)"]},
    "`replica_gradient` at stage 0: `steps` of DiLoCo(4) must divide the 6 steps of the run, or its last steps would never "
    "be averaged, but got 4.": {**REPLICAS, "replica_gradient": "DiLoCo(4)"},
    "`optimizer.clip_norm` must be left out if replicas diverge at some stages only: clipped by their own norms, they "
    "would diverge at all stages.": {
        **REPLICAS,
        "optimizer": {"learning_rate": 0.1, "clip_norm": 0.5},
        "replica_gradient": ["DiLoCo(3)", "Identity", "DiLoCo(3)"],
    },
    "`replica_gradient` cannot be DiLoCo(3) with parameters that are tied between stages: their copies would diverge.": {
        **REPLICAS,
        **TIED,
        "replica_gradient": "DiLoCo(3)",
    },
    "`replica_gradient` at stage 0: `rank` must be at most 4, the rank of the largest matrix of the stage "
    "(conv1.0.weight), but got 31.": {**REPLICAS, "replica_gradient": "DiLoCo(3, codec=PowerSGD(31, min_values=16))"},
    "`replica_gradient` at stage 0: `sites` must be at most the number of replicas (4), but got 5.": {
        **FOUR,
        "replica_gradient": "HALoS(1, sites=5, updates=2)",
    },
    "`replica_gradient` at stage 0: `steps` times `updates` of HALoS(2, updates=2) (4) must divide the 6 steps of the run, "
    "or its last steps would never be merged.": {**FOUR, "replica_gradient": "HALoS(2, updates=2)"},
    "`replica_gradient` at stage 0: `optimizer.momentum` must be 0 with Dion(2), which keeps a momentum itself, but got 0.9.": {
        **FOUR,
        "replica_gradient": "Dion(2)",
    },
    "`optimizer.name` must be muon with MuLoCo(3), but got 'sgd'.": {**FOUR, "replica_gradient": "MuLoCo(3)"},
    "`replica_gradient` at stage 0: `optimizer.momentum` must be 0 with DeMo, which keeps a momentum itself, but got 0.9.": {
        **FOUR,
        "replica_gradient": "DeMo",
        "optimizer": {"momentum": 0.9},
    },
    "`replica_gradient` at stage 2: `rank` must be at most 32, the rank of the largest matrix of the stage "
    "(hidden.1.weight), but got 400.": {**FOUR, "replica_gradient": "EDGC(400)"},
    "`num_microbatches` must be at least 3 with DoubleBuffered, the number in flight at the first stage, but got 2.": {
        "weights": "DoubleBuffered",
        "num_microbatches": 2,
    },
    "`num_microbatches` must be at least 5 with DoubleBuffered, the number in flight at the first stage, but got 4.": {
        "weights": "DoubleBuffered",
        "schedule": "1F1B(ahead=2)",
    },
    "`num_replicas` must be 1 with Stashed, which updates after each microbatch, while replicas average once a step, but got 2.": {
        "weights": "Stashed",
        **REPLICAS,
    },
    "`replica_gradient` must be a method that averages the gradients of a step with Stashed(update='step'), but got DiLoCo(2).": {
        "weights": "Stashed(update='step')",
        "replica_gradient": "DiLoCo(2)",
    },
    "`replica_gradient` cannot be DGC(0.1) with Predicted(update='step'): it keeps the momentum by which weights are predicted.": {
        "weights": "Predicted(update='step')",
        **REPLICAS,
        "replica_gradient": "DGC(0.1)",
    },
    "`forward` cannot be ACGC(0.1) with Stashed: it measures one version of the weights.": {
        "weights": "Stashed",
        "forward": "ACGC(0.1)",
    },
    "`optimizer.name` must be sgd, adam or adamw with Predicted, which extrapolates their updates, but got 'adagrad'.": {
        "weights": "Predicted",
        "optimizer": {"name": "adagrad"},
    },
    "`optimizer.nesterov` must be left out with Predicted, which predicts weights from the momentum alone, but got True.": {
        "weights": "Predicted",
        "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    },
    "`optimizer.momentum` must be above 0 with Predicted, which predicts weights from it, but got None.": {
        "weights": "Predicted",
        "optimizer": {"name": "sgd"},
    },
    "`dtype` must be float32 with PipeMare(9), whose backwards do not read the weights that were rounded for the forwards, "
    "but got bfloat16.": {"weights": "PipeMare(9)", "dtype": "bfloat16"},
    "`weights`: `update` must be one of microbatch, step, but got 'epoch' (in \"Stashed(update='epoch')\").": {
        "weights": "Stashed(update='epoch')"
    },
    "`weights`: `steps` must be an integer of at least 1, but got 0 (in 'PipeMare(0)').": {"weights": "PipeMare(0)"},
    "`weights`: `decay` must be below 1, or the average of updates stays zero, but got 1 (in 'PipeMare(9, decay=1)').": {
        "weights": "PipeMare(9, decay=1)"
    },
    "`weights` cannot be Stashed with parameters that are tied between stages: their copies would diverge. Use 'DoubleBuffered'.": {
        **TIED,
        "weights": "Stashed",
    },
    "`weights` cannot be PipeMare(3, update='step') with parameters that are tied between stages: their copies would "
    "diverge. Use 'DoubleBuffered'.": {**TIED, "weights": "PipeMare(3, update='step')"},
    "`optimizer.clip_norm` must be left out with DoubleBuffered and parameters that are tied between stages: without a "
    "flush each stage is clipped by its own norm, and the copies would diverge.": {
        **TIED,
        "weights": "DoubleBuffered",
        "optimizer": {"clip_norm": 1.0},
    },
    "`compress_from` has no effect without compression. Leave it out.": {"compress_from": 3},
    "`compress_from` must be below 6, where the run ends, but got 6.": {"forward": "TopK(0.1)", "compress_from": 6},
    "`compress_from` must be left out with StreamingDiLoCo(3, delay=1, blend=0.5), whose replicas exchange parameters from "
    "the first step on. To train densely before, let a run `start` from a dense one.": {
        "compress_from": 3,
        **RUNS["replicas-apart"],
    },
    "`replica_gradient` cannot be DiLoCo(3) at stage 0, whose weights are constrained after each update: exchanged "
    "parameters would violate the constraint.": {**PROJECTED, **REPLICAS, "replica_gradient": "DiLoCo(3)"},
    "`weights` cannot be Predicted at stage 0, whose weights are constrained after each update: predicted ones would not be.": {
        **PROJECTED,
        **ADAM,
        "weights": "Predicted",
    },
    "`bottleneck` needs one tensor at a boundary, but several cross after layer `block0`.": {
        **SUBSPACE,
        "bottleneck": 2,
    },
    "`forward` cannot be ACGC(0.1) at boundary 0, where several tensors cross.": {**SUBSPACE, "forward": "ACGC(0.1)"},
    "Layer `2`: At least one tensor that crosses a boundary must hold floating-point numbers, and the others integers or "
    "booleans, but got `one` (float32), `two` (complex64).": {"model": "own_modules:complex_beside", "num_stages": 1},
    "`forward` must name tensors that cross a boundary (hidden, skip, place, mask, late), but got 'hiden'.": {
        **SKIPS,
        "forward": {"hiden": "TopK(0.1)"},
    },
    "`backward` must name tensors that cross boundary 2 (hidden, skip, late), but got 'place'.": {
        **SKIPS,
        "backward": ["Identity", "Identity", {"place": "TopK(0.1)"}],
    },
    "`forward` must name tensors that cross a boundary (one without a name), but got 'hidden'.": {
        "forward": {"hidden": "TopK(0.1)"}
    },
    "`forward.mask` must be Identity or be left out, since `mask` holds integers or booleans, which are sent as they are, "
    "but got TopK(0.1).": {**SKIPS, "forward": {"mask": "TopK(0.1)"}},
    "`bottleneck` needs one tensor at a boundary, but several cross after layer `0`.": {**SKIPS, "bottleneck": 2},
    "`replica_gradient` cannot be MARINA(QSGD(7)) if several tensors cross a boundary.": {
        **MARKED,
        **REPLICAS,
        "replica_gradient": "MARINA(QSGD(7))",
    },
    "`optimizer.name` = 'muon' needs matrices other than embeddings and the last layer, and this model has none. Use 'adamw'.": {
        "optimizer": {"name": "muon"},
        "num_stages": 2,
        "model": {"name": "models:normed"},
    },
    "`model` = 'models:untrained' must have parameters to train, but none of its 4 has `requires_grad` = True. Unfreeze some.": {
        "num_stages": 2,
        "model": {"name": "models:untrained"},
    },
    "`codec_speed` has no effect with `clock` = 'measured'. Leave it out, or name a network.": {"codec_speed": 1e9},
    "`loss_scale` must be 1 with ACGC(0.1), which measures gradients, but got 4096.": {
        "dtype": "float16",
        "forward": "ACGC(0.1)",
    },
    "`metrics` can have 'exact_match' only if the targets are tokens, those of the prompt -100: set `data` to 'addition', "
    "'brackets' or 'copying', or to a function of your own with such targets.": {**GPT, "metrics": "exact_match"},
    "`schedule` must be 1F1B with Stashed, which runs without a flush, but got GPipe.": {
        "weights": "Stashed",
        "schedule": "GPipe",
        "num_stages": 4,
    },
    "`schedule` must be 1F1B with Stashed, which runs without a flush, but got ZBH1.": {
        "weights": "Stashed",
        "schedule": "ZBH1",
        "num_stages": 4,
    },
    "`schedule` must be 1F1B with Stashed, which runs without a flush, but got Interleaved1F1B(2).": {
        "weights": "Stashed",
        "schedule": "Interleaved1F1B(2)",
        "num_stages": 4,
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_settings_that_do_not_fit_are_refused_before_anything_starts(small, sentence):
    with pytest.raises(ConfigError) as error:
        prepare(small(**REFUSED[sentence]))
    assert str(error.value) == sentence
