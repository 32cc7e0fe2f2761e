"""Matches of claims: the recorded settings relevant to each claim, and the settings to compare them with, by role.

A match takes a setting and returns the other settings of the comparison, by the roles in the parts of the claim, or
None if the claim does not apply to the setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.notation import Method
from raysim.storage.texts import parse_json

Roles: TypeAlias = Mapping[str, Setting]
Match: TypeAlias = Callable[[Setting], "Roles | None"]

FEEDBACK = ("ErrorFeedback", "MixedErrorFeedback", "EF21")
NOISE = "NoiseFeedback"  # the control: noise in place of the residual
WARMUP = ("ramp", "warmup")
STATIC = "ErrorFeedback(TopK(0.1))"  # the 10x baseline of GraVAC's speed-ups
LEAST_FLOOR = 0.7  # epsilon: the paper uses 0.7 and 0.9; its claim does not cover lower floors
FAR_FEWER = 100.0  # times fewer bytes that count as DiLoCo's; the abstract has 500, from 500 steps between exchanges


def both_ways(text: str) -> Setting:
    """Return the setting that compresses activations and gradients alike."""
    return Setting(text, text)


# --- links of a pipeline ------------------------------------------------------------------------------------------------------


def unequal_links(setting: Setting) -> Roles | None:
    """Match links of one codec at two strengths: "harsh" has the stronger on gradients, "mild" on activations."""
    if not _links_alone(setting):
        return None
    for name in ("TopK", "Quantize"):
        forward, backward = (strength_of(setting.method(way), name) for way in ("forward", "backward"))
        if forward is not None and backward is not None and forward != backward:
            swapped = Setting(setting.backward, setting.forward)
            harsh, mild = (setting, swapped) if backward < forward else (swapped, setting)
            return {"harsh": harsh, "mild": mild}
    return None


def bits_around_zero(setting: Setting) -> Roles | None:
    """Match links quantised around zero with fewer bits on gradients; "harsh" and "mild" use the usual range."""
    forward, backward = (_bits_around_zero(setting.method(way)) for way in ("forward", "backward"))
    if forward is None or backward is None or backward >= forward or not _links_alone(setting):
        return None
    harsh, mild = (
        Setting(f"Quantize({a:g})", f"Quantize({b:g})") for a, b in ((forward, backward), (backward, forward))
    )
    return {"harsh": harsh, "mild": mild, "swapped": Setting(setting.backward, setting.forward)}


def density_both_ways(setting: Setting) -> Roles | None:
    """Match TopK of one density both ways, as "tenth" or "less" than a tenth."""
    density = _density_both_ways(setting)
    if density is None or density > 0.1:
        return None
    return {"tenth" if density == 0.1 else "less": setting}


def sparse_activations(setting: Setting) -> Roles | None:
    """Match TopK of 10 % or less on activations."""
    density = strength_of(setting.method("forward"), "TopK")
    return {} if density is not None and density <= 0.1 and _links_alone(setting) else None


def with_memory(*names: str, inference: bool = False) -> Match:
    """Match TopK under one of these memories, in one direction or both; "plain" is TopK without it.

    `inference`: only with compressed activations, which can be switched off at inference.
    """

    def match(setting: Setting) -> Roles | None:
        forward, backward = (_without_memory(setting.method(way), names) for way in ("forward", "backward"))
        if forward is None or backward is None or "TopK" not in forward + backward:
            return None
        plain = setting._replace(forward=forward, backward=backward)
        return None if plain == setting or (inference and setting.forward == IDENTITY) else {"plain": plain}

    return match


def residual_by_sample(setting: Setting) -> Roles | None:
    """Match activations with a residual per sample; "slot" keeps one per slot, "without" keeps none."""
    matched = with_memory(*FEEDBACK)(setting)
    forward = setting.method("forward")
    if matched is None or forward is None or ("key", "sample") not in forward.options:
        return None
    by_slot = forward._replace(options=tuple(option for option in forward.options if option[0] != "key"))
    without = setting._replace(forward=matched["plain"].forward)  # gradients may keep their own feedback
    return {"slot": setting._replace(forward=str(by_slot)), "without": without}


def aq_sgd(setting: Setting) -> Roles | None:
    """Match AQ-SGD with TopK on activations, as "third" of 30 % or "less" than that."""
    method = setting.method("forward")
    density = strength_of(method.inner, "TopK") if method is not None and method.name == "AQSGD" else None
    if density is None or density > 0.3 or setting.replica_gradient != IDENTITY:
        return None
    return {"third" if density == 0.3 else "less": setting}


def tah_quant(setting: Setting) -> Roles | None:
    """Match TAH-Quant on activations, with gradients like them or dense."""
    method = setting.method("forward")
    coded = method is not None and method.name == "TAHQuant" and setting.backward in (IDENTITY, setting.forward)
    return {} if coded and _links_alone(setting) else None


def shared_or_separate(setting: Setting) -> Roles | None:
    """Match TopK of one density both ways: "separate" indices for gradients, or "shared" with the activations."""
    if _density_both_ways(setting) is None:
        return None
    return {"separate": both_ways(setting.forward), "shared": Setting(setting.forward, shared_indices=True)}


def strength_of(method: Method | None, name: str) -> float | None:
    """Return the strength of a method if it is this codec without options, else None.

    >>> from raysim.notation import read_method
    >>> strength_of(read_method("TopK(0.1)"), "TopK"), strength_of(read_method("TopK(0.1, per='tensor')"), "TopK")
    (0.1, None)
    """
    return method.strength if method is not None and method.name == name and not method.options else None


def _links_alone(setting: Setting) -> bool:
    return setting[2:] == DENSE[2:]


def _bits_around_zero(method: Method | None) -> float | None:
    """Return the bits of a uniform quantiser with a range around zero and no other option; None for any other method."""
    around = method is not None and method.name == "Quantize" and method.options == (("range", "absmax"),)
    return method.strength if method is not None and around else None


def _density_both_ways(setting: Setting) -> float | None:
    """Return the density of TopK of one density both ways, with separate or shared indices; None for other settings."""
    forward = strength_of(setting.method("forward"), "TopK")
    backward = IDENTITY if setting.shared_indices else setting.forward
    return forward if setting[1:3] == (backward, IDENTITY) else None


def _without_memory(method: Method | None, names: tuple[str, ...]) -> str | None:
    """Return the notation of plain TopK or dense, without its memory; None for any other method."""
    if method is None:
        return None
    inner = method.inner if method.name in names else method
    if inner is None or (strength_of(inner, "TopK") is None and str(inner) != IDENTITY):
        return None
    return str(inner)


# --- one part of a run, all others dense: the harm of other compression would be counted as this part's -----------------------


def wrapped_gradients(name: str) -> Match:
    """Match gradients at boundaries under a method of this name; "inner" sends them by the wrapped method alone."""

    def match(setting: Setting) -> Roles | None:
        method = _alone(setting, "backward", name)
        return (
            None if method is None or method.inner is None else {"inner": setting._replace(backward=str(method.inner))}
        )

    return match


def earliest_stages(setting: Setting) -> Roles | None:
    """Match one method for the replica gradients of the earliest stages; "everywhere" has it at all stages."""
    if not _changes_only(setting, "replica_gradient"):
        return None
    try:
        by_stage = parse_json(setting.replica_gradient)
    except ValueError:
        return None
    if not isinstance(by_stage, list) or not all(isinstance(text, str) for text in by_stage):
        return None
    kept = [text for text in by_stage if text != IDENTITY]
    if len(set(kept)) != 1 or len(kept) == len(by_stage) or by_stage[: len(kept)] != kept:
        return None
    return {"everywhere": setting._replace(replica_gradient=str(kept[0]))}


def fused(setting: Setting) -> Roles | None:
    """Match fused embeddings; "apart" synchronises them in two exchanges."""
    return {"apart": setting._replace(fused_embedding=False)} if setting.fused_embedding else None


def published_gravac(setting: Setting) -> Roles | None:
    """Match GraVAC with the gain of the paper's text and a floor of the paper's or higher; "static" is TopK at 10x."""
    method = _alone(setting, "replica_gradient", "GraVAC")
    options = {} if method is None else dict(method.options)  # GraVAC's defaults are the paper's
    if method is None or options.get("gain", "fed") != "fed" or options.get("epsilon", LEAST_FLOOR) < LEAST_FLOOR:
        return None
    return {"static": setting._replace(replica_gradient=STATIC)}


def accordion(setting: Setting) -> Roles | None:
    """Match Accordion; "mild" uses its mild codec throughout."""
    method = _alone(setting, "replica_gradient", "Accordion")
    mild = None if method is None else method.inner
    if mild is None:
        return None
    low_rank = mild.name == "LowRank" and mild.strength is not None
    text = f"PowerSGD({mild.strength:g})" if low_rank else f"ErrorFeedback({mild})"
    return {"mild": setting._replace(replica_gradient=text)}


def warm_up(setting: Setting) -> Roles | None:
    """Match replica gradients with a ramp or warm-up; "without" has neither."""
    method = _alone(setting, "replica_gradient")
    if method is None or not any(name in WARMUP for name, _ in method.options):
        return None
    bare = method._replace(options=tuple(option for option in method.options if option[0] not in WARMUP))
    if bare.name == "Gathered" and not bare.options and bare.inner is not None:  # left out of the notation
        bare = bare.inner
    return {"without": setting._replace(replica_gradient=str(bare))}


def far_fewer_local_steps(setting: Setting) -> Roles | None:
    """Match DiLoCo with at least `FAR_FEWER` times fewer bytes by its notation."""
    method = _alone(setting, "replica_gradient", "DiLoCo")
    if method is None:
        return None
    codec = next((value for name, value in method.options if name == "codec"), None)
    bits = codec.strength if isinstance(codec, Method) and codec.name == "Quantize" else None
    return {} if (method.strength or 1.0) * 32 / (bits or 32) >= FAR_FEWER else None


def entropy_driven(setting: Setting) -> Roles | None:
    """Match EDGC on any links, and the same links without it."""
    method = setting.method("replica_gradient")
    if method is None or method.name != "EDGC":
        return None
    return {"links": setting._replace(replica_gradient=IDENTITY)}


def double_buffered(setting: Setting) -> Roles | None:
    """Match two buffers of weights without any compression."""
    return {} if setting == DENSE._replace(weights="DoubleBuffered") else None


def _changes_only(setting: Setting, field: str) -> bool:
    return setting == DENSE._replace(**{field: getattr(setting, field)})


def _alone(setting: Setting, field: str, name: str | None = None) -> Method | None:
    """Return the method of a field, of this name if one is given, in a setting that changes no other field; else None."""
    method = setting.method(field) if _changes_only(setting, field) else None
    return method if method is not None and name in (None, method.name) else None
