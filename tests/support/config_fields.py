"""What every configuration field does: for each an override, and what of the run it must change.

`loss`       the losses of the steps
`cost`       what links carry, or what the plan counts (bytes, packets, memory), while losses may stay as they are
`records`    which rows and files the run leaves
`branch`     what it begins with, which takes another run: see `training/test_branch.py`
`placement`  where, or within what limits, it computes: nothing that one machine without a GPU need show

The changes apply to `conftest.SMALL`, with what `base` adds to it. A field that is not here fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines import REPLICAS, TIED

KINDS = ("loss", "cost", "records", "branch", "placement")


@dataclass(frozen=True)
class Change:
    values: Mapping[str, Any]
    changes: str
    base: Mapping[str, Any] = field(default_factory=dict)


def optimizer(base: Mapping[str, Any] | None = None, **values: Any) -> Change:
    """A change of the loss by one key of the optimiser, on top of `base`."""
    base = {"learning_rate": 0.1, "momentum": 0.9} if base is None else base
    return Change({"optimizer": {**base, **values}}, "loss", {"optimizer": base})


ADAMW = {"name": "adamw", "learning_rate": 0.01}
COSINE = {"learning_rate": 0.1, "decay": "cosine"}

ADAPTIVE = {
    **REPLICAS,
    "replica_gradient": "GraVAC(1.1, 2.0, window=2)",
    "clock": "100mbps",
    "profile": "T4",
    "steps": 4,
}

FIELD_CHANGES: dict[str, Change] = {
    "name": Change({"name": "other"}, "records"),
    "model": Change({"model": {"name": "cnn", "width": 6}}, "loss"),
    "data": Change({"data": {"name": "digits", "train_samples": 48, "test_samples": 20}}, "loss"),
    "loss": Change({"loss": {"label_smoothing": 0.1}}, "loss"),
    "metrics": Change({"metrics": ["f1", "accuracy"]}, "records"),
    "num_stages": Change({"num_stages": 2}, "cost"),
    "cuts": Change({"cuts": ["conv1", "conv3"]}, "cost", {"num_stages": None, "cuts": ["conv2", "conv4"]}),
    "bottleneck": Change({"bottleneck": 2}, "loss"),
    "bottleneck_form": Change({"bottleneck_form": "residual"}, "loss", {"bottleneck": 2}),
    "num_microbatches": Change({"num_microbatches": 2}, "cost"),
    "num_replicas": Change({"num_replicas": 2}, "cost", {"num_microbatches": 2}),
    "replica_gradient": Change({"replica_gradient": "TopK(0.1)"}, "loss", REPLICAS),
    "compress_from": Change({"compress_from": 1}, "loss", {"forward": "TopK(0.1)"}),
    "fused_embedding": Change({"fused_embedding": True}, "cost", {**REPLICAS, **TIED}),
    "tied_gradient": Change({"tied_gradient": "ErrorFeedback(TopK(0.1))"}, "loss", TIED),
    "clock": Change({"clock": "10gbps"}, "records", ADAPTIVE),
    "profile": Change({"profile": "V100"}, "records", ADAPTIVE),
    "transport": Change({"transport": "gloo"}, "records", ADAPTIVE),
    "codec_speed": Change({"codec_speed": 1e7}, "records", ADAPTIVE),
    "schedule": Change({"schedule": "GPipe"}, "cost"),
    "weights": Change({"weights": "DoubleBuffered"}, "loss"),
    "forward": Change({"forward": "TopK(0.1)"}, "loss"),
    "backward": Change({"backward": "Quantize(4)"}, "loss"),
    "shared_indices": Change({"shared_indices": True}, "loss", {"forward": "TopK(0.3)"}),
    "optimizer.name": Change({"optimizer": {"name": "adamw"}}, "loss", {"optimizer": {"name": "sgd"}}),
    "optimizer.learning_rate": optimizer(learning_rate=0.05),
    "optimizer.momentum": optimizer(momentum=0.5),
    "optimizer.weight_decay": optimizer(weight_decay=0.1),
    "optimizer.betas": optimizer(ADAMW, betas=[0.5, 0.9]),
    "optimizer.epsilon": optimizer(ADAMW, epsilon=0.1),
    "optimizer.warmup_steps": optimizer(warmup_steps=3),
    "optimizer.decay": optimizer(decay="linear"),
    "optimizer.decay_at": optimizer({"learning_rate": 0.1, "decay": "steps", "decay_at": [2]}, decay_at=[1]),
    "optimizer.decay_epochs": optimizer(COSINE, decay_epochs=3),
    "optimizer.decay_every": optimizer(COSINE, decay_every="epoch"),
    "optimizer.clip_norm": optimizer(clip_norm=0.1),
    "batch_size": Change({"batch_size": 32}, "loss"),
    "steps": Change({"steps": 4}, "records"),
    "epochs": Change({"epochs": 2}, "records", {"steps": None, "epochs": 1}),
    "report_to": Change({"report_to": ["tensorboard"]}, "records"),
    "start": Change({"start": "results/dense@2"}, "branch"),
    "seed": Change({"seed": 1}, "loss"),
    "dtype": Change({"dtype": "bfloat16"}, "loss"),
    "loss_scale": Change({"loss_scale": 2.0}, "loss", {"dtype": "float16"}),
    "device": Change({"device": "cpu"}, "placement"),
    "tf32": Change({"tf32": True}, "placement"),
    "deterministic": Change({"deterministic": True}, "placement"),
    "threads_per_stage": Change({"threads_per_stage": 2}, "placement"),
    "cpus_per_stage": Change({"cpus_per_stage": 0.5}, "placement"),
    "gpus_per_stage": Change({"gpus_per_stage": 0}, "placement"),
    "placement": Change({"placement": "pack"}, "placement"),
    "recompute": Change({"recompute": True}, "cost"),
    "checkpoint_every_steps": Change({"checkpoint_every_steps": 1}, "records"),
    "checkpoint_at_steps": Change({"checkpoint_at_steps": [0]}, "records"),
    "evaluate_every_steps": Change({"evaluate_every_steps": 2}, "records"),
    "evaluate_samples": Change({"evaluate_samples": 7}, "records"),
    "evaluate_batchnorm_batches": Change({"evaluate_batchnorm_batches": 1}, "records"),
    "profile_every_steps": Change({"profile_every_steps": 1}, "records"),
    "timeout_s": Change({"timeout_s": 60}, "placement"),
    "grace_s": Change({"grace_s": 5}, "placement"),
}
