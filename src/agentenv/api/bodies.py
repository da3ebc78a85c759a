"""The base of all request bodies: null means absent, types are strict (a number in quotes is an error, not a guess)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """Unknown fields are ignored unless a body says otherwise."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, populate_by_name=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values
