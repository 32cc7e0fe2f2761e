"""Claims on compressed links of a pipeline by Rudakov et al. 2023; the quotations are from the abstract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raysim.analysis.claims.claim import DENSE_RUN, Claim, Contrast, both_ways, keeps_quality
from raysim.analysis.claims.measures import Degradation, Freed, OfStatistics
from raysim.analysis.comparison.evidence import Context, Setting
from raysim.analysis.data.notations import Method, strength_of

RUDAKOV = "Rudakov, Beznosikov, Kholodov, Gasnikov 2023 (2401.07788)"
FEEDBACK = ("ErrorFeedback", "MixedErrorFeedback", "EF21")
NOISE = "NoiseFeedback"  # the control: noise in place of the residual
SEVERE = 10.0  # margins that are severe harm: 5 points of accuracy, or 10 % of the loss


def _gradients_milder(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    seen = set()
    for setting in settings:
        for name in ("TopK", "Quantize"):
            forward = strength_of(setting.method("forward"), name)
            backward = strength_of(setting.method("backward"), name)
            if forward is None or backward is None or forward == backward or setting[2:] != DENSE_RUN[2:]:
                continue
            swapped = Setting(setting.backward, setting.forward)
            harsh, mild = (setting, swapped) if backward < forward else (swapped, setting)
            if harsh not in seen:
                seen.add(harsh)
                yield Contrast("gradients need it milder", harsh, mild, Degradation(), "above", 0.0)


def _asymmetry_of_range(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        forward, backward = (_bits_around_zero(setting.method(way)) for way in ("forward", "backward"))
        if forward is None or backward is None or backward >= forward or setting[2:] != DENSE_RUN[2:]:
            continue
        swapped = Setting(setting.backward, setting.forward)
        harsh, mild = (
            Setting(f"Quantize({a:g})", f"Quantize({b:g})") for a, b in ((forward, backward), (backward, forward))
        )
        margin = context.margin
        yield Contrast("between the least and the greatest value, they do", harsh, mild, Degradation(), "above", margin)
        yield Contrast("around zero, gradients need no milder one", setting, swapped, Degradation(), "below", margin)


def _ten_per_cent(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    severe = SEVERE * context.margin
    for setting in settings:
        density = _density_both_ways(setting)
        if density == 0.1:
            yield Contrast("10 % does no severe harm", setting, DENSE_RUN, Degradation(), "below", severe)
        elif density is not None and density < 0.1:
            yield Contrast("less than 10 % does severe harm", setting, DENSE_RUN, Degradation(), "above", severe)


def _needs_compression(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in _sparse_forward(settings):
        part = "switching it off does harm"
        yield Contrast(part, setting, setting, Degradation("off", "on"), "above", context.margin)


def _batchnorm_explains(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in _sparse_forward(settings):
        part = "statistics of each mode spare a part"
        yield Contrast(part, setting, setting, OfStatistics(), "above", context.margin)


def _sparse_forward(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield the settings whose activations go through TopK of 10 % or less."""
    for setting in settings:
        density = strength_of(setting.method("forward"), "TopK")
        if density is not None and density <= 0.1 and setting[2:] == DENSE_RUN[2:]:
            yield setting


def _feedback_no_better(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, plain in _with_memory(settings, FEEDBACK):
        yield Contrast("no gain from feedback", plain, setting, Degradation(), "below", context.margin)


def _feedback_frees(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, plain in _with_memory(settings, FEEDBACK):
        yield from _frees(context, setting, plain)


def _feedback_is_noise(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, plain in _with_memory(settings, (NOISE,)):
        yield from _frees(context, setting, plain)


def _slots_mix_samples(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, plain in _with_memory(settings, FEEDBACK):
        forward = setting.method("forward")
        if forward is None or ("key", "sample") not in forward.options:
            continue
        slot = setting._replace(
            forward=str(forward._replace(options=tuple(o for o in forward.options if o[0] != "key")))
        )
        without = setting._replace(forward=plain.forward)  # gradients may keep a feedback of their own
        yield Contrast("kept by slot, it does harm", slot, without, Degradation(), "above", context.margin)
        yield Contrast("kept by sample, it does none", setting, without, Degradation(), "below", context.margin)


def _frees(context: Context, setting: Setting, plain: Setting) -> Iterator[Contrast]:
    if setting.forward != DENSE_RUN.forward:  # else there is nothing to switch off at inference
        part = "switching it off does no harm"
        yield Contrast(part, setting, setting, Degradation("off", "on"), "below", context.margin)
        yield Contrast("and less than without", setting, plain, Freed(), "above", 0.0)


def _aq_sgd(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        method = setting.method("forward")
        density = strength_of(method.inner, "TopK") if method is not None and method.name == "AQSGD" else None
        if density is None or setting.replica_gradient != DENSE_RUN.replica_gradient:
            continue
        if density < 0.3:
            yield Contrast("less than 30 % does harm", setting, DENSE_RUN, Degradation(), "above", context.margin)
        elif density == 0.3:
            yield keeps_quality(context, setting, "30 % does no harm")


def _separate_indices(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    densities = {d: s.forward for s in settings if (d := _density_both_ways(s)) is not None}
    for forward in densities.values():
        separate, shared = Setting(forward, forward), Setting(forward, shared_indices=True)
        yield Contrast("separate indices do harm", separate, shared, Degradation(), "above", context.margin)


def _bits_around_zero(method: Method | None) -> float | None:
    """Return the bits of a uniform quantiser whose range lies around zero, nothing else given; None for any other method."""
    around = method is not None and method.name == "Quantize" and method.options == (("range", "absmax"),)
    return method.strength if method is not None and around else None


def _density_both_ways(setting: Setting) -> float | None:
    """Return the density of a setting that is TopK of one density both ways, at indices of its own or at shared ones."""
    forward = strength_of(setting.method("forward"), "TopK")
    backward = DENSE_RUN.backward if setting.shared_indices else setting.forward
    return forward if setting[1:3] == (backward, DENSE_RUN.replica_gradient) else None


def _with_memory(settings: Iterable[Setting], names: tuple[str, ...]) -> Iterator[tuple[Setting, Setting]]:
    """Yield settings of TopK under a memory of these names, one way or both, each with the same without."""
    for setting in settings:
        forward, backward = (_without_memory(setting.method(way), names) for way in ("forward", "backward"))
        if forward is not None and backward is not None and "TopK" in forward + backward:
            plain = setting._replace(forward=forward, backward=backward)
            if plain != setting:
                yield setting, plain


def _without_memory(method: Method | None, names: tuple[str, ...]) -> str | None:
    """Return the notation of plain TopK or nothing, the memory taken off; None for any other method."""
    if method is None:
        return None
    inner = method.inner if method.name in names else method
    if inner is None or (strength_of(inner, "TopK") is None and str(inner) != DENSE_RUN.forward):
        return None
    return str(inner)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "gradients-milder",
        "Gradients need milder compression than activations.",
        "gradients require milder compression rates than activations",
        RUDAKOV,
        "The setting with the stronger codec on gradients is compared with the same codecs swapped; of TopK and of "
        "Quantize, in the mean over all such pairs. Supported where the mean harm is surely above 0, contradicted "
        "where it is surely below.",
        _gradients_milder,
        (Setting("TopK(0.1)", "TopK(0.3)"), Setting("Quantize(2)", "Quantize(6)")),
        pooled=True,
    ),
    Claim(
        "asymmetry-of-range",
        "Gradients need milder quantisation because of the quantiser's range: around zero they do not.",
        "",
        f"raysim, a hypothesis on the claim above of {RUDAKOV}",
        "A range from the least to the greatest value has no level at zero, around which gradients lie; `range='absmax'` has. "
        "The setting with fewer bits on gradients is compared with the same bits swapped, of each range. Supported where the "
        "harm is surely above the margin with the first range and surely below with the second; contradicted where either "
        "surely is not.",
        _asymmetry_of_range,
        (Setting("Quantize(6, range='absmax')", "Quantize(2, range='absmax')"),),
    ),
    Claim(
        "ten-per-cent",
        "TopK of 10 % is the strongest that does no severe harm.",
        "K=10% is the lowest TopK compression level, which does not harm model convergence severely",
        RUDAKOV,
        f"Severe is {SEVERE:g} margins: 5 points of accuracy or 10 % of the loss (ours; the abstract gives no "
        "figure). Supported where 10 % both ways harms surely less and every smaller density surely more; "
        "contradicted where one surely does otherwise.",
        _ten_per_cent,
        (both_ways("TopK(0.1)"), both_ways("TopK(0.05)")),
    ),
    Claim(
        "inference-compressed",
        "Models trained under strong TopK (10 % or less) need compression at inference.",
        "models trained with TopK perform well only when compression is also applied during inference",
        RUDAKOV,
        "Of densities of 10 % or less on activations. Supported where switching compression off harms each model "
        "surely by more than the margin, contradicted where one is surely harmed by less.",
        _needs_compression,
        (both_ways("TopK(0.1)"),),
    ),
    Claim(
        "batchnorm-explains",
        "Models with BatchNorm need compression at inference partly because its statistics are those of compressed activations.",
        "",
        f"raysim, a hypothesis on the claim above of {RUDAKOV}",
        "Of densities of 10 % or less on activations. Each model is evaluated with compression on and off, with the statistics of "
        "training and with statistics estimated under each mode. Supported where the harm of switching compression off is surely "
        "smaller with the latter, by more than the margin, contradicted where it surely is not.",
        _batchnorm_explains,
        (both_ways("TopK(0.1)"),),
        recipe=("resnet18-cifar10", "evaluate_batchnorm_batches=20"),
    ),
    Claim(
        "feedback-no-better",
        "Error feedback does not improve on plain TopK.",
        "error feedback techniques do not improve model-parallel training compared to plain compression",
        RUDAKOV,
        "Error feedback, its mixed form and EF21, one way or both, beside the same TopK without. Supported where "
        "plain TopK is surely less than the margin worse than each, contradicted where it is surely worse by more "
        "than one.",
        _feedback_no_better,
        (both_ways("ErrorFeedback(TopK(0.1))"), Setting("TopK(0.1)", "ErrorFeedback(TopK(0.1))")),
    ),
    Claim(
        "feedback-frees",
        "Error feedback frees inference from compression.",
        "but allow model inference without compression with almost no quality drop",
        RUDAKOV,
        "Feedback on gradients alone counts too: it is what the paper's code runs. Supported where switching "
        "compression off harms each model surely less than the margin, and surely less than the same model without "
        "feedback.",
        _feedback_frees,
        (both_ways("ErrorFeedback(TopK(0.1))"), Setting("TopK(0.1)", "ErrorFeedback(TopK(0.1))")),
    ),
    Claim(
        "feedback-is-noise",
        "Error feedback frees inference because it acts as noise: noise of equal norm does so as well.",
        "",
        RUDAKOV,
        "The explanation is attributed to the paper, whose text was not read. The control replaces the residual by "
        f"noise of its norm ({NOISE}). Supported where the control is freed as `feedback-frees` asks of feedback, "
        "contradicted where it surely is not.",
        _feedback_is_noise,
        (both_ways(f"{NOISE}(TopK(0.1))"),),
    ),
    Claim(
        "slots-mix-samples",
        "Error feedback on activations does harm because residuals kept by slot mix samples: kept by sample it does none.",
        "",
        f"raysim, a hypothesis on the claim of error feedback by {RUDAKOV}",
        "Beside plain TopK of activations and the same gradients, by the margin. Supported where the residual of a slot, which "
        "goes with another sample in the next step, does surely more harm and the residual of a sample surely less; contradicted "
        "where either surely does not.",
        _slots_mix_samples,
        (Setting("ErrorFeedback(TopK(0.1), key='sample')", "TopK(0.1)"),),
    ),
    Claim(
        "aq-sgd-topk",
        "AQ-SGD with TopK under 30 % does harm, and with 30 % it does not.",
        "when applied with the AQ-SGD approach, TopK stronger than with K=30% worsens model performance significantly",
        RUDAKOV,
        "Beside dense, by the margin. Supported where every density below 30 % harms surely more and 30 % surely "
        "less, contradicted where one surely does otherwise.",
        _aq_sgd,
        (Setting("AQSGD(TopK(0.1))", "TopK(0.1)"), Setting("AQSGD(TopK(0.3))", "TopK(0.3)")),
    ),
    Claim(
        "separate-indices",
        "TopK with separate indices for gradients does harm to language models.",
        "",
        RUDAKOV,
        "From a summary of the paper (independent compression of activations and gradients may diverge), not from "
        "its text. Separate beside shared indices at one density, in the mean over densities. Supported where the "
        "harm is surely above the margin.",
        _separate_indices,
        (both_ways("TopK(0.1)"),),
        pooled=True,
        language=True,
        recipe=("topics-gpt",),
    ),
)
