"""Config models that keep to the rules, and such that do not."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Open(BaseModel):
    """Lets unknown keys pass."""

    model_config = ConfigDict(frozen=True)


class Changing(BaseModel):
    model_config = ConfigDict(extra="forbid")
