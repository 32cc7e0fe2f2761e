"""Claims on the messages of replicas: GraVAC, Accordion, warm-up; the quotations are from the abstracts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raysim.analysis.claims.claim import DENSE_RUN, Claim, Contrast, alone, keeps_quality, wrapping
from raysim.analysis.claims.measures import Degradation, Saving, Slowdown, ValueFactor
from raysim.analysis.comparison.evidence import Context, Setting
from raysim.analysis.data.notations import Method

GRAVAC = "Tyagi, Swany 2023, GraVAC (2305.12201)"
ACCORDION = "Agarwal, Wang, Lee, Venkataraman, Papailiopoulos 2020, Accordion (2010.16248)"
DGC = "Lin, Han, Mao, Wang, Dally 2017, Deep Gradient Compression (1712.01887)"

DILOCO = "Douillard et al. 2023, DiLoCo (2311.08105)"

LEAST_FACTOR = 13.5  # of values, GraVAC on VGG16 at epsilon 0.9; the paper's others are 19 to 289
LEAST_FLOOR = 0.7  # epsilon: the paper has 0.7 and 0.9; a gradient that keeps less is no longer its claim
FAR_FEWER = 100.0  # times fewer bytes that count as DiLoCo's; the abstract has 500, of 500 steps between exchanges
STATIC = Setting(replica_gradient="ErrorFeedback(TopK(0.1))")  # the 10x to which GraVAC's speed-ups are relative
WARMUP = ("ramp", "warmup")
TWO_REPLICAS = ("digits-cnn", "num_stages=1", "num_replicas=2", "num_microbatches=1")


def _gravac(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in _published_gravac(settings):
        yield keeps_quality(context, setting, "it keeps dense quality")
        yield Contrast("at far fewer values", setting, setting, ValueFactor(), "above", LEAST_FACTOR)


def _gravac_speed(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in _published_gravac(settings):
        static = setting._replace(replica_gradient=STATIC.replica_gradient)
        yield keeps_quality(context, setting, "it keeps dense quality")
        yield Contrast("in steps that are shorter", setting, static, Slowdown(), "below", 0.0)


def _accordion(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, mild in wrapping("Accordion", "replica_gradient", alone("replica_gradient", settings)):
        low_rank = mild.name == "LowRank" and mild.strength is not None
        text = f"PowerSGD({mild.strength:g})" if low_rank else f"ErrorFeedback({mild})"
        static = setting._replace(replica_gradient=text)
        yield keeps_quality(context, setting, "it keeps dense quality")
        yield Contrast("at fewer bytes", setting, static, Saving("replica_gradient"), "above", 1.0)


def _warm_up(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in alone("replica_gradient", settings):
        method = setting.method("replica_gradient")
        if method is not None and any(name in WARMUP for name, _ in method.options):
            without = setting._replace(replica_gradient=str(_without(method, WARMUP)))
            yield keeps_quality(context, setting, "with it, no harm")
            yield Contrast("without it, worse", without, setting, Degradation(), "above", 0.0)


def _local_steps(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in _of("DiLoCo", settings):
        method = setting.method("replica_gradient")
        assert method is not None
        codec = next((value for name, value in method.options if name == "codec"), None)
        bits = codec.strength if isinstance(codec, Method) and codec.name == "Quantize" else None
        if (method.strength or 1.0) * 32 / (bits or 32) >= FAR_FEWER:
            yield keeps_quality(context, setting, "it keeps the quality of an average in every step")
            yield Contrast("at far fewer bytes", setting, DENSE_RUN, Saving("replica_gradient"), "above", FAR_FEWER)


def _published_gravac(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield the settings with GraVAC alone whose gain is that of the paper's text, and whose floor is one of the paper's or higher."""
    for setting in _of("GraVAC", settings):
        method = setting.method("replica_gradient")
        assert method is not None
        options = dict(method.options)  # GraVAC's defaults are the paper's
        if options.get("gain", "fed") == "fed" and options.get("epsilon", LEAST_FLOOR) >= LEAST_FLOOR:
            yield setting


def _of(name: str, settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield the settings with this method for replica gradients and no other compression."""
    for setting in alone("replica_gradient", settings):
        method = setting.method("replica_gradient")
        if method is not None and method.name == name:
            yield setting


def _without(method: Method, names: tuple[str, ...]) -> Method:
    """Return a method without some options; bare, where that is how the notation writes it."""
    left = method._replace(options=tuple(option for option in method.options if option[0] not in names))
    return left.inner if left.name == "Gathered" and not left.options and left.inner is not None else left


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "gravac",
        "GraVAC keeps dense quality at far fewer values.",
        "achieving the same or better accuracy than dense SGD (i.e., no compression) in the same number of iterations/epochs",
        GRAVAC,
        f"On replica gradients, where the paper has it, with the gain of its text and a floor of {LEAST_FLOOR:g} or more. Supported "
        f"where the harm beside dense is surely below the margin, and the factor in values surely above {LEAST_FACTOR:g}, the least "
        "that the paper reports; contradicted where either surely is not.",
        _gravac,
        (Setting(replica_gradient="GraVAC(10.0, 1000.0, window=50)"),),
        num_replicas=2,
        recipe=TWO_REPLICAS,
    ),
    Claim(
        "gravac-speed",
        "GraVAC's steps are shorter than the steps of a static factor of 10, at dense quality.",
        "As opposed to using a static compression factor, GraVAC reduces end-to-end training time for ResNet101, "
        "VGG16 and LSTM by 4.32x, 1.95x and 6.67x respectively",
        GRAVAC,
        f"Relative to TopK at 10x, as in the paper's table, with the gain of its text and a floor of {LEAST_FLOOR:g} or more; of the "
        "mean step on one network, since the number of steps is the same. Supported where the step is surely shorter and quality is "
        "kept: by how much depends on the network, and is reported.",
        _gravac_speed,
        (Setting(replica_gradient="GraVAC(10.0, 1000.0, window=50)"),),
        num_replicas=2,
        recipe=TWO_REPLICAS,
    ),
    Claim(
        "accordion",
        "Accordion keeps dense quality at fewer bytes than its mild compression.",
        "maintains similar model accuracy to uncompressed training, yet achieves up to 5.5x better compression and "
        "up to 4.1x end-to-end speedup over static approaches",
        ACCORDION,
        "Supported where the harm beside dense is surely below the margin, and the bytes are surely fewer than "
        "the bytes of its mild codec used throughout; contradicted where either surely is not. The paper's 'up to' "
        "sets no bar: the factor is reported.",
        _accordion,
        (Setting(replica_gradient="Accordion(LowRank(4), LowRank(1), interval=1)"),),
        num_replicas=2,
        recipe=TWO_REPLICAS,
    ),
    Claim(
        "warm-up",
        "Strong compression of replica gradients keeps dense quality with a warm-up, and is worse without.",
        "",
        DGC,
        "The paper, whose text was not read, names warm-up training among its means to keep accuracy. Settings with `ramp` "
        "or `warmup` beside dense, and beside the same without. Supported where the first harm is surely below the margin "
        "and the second surely above 0.",
        _warm_up,
        (Setting(replica_gradient="DGC(0.01, ramp=4)"),),
        num_replicas=2,
        recipe=TWO_REPLICAS,
    ),
    Claim(
        "diloco",
        "DiLoCo keeps the quality of averaging gradients in every step at a hundredth of the bytes.",
        "DiLoCo on 8 workers performs as well as fully synchronous optimization while communicating 500 times less",
        DILOCO,
        f"Of DiLoCo on uncompressed links whose notation promises {FAR_FEWER:g} times fewer bytes: steps between exchanges, times 32 "
        "over the bits of `Quantize`. Supported where the harm beside dense is surely below the margin after as many steps, and "
        "the factor in bytes surely above the promise; contradicted where either surely is not.",
        _local_steps,
        (Setting(replica_gradient="DiLoCo(30, codec=Quantize(4))"),),
        num_replicas=2,
        recipe=TWO_REPLICAS,
    ),
)
