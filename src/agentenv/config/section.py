"""What every section of the configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of settings: unknown ones are refused, none changes while the node runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
