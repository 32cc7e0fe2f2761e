"""Claims on pipelines without a flush; the quotation is from the abstract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raysim.analysis.claims.claim import DENSE_RUN, Claim, Contrast, keeps_quality
from raysim.analysis.claims.measures import Slowdown
from raysim.analysis.comparison.evidence import Context, Setting

PIPEDREAM_2BW = "Narayanan, Phanishayee, Shi, Chen, Zaharia 2020, PipeDream-2BW (2006.09503)"
TWO_BUFFERS = DENSE_RUN._replace(weights="DoubleBuffered")


def _double_buffered(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    if TWO_BUFFERS in settings:
        yield keeps_quality(context, TWO_BUFFERS, "it keeps the quality of synchronous weights")
        yield Contrast("in steps that are shorter", TWO_BUFFERS, DENSE_RUN, Slowdown(), "below", 0.0)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "double-buffered",
        "Two buffers of weights in place of a flush cost no quality, and steps are shorter.",
        "PipeDream-2BW can accelerate the training of large GPT and BERT language models by up to 20x with similar final "
        "model accuracy",
        PIPEDREAM_2BW,
        "'Similar' is read as harm below the margin, after as many steps at the same settings. The paper's factor is against "
        "other systems, so no bar is set: that a step without a flush is shorter than one with it is asked, on one network, and "
        "by how much is reported. Supported where both surely hold; contradicted where either surely does not.",
        _double_buffered,
        (TWO_BUFFERS,),
    ),
)
