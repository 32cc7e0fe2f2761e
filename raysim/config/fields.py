"""Common parts of configuration tables: types of numbers, roles of keys, and strict parsing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = 2**31 - 1  # the greatest count that the records hold
Role = Literal["setting", "compression", "seed", "arithmetic", "observation", "place"]
"""The part of a key in a run's result.

"setting": decides the result. "compression": a setting of links or replicas, by which runs of one job are compared. "seed":
draws another sample of the same setting. "arithmetic": changes the last bits only. "observation": how often a run is looked
at. "place": where it runs and its name; a resumed run may change it.
"""


def role(name: Role) -> dict[str, Any]:
    """Return the argument of `Field` that gives a key its role; keys without one are settings."""
    return {"role": name}


Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
MOST_STAGES = 1024  # a few times the stages of the largest published pipelines


class Strict(BaseModel):
    """A table that refuses unknown keys, and booleans in place of numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("no_truth", "Input should be a number or a text, not a boolean")
        return value
