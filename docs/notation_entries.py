"""The parts of docs/notation that are in no class: pages, and an example and the use of each name.

`generate_notation.py` writes the pages.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """An example of a notation, and when to use it."""

    example: str
    use: str


class Page(NamedTuple):
    """A page of one kind of notation."""

    kind: str
    title: str
    keys: str
    introduction: str


ENTRIES = {
    "codec": {
        "Identity": Entry("Identity", "The dense baseline that every other setting is compared with."),
        "Cast": Entry("Cast('bfloat16')", "Half the bytes at little risk: a first step."),
        "Quantize": Entry(
            "Quantize(4)",
            "A first choice on slow links: 4 to 8 bits. For trained transformers with `per='row'` or `'block'`.",
        ),
        "NonUniform": Entry("NonUniform(4)", "Few bits for values far from uniformly distributed."),
        "Rotated": Entry(
            "Rotated(4)", "A first choice for trained transformers, whose tokens have massive activations: 3 or 4 bits."
        ),
        "MX": Entry("MX('e2m1')", "Block floating point, as accelerators store it: 4 or 8 bits."),
        "Mean": Entry("Mean", "Values of a sparse codec with a common sign."),
        "QSGD": Entry("QSGD(4)", "An unbiased codec with a choice of bits."),
        "TopK": Entry("TopK(0.1)", "Tensors with few large and many small values. On gradients, use error feedback."),
        "Nonzero": Entry("Nonzero", "Lossless, for activations after a ReLU."),
        "RandomK": Entry("RandomK(0.1)", "Sparsity without positions on the wire."),
        "EstimatedTopK": Entry(
            "EstimatedTopK(0.1, 'sampled')",
            "Measures what published threshold estimates lose; `TopK` is exact and no slower here.",
        ),
        "LowRank": Entry("LowRank(4)", "Gradients of transformers, which are low rank."),
        "Hadamard": Entry(
            "Hadamard(Quantize(4))",
            "Few bits if single outliers stretch the range; for trained transformers around `Quantize(4, per='row')`.",
        ),
    },
    "compressor": {
        "Plain": Entry("TopK(0.1)", "Any codec without a memory; written as the codec itself."),
        "ErrorFeedback": Entry(
            "ErrorFeedback(Quantize(4))", "Gradients. On activations of shuffled data use `key='sample'`."
        ),
        "MixedErrorFeedback": Entry("MixedErrorFeedback(TopK(0.1))", "Comparison with plain error feedback."),
        "NoiseFeedback": Entry("NoiseFeedback(TopK(0.1))", "The control of an experiment on error feedback."),
        "EF21": Entry("EF21(TopK(0.1))", "Messages that change slowly."),
        "AQSGD": Entry(
            "AQSGD(Quantize(4))",
            "Activations of fine-tuning over several epochs, with memory for a copy of each sample.",
        ),
        "WarmStart": Entry("WarmStart(LowRank(4))", "Low rank at a smaller error."),
        "LazyErrorPropagation": Entry(
            "LazyErrorPropagation(LowRank(4))", "Backward links: the error goes with the next microbatch."
        ),
        "Epilogue": Entry(
            "Epilogue(LowRank(4))", "Backward links: compresses only messages not hidden by computation."
        ),
    },
    "replica method": {
        "Gathered": Entry(
            "ErrorFeedback(TopK(0.1))", "Any codec or error feedback on replica gradients; written as the codec itself."
        ),
        "PowerSGD": Entry("PowerSGD(4)", "Many replicas: its bytes do not grow with them."),
        "DGC": Entry("DGC(0.01)", "SGD with momentum at densities of 0.01 and below."),
        "RedSync": Entry("RedSync(0.01)", "Comparison with DGC."),
        "EF21": Entry("EF21(TopK(0.1))", "Biased codecs without error feedback."),
        "TwoShot": Entry(
            "TwoShot(Quantize(8))", "Codes among three or more replicas: the bytes of an all-reduce, not of a gather."
        ),
        "PowerGossip": Entry("PowerGossip(2)", "The slowest links, if replicas may differ from one another."),
        "DiLoCo": Entry("DiLoCo(100)", "Links so slow that replicas should exchange once in many steps."),
        "SparseLoCo": Entry("SparseLoCo(30)", "The fewest bytes of all: sparse changes in two bits."),
        "Accordion": Entry(
            "Accordion(TopK(0.1), TopK(0.01))", "Training with critical phases, such as decays of the learning rate."
        ),
        "GraVAC": Entry("GraVAC(10, 1000)", "A strength that adapts to what the gradient keeps. Needs a clock."),
    },
    "schedule": {
        "GPipe": Entry("GPipe", "The simplest reference; it holds all microbatches in memory."),
        "1F1B": Entry("1F1B", "The default. Raise `ahead` on links with latency."),
        "Interleaved1F1B": Entry("Interleaved1F1B(2)", "Fast links: a smaller bubble for more packets."),
        "ZBH1": Entry("ZBH1", "A smaller bubble in the memory of 1F1B."),
        "ZBH2": Entry("ZBH2", "No bubble between post-validated steps, in twice the memory."),
        "ZB": Entry("ZB(weight=0.5, memory=2)", "An order searched for your times and memory."),
        "ZBV": Entry("ZBV", "The same in the memory of 1F1B, for more packets."),
        "DualPipeV": Entry("DualPipeV", "Comparison with DeepSeek's schedule, whose pairs overlap."),
        "Custom": Entry(
            "Custom('rows.csv')", "A schedule of your own, in the CSV format of torch.distributed.pipelining."
        ),
    },
    "weight policy": {
        "Synchronous": Entry("Synchronous", "The reference: all stages read the same weights."),
        "PostValidated": Entry(
            "PostValidated", "The weights of `Synchronous` without a wait between steps, for ZBH2 and ZBV."
        ),
        "Stashed": Entry("Stashed", "No bubble, small batches: one update a microbatch. With NAdam it is AsyncPP."),
        "DoubleBuffered": Entry(
            "DoubleBuffered", "A first choice: no bubble, a delay of one step, one copy of the weights."
        ),
    },
}

INTRODUCTION = """\
# Notation

Every codec, compressor, replica method, schedule and weight policy is written as a call, such as `ErrorFeedback(TopK(0.1))` in
`raysim train digits-cnn backward='ErrorFeedback(TopK(0.1))'`. The same text is used on the command line, in TOML files, in Parquet and
in legends. Arguments at their defaults may be left out.

Sizes are counted on packets, without the headers of messages: *activations* are a normal tensor of shape (8, 16, 16, 16) after a ReLU,
*gradients* the same without the ReLU. A factor of 4 means a quarter of the bytes of float32.
"""

PLUG_IN = (
    "Install the plug-in `raysim-contrib` for these: in a clone, `pip install ./contrib`. `python -m pydoc MODULE`, with the module "
    "named below, prints equations, packet layout and arguments."
)

PAGES = {
    "codecs": Page(
        "codec",
        "Codecs",
        "`forward`, `backward`, `replica_gradient`",
        "A codec is a stateless map from a tensor to a packet and back. Write it on its own, or inside a compressor or a replica "
        "method.",
    ),
    "rare-codecs": Page(
        "codec",
        "Rarely used codecs",
        "`forward`, `backward`, `replica_gradient`",
        f"{PLUG_IN} They are written like [the other codecs](codecs.md).",
    ),
    "compressors": Page(
        "compressor",
        "Compressors",
        "`forward`, `backward`",
        "A compressor is a codec with a memory, for the links between stages. A message has the size of a packet of the codec inside.",
    ),
    "rare-compressors": Page(
        "compressor",
        "Rarely used compressors",
        "`forward`, `backward`",
        f"{PLUG_IN} They are written like [the other compressors](compressors.md).",
    ),
    "replica-methods": Page(
        "replica method",
        "Replica methods",
        "`replica_gradient`",
        "A replica method averages the gradients of a stage over replicas, or their parameters after the optimiser's step. The factor "
        "compares the bytes sent by one of two replicas with those of an all-reduce, for a matrix of 512 x 512 in the eighth step. For "
        "methods that do not exchange in every step, it is the mean over a period.",
    ),
    "rare-replica-methods": Page(
        "replica method",
        "Rarely used replica methods",
        "`replica_gradient`",
        f"{PLUG_IN} They are written like [the other methods](replica-methods.md). "
        "[Replica methods of 2025 and 2026](../methods/replicas-2026.md) names the sources that were read.",
    ),
    "schedules": Page(
        "schedule",
        "Schedules",
        "`schedule`",
        "A schedule orders the forwards and backwards of all microbatches. It changes time and memory, not the result.",
    ),
    "weights": Page(
        "weight policy",
        "Weight policies",
        "`weights`",
        "A weight policy says which version of a stage's weights its passes read, and when the stage updates: see "
        "[asynchronous pipelines](../asynchronous.md). `Stashed` and `DoubleBuffered` need the schedule 1F1B and run it without "
        "a flush.",
    ),
    "rare-weights": Page(
        "weight policy",
        "Rarely used weight policies",
        "`weights`",
        f"{PLUG_IN} They need the schedule 1F1B and run it without a flush.",
    ),
}
