"""A schema with every shape of field the validator has to explain."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Optimizer(Section):
    lr: float = Field(default=1e-3, gt=0)
    name: Literal["adam", "sgd"] = "adam"


class Judge(Section):
    model: str | None = None
    tries: int = 3


class Toy(Section):
    steps: int = 10
    optimizer: Optimizer = Optimizer()
    judge: Judge | None = None
    judges: dict[str, Judge] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    stages: tuple[Optimizer, ...] = ()
    either: int | str | None = None
    api_key: str | None = None
