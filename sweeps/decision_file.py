"""Read `decision.json`, which a stranger may have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError, model_validator

from raysim.config import ConfigError
from raysim.config.reading import sentence
from raysim.forecast.bandwidth import Parts
from raysim.forecast.gains import Alternative
from raysim.storage.files import read_text
from raysim.storage.texts import parse_json
from raysim.sweeps.contenders import Candidate, nested


class _Decision(BaseModel):
    """The values of `decision.json`."""

    question: dict[str, Any]
    ended: Literal["", "priced", "screened", "raced"]
    decision: list[str]
    code: str
    dense_step_s: Annotated[FiniteFloat, Field(ge=0)]
    most_speedup: Annotated[FiniteFloat, Field(gt=0)]
    parts: Parts | None
    ways: list[Alternative]
    findings: list[str]
    candidates: list[Annotated[Candidate, BeforeValidator(nested)]]
    settled: bool
    spent_s: Annotated[FiniteFloat, Field(ge=0)]

    @model_validator(mode="after")
    def _has_a_step(self) -> Self:
        if self.ended and (self.parts is None or not self.dense_step_s):
            raise ValueError("`dense_step_s` and `parts` must be those of a step, since prices have ended.")
        return self


_NAMES = {"decision": "sentences", "dense_step_s": "dense_s", "most_speedup": "limit"}
"""Fields of a decision by another name in the file."""


def read_decision(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the question and the state of a decision, by its fields' names; raises ConfigError if the file is damaged."""
    try:
        values = parse_json(read_text(file))
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
        kept = _Decision.model_validate(values)
    except (OSError, ValueError) as error:
        reason = sentence(error) if isinstance(error, ValidationError) else f"{error}."
        raise ConfigError(f"Nothing to resume: {file} cannot be read: {reason}") from None
    state = {_NAMES.get(name, name): getattr(kept, name) for name in _Decision.model_fields}
    return state.pop("question"), state
