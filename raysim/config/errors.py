"""Errors of a configuration, in one sentence."""

from __future__ import annotations

import re

from pydantic import ValidationError

from raysim.config.optimizer import OptimizerConfig
from raysim.config.run import RunConfig
from raysim.errors import InputError
from raysim.notation import known_words, shown

# Words that pydantic puts into the path of a value of several kinds; no key has such a name.
_UNION = ("str", "constrained-int")
_NESTED = ("tuple[", "dict[", "constrained-tuple")


class ConfigError(InputError):
    """A configuration is wrong: one sentence with field, value and rule."""


def sentence(error: ValidationError) -> str:
    """Return the first error of pydantic's as one of our sentences."""
    found = error.errors(include_url=False)
    # of a field that is one value or a list, the rule of the one that was given
    one = ("int_type", "string_type", "dict_type")
    errors = [each for each in found if each["type"] not in one or not isinstance(each["input"], (list, tuple))]
    first = (errors or found)[0]
    key = ".".join(str(part) for part in first["loc"] if part not in _UNION and not str(part).startswith(_NESTED))
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"]).strip()
        return text if ("`" in text and not key) or f"`{key}" in text else f"`{key}`: {text}"
    if first["type"] == "extra_forbidden":
        known = OptimizerConfig.model_fields if key.startswith("optimizer.") else RunConfig.model_fields
        prefix = "optimizer." if key.startswith("optimizer.") else ""
        return f"Unknown key `{key}`.{known_words(key.removeprefix(prefix), known, prefix)}"
    if first["type"] == "missing":
        return f"`{key}` must be given."
    rules = {"model_type": "a table of keys", "tuple_type": "a list", "int_parsing_size": "an integer of fewer digits"}
    if first["type"] == "too_long":
        rules["too_long"] = f"a list of at most {first['ctx']['max_length']} entries"
    rule = rules.get(
        first["type"],
        re.sub(", (unable|got) .*", "", first["msg"].removeprefix("Input should be ")),  # how pydantic read it
    )
    return f"`{key}` must be {rule}, but got {shown(first['input'])}."
