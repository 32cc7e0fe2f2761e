"""The one notation: `repr` and `parse` are inverse, arguments are checked, and no text does harm."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.codecs import CODECS, Cast, Identity, Nonzero, Quantize, TopK
from raysim.compressors import AQSGD, COMPRESSORS, Compressor, ErrorFeedback, LinkEF21, MixedErrorFeedback, Plain, parse
from raysim.notation import MAX_LENGTH, Notation, check_choice, check_integer, check_real, parse_notation
from raysim.replication import METHODS

KNOWN = ", ".join(sorted({**CODECS, **COMPRESSORS}))
TOPK = "(density, per='sample', values=Identity, index='auto')"


CANONICAL = {
    "TopK(1)": "TopK(1.0)",
    "TopK(density=0.10)": "TopK(0.1)",
    " TopK( 0.1 , per='sample' ) ": "TopK(0.1)",
    "TopK(1e-1)": "TopK(0.1)",
    "TopK(0.1, 'tensor')": "TopK(0.1, per='tensor')",
    "TopK(0.1, values=Identity())": "TopK(0.1)",
    "TopK(0.1, index='bitmap', values=Quantize(bits=4.0))": "TopK(0.1, values=Quantize(4), index='bitmap')",
    "Identity()": "Identity",
    "Nonzero(Identity)": "Nonzero",
    'Cast("bfloat16")': "Cast('bfloat16')",
    "Plain(Identity)": "Identity",
    "Plain(codec=TopK(1))": "TopK(1.0)",
    "ErrorFeedback(TopK(0.1), key='slot')": "ErrorFeedback(TopK(0.1))",
    "ErrorFeedback(key='link', codec=TopK(0.1))": "ErrorFeedback(TopK(0.1), key='link')",
    "AQSGD(Quantize(4), warmup=1.0, capacity=None)": "AQSGD(Quantize(4))",
    "AQSGD(Quantize(4), capacity=1e3)": "AQSGD(Quantize(4), capacity=1000)",
    "AQSGD(Quantize(4), 'slot', 0)": "AQSGD(Quantize(4), key='slot', warmup=0)",
    "MixedErrorFeedback(TopK(0.1), union=False)": "MixedErrorFeedback(TopK(0.1))",
    "EF21(\n  TopK(0.1),\n)": "EF21(TopK(0.1))",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_the_canonical_form(text: str) -> None:
    assert repr(parse(text)) == CANONICAL[text]
    assert parse(text) == parse(CANONICAL[text])


values_codecs = st.one_of(
    st.just(Identity()),
    st.builds(Cast, st.sampled_from(["bfloat16", "float16"])),
    st.builds(
        Quantize,
        st.integers(2, 8),
        range=st.sampled_from(["minmax", "absmax"]),
        per=st.sampled_from(["tensor", "sample", "channel"]),
        rounding=st.sampled_from(["nearest", "stochastic"]),
    ).filter(lambda codec: not codec.expands),  # which no memory takes
)
densities = st.floats(0, 1, exclude_min=True)
topks = st.builds(TopK, densities, per=st.sampled_from(["sample", "tensor"]), values=values_codecs)
codecs = st.one_of(values_codecs, topks, st.builds(Nonzero, values_codecs))
keys = st.sampled_from(["slot", "sample", "link"])
compressors = st.one_of(
    st.builds(Plain, codecs),
    st.builds(ErrorFeedback, codecs, key=keys),
    st.builds(LinkEF21, codecs, key=keys),
    st.builds(MixedErrorFeedback, topks, key=keys, union=st.booleans()),
    st.builds(
        AQSGD,
        codecs,
        key=st.sampled_from(["slot", "sample"]),
        warmup=st.integers(0, 10**9),
        first=st.sampled_from(["dense", "compressed"]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        capacity=st.one_of(st.none(), st.integers(1, 10**12)),
    ),
)


@settings(max_examples=100, derandomize=True, database=None)
@given(compressors)
def test_parse_is_the_inverse_of_repr(method: Compressor) -> None:
    assert parse(repr(method)) == method
    assert repr(parse(repr(method))) == repr(method)


# What is refused, in one sentence each.

REFUSED = {
    "TopKk(0.1)": "Unknown compressor `TopKk` in 'TopKk(0.1)'. Did you mean `TopK`?",
    "ErrorFeedback(TopKk(0.1))": "Unknown compressor `TopKk` in 'ErrorFeedback(TopKk(0.1))'. Did you mean `TopK`?",
    "TopK(abc)": f"Unknown compressor `abc` in 'TopK(abc)'. Known: {KNOWN}.",
    "AtSupport(Identity)": f"Unknown compressor `AtSupport` in 'AtSupport(Identity)'. Known: {KNOWN}.",
    "TopK(0)": "`density` must be in (0, 1], but got 0 (in 'TopK(0)').",
    "TopK(True)": "`density` must be in (0, 1], but got True (in 'TopK(True)').",
    "TopK(None)": "`density` must be in (0, 1], but got None (in 'TopK(None)').",
    "Quantize(9)": "`bits` must be an integer from 1 to 8, but got 9 (in 'Quantize(9)').",
    "Quantize(True)": "`bits` must be an integer from 1 to 8, but got True (in 'Quantize(True)').",
    "Quantize(1, range='absmax')": (
        "`bits` must be at least 2 with `range='absmax'`, which keeps a level for zero, but got 1 "
        "(in \"Quantize(1, range='absmax')\")."
    ),
    "Cast('float8')": "`target` must be one of bfloat16, float16, but got 'float8' (in \"Cast('float8')\").",
    "ErrorFeedback(TopK(0.1), key='row')": (
        "`key` must be one of slot, sample, link, but got 'row' (in \"ErrorFeedback(TopK(0.1), key='row')\")."
    ),
    "AQSGD(TopK(0.1), key='link')": (
        "`key` must be one of slot, sample, but got 'link' (in \"AQSGD(TopK(0.1), key='link')\")."
    ),
    "AQSGD(Identity, capacity=0)": (
        "`capacity` must be an integer of at least 1, but got 0 (in 'AQSGD(Identity, capacity=0)')."
    ),
    "AQSGD(Identity, warmup=-1)": (
        "`warmup` must be an integer of at least 0, but got -1 (in 'AQSGD(Identity, warmup=-1)')."
    ),
    "AQSGD(Identity, dtype='float16')": (
        "`dtype` must be one of float32, bfloat16, but got 'float16' (in \"AQSGD(Identity, dtype='float16')\")."
    ),
    "Plain(ErrorFeedback(TopK(0.1)))": (
        "`codec` must be a codec, but got ErrorFeedback(TopK(0.1)) (in 'Plain(ErrorFeedback(TopK(0.1)))')."
    ),
    "ErrorFeedback(EF21(Identity))": (
        "`codec` must be a codec, but got EF21(Identity) (in 'ErrorFeedback(EF21(Identity))')."
    ),
    "TopK(0.1, values=EF21(Identity))": (
        "`values` must be a codec, but got EF21(Identity) (in 'TopK(0.1, values=EF21(Identity))')."
    ),
    "MixedErrorFeedback(Quantize(4))": (
        "`codec` must be a TopK, to split its budget, but got Quantize(4) (in 'MixedErrorFeedback(Quantize(4))')."
    ),
    "MixedErrorFeedback(TopK(0.1), union=1)": (
        "`union` must be True or False, but got 1 (in 'MixedErrorFeedback(TopK(0.1), union=1)')."
    ),
    "TopK": f"`TopK` in 'TopK' takes {TOPK}: missing a required argument: 'density'.",
    "TopK(0.1, foo=2)": f"`TopK` in 'TopK(0.1, foo=2)' takes {TOPK}: got an unexpected keyword argument 'foo'.",
    "TopK(0.1, density=2)": f"`TopK` in 'TopK(0.1, density=2)' takes {TOPK}: multiple values for argument 'density'.",
    "Identity(1)": "`Identity` in 'Identity(1)' takes no arguments: too many positional arguments.",
    "": "'' is not a compressor: expected a name with arguments, such as 'TopK(0.1)'.",
    "TopK(0.1": "'TopK(0.1' is not a compressor: expected a name with arguments, such as 'TopK(0.1)'.",
    "TopK(0.1); Identity": (
        "'TopK(0.1); Identity' is not a compressor: expected a name with arguments, such as 'TopK(0.1)'."
    ),
    "TopK(\0)": "'TopK(\\x00)' is not a compressor: expected a name with arguments, such as 'TopK(0.1)'.",
    "\ud800": "'\\ud800' is not a compressor: expected a name with arguments, such as 'TopK(0.1)'.",
    "TopK(density=0.1, density=0.2)": (
        "'TopK(density=0.1, density=0.2)' is not a compressor: expected a name with arguments, such as 'TopK(0.1)'."
    ),
    "3": f"'3' is not a compressor: expected one of {KNOWN}.",
    "'TopK(0.1)'": f"\"'TopK(0.1)'\" is not a compressor: expected one of {KNOWN}.",
    "[TopK(0.1)]": f"'[TopK(0.1)]' is not a compressor: expected one of {KNOWN}.",
    "TopK(*[0.1])": "'TopK(*[0.1])' is not a compressor: `*` is not allowed in it.",
    "TopK(**{})": "'TopK(**{})' is not a compressor: `**` or an argument given twice is not allowed in it.",
    "TopK(10**9)": "'TopK(10**9)' is not a compressor: `10**9` is not allowed in it.",
    "TopK(0.05 + 0.05)": "'TopK(0.05 + 0.05)' is not a compressor: `0.05 + 0.05` is not allowed in it.",
    "TopK(f'{1}')": "\"TopK(f'{1}')\" is not a compressor: `f'{1}'` is not allowed in it.",
    "TopK(1j)": "'TopK(1j)' is not a compressor: `1j` is not allowed in it.",
    "TopK(b'1')": "\"TopK(b'1')\" is not a compressor: `b'1'` is not allowed in it.",
    "codecs.TopK(0.1)": "'codecs.TopK(0.1)' is not a compressor: `codecs.TopK(0.1)` is not allowed in it.",
    "TopK(0.1)(2)": "'TopK(0.1)(2)' is not a compressor: `TopK(0.1)(2)` is not allowed in it.",
    "TopK(0.1).density": "'TopK(0.1).density' is not a compressor: `TopK(0.1).density` is not allowed in it.",
    "TopK(x := 0.1)": "'TopK(x := 0.1)' is not a compressor: `x := 0.1` is not allowed in it.",
    "TopK(0.1 if 1 else 2)": "'TopK(0.1 if 1 else 2)' is not a compressor: `0.1 if 1 else 2` is not allowed in it.",
    "lambda: 1": "'lambda: 1' is not a compressor: `lambda: 1` is not allowed in it.",
    "__import__('os').abort()": (
        "\"__import__('os').abort()\" is not a compressor: `__import__('os').abort()` is not allowed in it."
    ),
    "TopK(__import__('os'))": f"Unknown compressor `__import__` in \"TopK(__import__('os'))\". Known: {KNOWN}.",
    "[TopK(0.1) for _ in 'ab']": (
        "\"[TopK(0.1) for _ in 'ab']\" is not a compressor: `[TopK(0.1) for _ in 'ab']` is not allowed in it."
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_notation_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    if text == "TopK(density=0.1, density=0.2)":  # the parser of some Pythons finds it, that of others leaves it to us
        assert str(error.value).startswith(f"{text!r} is not a compressor: ")
    else:
        assert str(error.value) == REFUSED[text]
    assert "\n" not in str(error.value)


def test_codec_error_lists_codecs() -> None:
    with pytest.raises(ValueError) as error:
        parse_notation("TopK(0.1, values=TopKk(0.1))", CODECS)
    assert str(error.value) == "Unknown codec `TopKk` in 'TopK(0.1, values=TopKk(0.1))'. Did you mean `TopK`?"
    with pytest.raises(ValueError) as error:
        parse_notation(0.1, CODECS)  # type: ignore[arg-type]
    assert str(error.value) == "A codec is written as text such as 'TopK(0.1)', but got 0.1."


@pytest.mark.parametrize(
    "opening", ["(", "[", "TopK(", "TopK(values=", "-", "-(", "not ", "a.", "1+", "{", "f(", "'", "\\", "#"]
)
def test_deep_and_huge_texts_are_refused_quickly(opening: str) -> None:
    closing = {"(": ")", "[": "]", "{": "}"}.get(opening[-1], ")" if "(" in opening else "")
    for count in (50, 90, 150, 199, 250, 330, 999, 100_000):
        text = opening * count + "1" + closing * count
        with pytest.raises(ValueError) as error:
            parse(text)
        assert len(str(error.value)) < 5 * MAX_LENGTH
        if len(text) > MAX_LENGTH:
            assert str(error.value) == f"A compressor is written in at most 1000 characters, but got {len(text)}."


def test_huge_numbers_are_refused() -> None:
    for text in ("TopK(" + "9" * 900 + ")", "Quantize(1" + "0" * 900 + ")", "TopK(0." + "0" * 900 + "1)"):
        with pytest.raises(ValueError):
            parse(text)
    assert repr(parse("TopK(0." + "1" * 900 + ")")) == "TopK(0.1111111111111111)"


@settings(max_examples=300, derandomize=True, database=None)
@given(st.text(alphabet="TopKQuantize(),=.'\"0123456789 []*-+:{}#\\\n_F", max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        method = parse(text)
    except ValueError:
        return
    assert parse(repr(method)) == method


def test_checks_coerce_and_refuse() -> None:
    assert check_real("x", 1, 0, 1) == 1.0
    assert isinstance(check_real("x", 1, 0, 1), float)
    assert check_integer("n", 3.0, 1) == 3
    assert isinstance(check_integer("n", 3.0, 1), int)
    assert check_choice("c", "a", ("a", "b")) == "a"
    for value in (True, "1", None, 1.1, -0.1, float("nan"), float("inf"), 2**2000):
        with pytest.raises(ValueError, match=r"^`x` must be in \[0, 1\], but got "):
            check_real("x", value, 0, 1)
    for value in (True, "1", None, 1.5, 0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^`n` must be an integer of at least 1, but got "):
            check_integer("n", value, 1)
    for choice in ("c", None, 1, ["a"]):
        with pytest.raises(ValueError, match=r"^`c` must be one of a, b, but got "):
            check_choice("c", choice, ("a", "b"))


def test_every_class_is_written_under_its_own_name() -> None:
    """A name that links and replicas share has two classes, which their own names tell apart."""
    for known, prefix in ((CODECS, ""), (COMPRESSORS, "Link"), (METHODS, "Replica")):
        for name, cls in known.items():
            assert name == cls.name()
            shared = prefix and name in COMPRESSORS and name in METHODS
            assert cls.__name__ == (f"{prefix}{name}" if shared else name)
            assert issubclass(cls, Notation)
            assert cls.__doc__
            assert ">>>" in cls.__doc__ or known is METHODS  # an example that is tested
