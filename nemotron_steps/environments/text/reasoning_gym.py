"""reasoning_gym: procedural tasks graded by the reasoning-gym library's own scorer, chosen by the row's
`metadata.source_dataset`.

The library is imported when the first row is checked or scored. Answers its scorers would evaluate as code pass
expression_guard first; a refused answer is scored as one that cannot be parsed.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nemotron_steps.environments.base import (
    Environment,
    EnvironmentConfig,
    Response,
    Row,
    RowError,
    Session,
    Verdict,
)
from nemotron_steps.environments.text.expression_guard import (
    is_bounded_arithmetic,
    is_inert_literal,
    is_plain_number_text,
)
from nemotron_steps.environments.text.extraction import last_answer_tag, last_boxed
from nemotron_steps.errors import UnsupportedError

if TYPE_CHECKING:
    from nemotron_steps.environments.judged.judges import Judge

EVALUATED_AS_LITERAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose scorer calls eval on the answer."""

EVALUATED_AS_EXPRESSION = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose scorer calls sympy's parse_expr on the answer."""

COMPARED_AS_TUPLES = frozenset({"arc_agi", "rearc"})
"""Data sets whose scorer compares `metadata.output` with tuples, which JSON turned into lists."""

UNPARSEABLE = "?"
"""Stands in for a refused answer: no scorer can read it as anything."""

SCORER_FAILED = "scorer_failed"
"""Failure class: the library's scorer raised on this row even for the row's own answer."""

Scorer = Callable[..., float]


class ReasoningGym(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "reasoning_gym"
    required_fields: ClassVar[tuple[str, ...]] = ("question", "metadata.source_dataset")

    def __init__(self, config: EnvironmentConfig, judges: Mapping[str, Judge]) -> None:
        super().__init__(config, judges)
        self._scorers: dict[str, Scorer] = {}

    def check_values(self, row: Row) -> None:
        """The data set must exist in the installed library, and the fields its scorer evaluates must be plain data."""
        if "answer" not in row:
            raise RowError("answer", "the reference answer (null where the data set has none)", "no such field")
        if not isinstance(row["answer"], str | None):
            raise RowError("answer", "a string or null", type(row["answer"]).__name__)
        source = row["metadata"]["source_dataset"]
        if not isinstance(source, str) or self._scorer(source) is None:
            raise RowError("metadata.source_dataset", "a data set of the installed reasoning-gym", repr(source))
        if source == "number_sorting" and not is_inert_literal(str(row["answer"])):
            raise RowError("answer", "a list of numbers", repr(row["answer"])[:80])
        if source == "bitwise_arithmetic" and not _is_bitwise(str(row["metadata"].get("problem", ""))):
            raise RowError("metadata.problem", "an expression of hexadecimal numbers", repr(row["metadata"])[:80])

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """The library's score in [0, 1]."""
        # Scorers are synchronous and some are slow (sympy); a thread keeps the event loop free.
        return await asyncio.to_thread(self.grade, row, response.text)

    def grade(self, row: Row, text: str) -> Verdict:
        """As verify, for callers outside an event loop. `row` needs the verifier fields only."""
        source = row["metadata"]["source_dataset"]
        answer = extract_answer(text)
        vetted = answer if is_safe_answer(source, answer) else UNPARSEABLE
        score, failure = self._score(source, vetted, row)
        details = {"extracted_answer": answer}
        if score is None:
            return Verdict.failed(SCORER_FAILED, message=failure, **details)
        components = {"score": score, "answer_refused": float(vetted is not answer)}
        return Verdict(score, components, details=details)

    def _score(self, source: str, answer: str, row: Row) -> tuple[float | None, str]:
        scorer = self._scorer(source)
        if scorer is None:
            return None, f"no data set {source!r} in the installed reasoning-gym"
        entry: dict[str, Any] = {key: copy.deepcopy(row.get(key)) for key in ("question", "answer", "metadata")}
        if source in COMPARED_AS_TUPLES:
            entry["metadata"]["output"] = _as_tuples(entry["metadata"].get("output"))
        try:
            return _unit(scorer(answer=answer, entry=entry)), ""
        except Exception as error:
            cause = repr(error)
        # Whose fault? A scorer that also fails on the reference answer cannot judge this row at all.
        try:
            scorer(answer=entry["answer"], entry=entry)
        except Exception:
            return None, cause
        return 0.0, ""

    def _scorer(self, source: str) -> Scorer | None:
        if source not in self._scorers:
            try:
                import reasoning_gym
            except ImportError as error:
                raise UnsupportedError(
                    "the reasoning_gym environment needs the reasoning-gym package",
                    found=str(error),
                    hints=("pip install reasoning-gym",),
                ) from error
            try:
                self._scorers[source] = reasoning_gym.get_score_answer_fn(source)
            except ValueError:
                return None
        return self._scorers[source]


def extract_answer(text: str) -> str:
    """The answer of a response: the last <answer> tag, else the last box, else the whole text."""
    tagged = last_answer_tag(text)
    if tagged is not None:
        return tagged
    box = last_boxed(text)
    return text.strip() if box is None else box


def is_safe_answer(source: str, answer: str) -> bool:
    """Whether the scorer of `source` may see this answer; see expression_guard."""
    if source in EVALUATED_AS_LITERAL:
        return is_inert_literal(answer)
    if source in EVALUATED_AS_EXPRESSION:
        return is_bounded_arithmetic(answer)
    return is_plain_number_text(answer)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _is_bitwise(problem: str) -> bool:
    return bool(problem) and not set(problem) - set("0123456789abcdefABCDEFxX+-*&|^~<>() ") and "**" not in problem


def _unit(score: Any) -> float:
    value = float(score)
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0
