"""Rubrics: several yes-or-no verdicts of a judge about one answer, combined into a reward. Shared by multichallenge and
inverse_if."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from nemotron_steps.environments.base import Response, Row, RowError, Session, Verdict
from nemotron_steps.environments.judged.judging import JudgedConfig, JudgedEnvironment

Aggregation = Literal["mean", "min", "max", "all", "any", "weighted"]


class RubricConfig(JudgedConfig):
    """Settings."""

    aggregation_mode: Aggregation = "mean"
    """weighted: the share of the passed items' `weight` (1 where a row gives none). min is all, max is any."""


class RubricEnvironment(JudgedEnvironment):
    """An environment whose rows have a `rubric`, a list of objects."""

    required_fields: ClassVar[tuple[str, ...]] = ("rubric",)
    config_class = RubricConfig
    config: RubricConfig

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """The aggregated verdicts; an empty answer passes nothing."""
        if not response.text.strip():
            return Verdict(0.0, {"answered": 0.0})
        rubric = row["rubric"]
        passed = await asyncio.gather(*(self.passes(row, response.text, item) for item in rubric))
        reward = aggregate(passed, weights_of(rubric), self.config.aggregation_mode)
        return Verdict(reward, {"answered": 1.0, "items_passed": sum(passed) / len(passed)})

    @abstractmethod
    async def passes(self, row: Row, answer: str, item: dict[str, Any]) -> bool:
        """Ask the judge about one item."""


def aggregate(passed: Sequence[bool], weights: Sequence[float], mode: Aggregation) -> float:
    """Reward in [0, 1] of a rubric's verdicts; at least one item."""
    if mode in ("all", "min"):
        return float(all(passed))
    if mode in ("any", "max"):
        return float(any(passed))
    shares = weights if mode == "weighted" else [1.0] * len(passed)
    return sum(share for share, kept in zip(shares, passed, strict=True) if kept) / sum(shares)


def weights_of(rubric: Sequence[dict[str, Any]]) -> list[float]:
    """Weight of every rubric item."""
    return [float(item.get("weight", 1.0)) for item in rubric]


def check_rubric(row: Row, key: str) -> None:
    """The row's rubric is a list of objects with `key` text, and weights that can be averaged.

    Raises:
        RowError: it is not.
    """
    rubric = row["rubric"]
    if not isinstance(rubric, list) or not rubric:
        raise RowError("rubric", "at least one item", repr(rubric)[:80])
    for index, item in enumerate(rubric):
        if not isinstance(item, dict) or not str(item.get(key) or "").strip():
            raise RowError(f"rubric[{index}].{key}", "the text of the item", repr(item)[:80])
    try:
        weights = weights_of(rubric)
    except (TypeError, ValueError) as error:
        raise RowError("rubric", "numbers as weights", str(error)) from error
    if min(weights) < 0 or sum(weights) <= 0 or not math.isfinite(sum(weights)):
        raise RowError("rubric", "finite weights that are not negative and not all zero", repr(weights))
