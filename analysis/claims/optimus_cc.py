"""Claims of Optimus-CC; the abstract and the authors' code were read, so that no figure of the paper is a threshold here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from raysim.analysis.claims.claim import DENSE_RUN, Claim, Contrast, alone, keeps_quality, wrapping
from raysim.analysis.claims.measures import Degradation, FewerBytes, Slowdown
from raysim.analysis.comparison.evidence import Context, Setting

OPTIMUS_CC = "Song et al. 2023, Optimus-CC (2301.09830)"
SAME_SPEED = 5.0  # per cent of a step within which compressing a part is said to cost no speed against compressing all
FULL = ("optimus-cc", "backward=Identity", "replica_gradient=Identity", "fused_embedding=false")


def _lazy_propagation(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, inner in wrapping("LazyErrorPropagation", "backward", alone("backward", settings)):
        without = setting._replace(backward=str(inner))
        yield keeps_quality(context, setting, "with it, no harm")
        yield Contrast("without it, harm", without, DENSE_RUN, Degradation(), "above", context.margin)


def _epilogue(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, inner in wrapping("Epilogue", "backward", alone("backward", settings)):
        yield from _free(context, setting, everywhere=setting._replace(backward=str(inner)))


def _selective_stages(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in alone("replica_gradient", settings):
        compressed = _earliest_alone(setting.replica_gradient)
        if compressed is not None:
            yield from _free(context, setting, everywhere=setting._replace(replica_gradient=compressed))


def _free(context: Context, setting: Setting, everywhere: Setting) -> Iterator[Contrast]:
    """Yield the contrasts that compressing a part costs neither quality nor speed."""
    yield keeps_quality(context, setting)
    yield Contrast("hardly slower", setting, everywhere, Slowdown(), "below", SAME_SPEED)


def _fused_embedding(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        if setting.fused_embedding:
            apart = setting._replace(fused_embedding=False)
            yield Contrast("no harm", setting, apart, Degradation(), "below", context.margin)
            yield Contrast("fewer bytes", setting, apart, FewerBytes(), "above", 1.0)


def _earliest_alone(replica_gradient: str) -> str | None:
    """Return the one method that the earliest stages use where all later ones are dense; None for anything else."""
    try:
        each = json.loads(replica_gradient)
    except ValueError:
        return None
    kept = [text for text in each if text != DENSE_RUN.replica_gradient] if isinstance(each, list) else []
    alike = len(set(kept)) == 1 and len(kept) < len(each) and each[: len(kept)] == kept
    return str(kept[0]) if alike else None


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "lazy-error-propagation",
        "Low-rank gradients at boundaries do harm, and lazy error propagation mends it.",
        "we propose techniques to avoid the model quality drop that comes from the compression",
        OPTIMUS_CC,
        "Beside dense, by the margin. Supported where the harm is surely below it with lazy error propagation and "
        "surely above it without; contradicted where either surely is not.",
        _lazy_propagation,
        (Setting(backward="LazyErrorPropagation(LowRank(16))"),),
    ),
    Claim(
        "epilogue-only",
        "Compressing the epilogue alone does no harm and is hardly slower than compressing all gradients.",
        "we analyze the pipeline and opt to selectively compress those traffic lying on the critical path. This "
        "further helps reduce the compression error",
        OPTIMUS_CC,
        f"Hardly slower: less than {SAME_SPEED:g} % of a step (ours). Supported where the harm beside dense is "
        "surely below the margin and the step is surely hardly slower than with compression everywhere; contradicted where "
        "either surely is not.",
        _epilogue,
        (Setting(backward="Epilogue(LazyErrorPropagation(LowRank(16)))"),),
    ),
    Claim(
        "selective-stages",
        "Compressing the replica gradients of the earliest stages alone does no harm and is hardly slower than compressing all.",
        "selectively compress those traffic lying on the critical path",
        OPTIMUS_CC,
        f"A list of methods by stage whose tail is dense. Hardly slower: less than {SAME_SPEED:g} % of a step "
        "(ours). Supported where the harm beside dense is surely below the margin and the step surely within that "
        "of the same method at all stages.",
        _selective_stages,
        (Setting(replica_gradient='["PowerSGD(8)", "PowerSGD(8)", "PowerSGD(8)", "Identity"]'),),
        num_replicas=2,
        recipe=FULL,
    ),
    Claim(
        "fused-embedding",
        "One synchronisation of tied embeddings in place of two does no harm and sends fewer bytes.",
        "we compress the inter-stage backpropagation and the embedding synchronization in addition to the existing "
        "data-parallel traffic compression methods",
        OPTIMUS_CC,
        "Fusing is exact but for the order of sums. Supported where the harm beside the same run without is surely "
        "below the margin and the bytes of a step over all links are surely fewer; contradicted where either surely "
        "is not.",
        _fused_embedding,
        (Setting(fused_embedding=True),),
        language=True,
        num_replicas=2,
        recipe=FULL,
    ),
)
