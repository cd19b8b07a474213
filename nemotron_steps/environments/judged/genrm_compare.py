"""genrm_compare: a group's final answers, compared in pairs by a generative reward model.

The group is the rollouts of one group id; nothing is aggregated before every judge call of the group is back. When
the judge is unavailable the whole group fails, because its answers' scores depend on each other.

The rule follows public NeMo-Gym's `genrm_compare`: base score = mean over an answer's comparisons, plus bonuses and
zero-centred group terms on lengths and style.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.judged.genrm_messages import Layout, comparison_messages, is_contentless
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES, MAX_NOTES, Note, note_of
from nemotron_steps.environments.judged.judges import MeasuringJudge
from nemotron_steps.environments.judged.judging import JudgeSampling
from nemotron_steps.environments.responses import Response, conversation, split_reasoning
from nemotron_steps.environments.text.extraction import json_values
from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    from nemotron_steps.environments.judged.judges import Messages

JUDGE_ROLE = "genrm_model"

DEFAULT_PRINCIPLE = (
    "Prefer the answer that is correct, follows the request, and helps the person who asked, without needless length."
)


Strategy = Literal["circular", "all_pairs"]

RANKING_MIDPOINT = 3.5
SCORE_RANGE = (1.0, 5.0)
RANKING_RANGE = (1.0, 6.0)

_FENCE = re.compile(r"```json\s*(.*?)```", re.IGNORECASE | re.DOTALL)
_CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_STYLE_MARKS = (
    re.compile(r"^#{1,6}\s", re.MULTILINE),  # headers
    re.compile(r"^[^\S\n]*(?:\d+\.|[-*+])\s", re.MULTILINE),  # list items
    re.compile(r"\*\*[^*\n]+\*\*"),  # bold
    re.compile(r"__[^_\n]+__"),
    # Emoji and symbols. NeMo-Gym counts all from U+24C2 to U+1F251: every character of Chinese, Japanese and Korean, of
    # full width, and that draws a table.
    re.compile("[\u24c2\u25a0-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff]"),
)


@dataclass(frozen=True)
class Comparison:
    """One judge reply about answers i (shown first) and j. Scores in 1-5; ranking 1 (i much better) to 6."""

    i: int
    j: int
    score_1: float
    score_2: float
    ranking: float
    parsed: bool = True
    """False when no reply could be parsed and the defaults stand in."""
    note: Mapping[str, str] = field(default_factory=dict)
    """What the judge said, cut (judge_transcripts.py)."""


def pairs(strategy: Strategy, n: int) -> list[tuple[int, int]]:
    """Ordered pairs to compare among n answers: n of them for circular, n(n-1)/2 for all_pairs, none below 2."""
    if n < 2:
        return []
    if strategy == "circular":
        return [(i, (i + 1) % n) for i in range(n)]
    return list(combinations(range(n), 2))


def parse_reply(text: str, default_score: float, default_ranking: float) -> tuple[float, float, float] | None:
    """(score_1, score_2, ranking) of a judge's reply: the first valid fenced JSON, else the last valid object."""
    for fence in _FENCE.finditer(text):
        for raw, value in json_values(fence.group(1), "{"):
            found = _scores(raw, value, default_score, default_ranking)
            if found is not None:
                return found
    last = None
    for raw, value in json_values(text, "{"):
        last = _scores(raw, value, default_score, default_ranking) or last
    return last


def _scores(
    raw: str, value: dict[str, Any], default_score: float, default_ranking: float
) -> tuple[float, float, float] | None:
    if isinstance(value.get("overall"), dict):
        value = value["overall"]
    # Keys must be spelled out: an escaped spelling in a reply is quoted from an answer that tries to write the verdict.
    if not any(key in value and f'"{key}"' in raw for key in ("score_1", "score_2", "ranking")):
        return None
    score_1, score_2 = (_number(value.get(key, default_score), SCORE_RANGE) for key in ("score_1", "score_2"))
    ranking = _number(value.get("ranking", default_ranking), RANKING_RANGE)
    return None if score_1 is None or score_2 is None or ranking is None else (score_1, score_2, ranking)


def _number(value: Any, bounds: tuple[float, float]) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and bounds[0] <= number <= bounds[1] else None


def base_scores(comparisons: Sequence[Comparison], n: int, default_score: float) -> list[float]:
    """Mean score of each of n answers over its comparisons; ties are broken by the ranking."""
    totals = [0.0] * n
    counts = [0] * n
    for item in comparisons:
        shift = RANKING_MIDPOINT - item.ranking if item.score_1 == item.score_2 else 0.0
        totals[item.i] += item.score_1 + shift
        totals[item.j] += item.score_2 - shift
        counts[item.i] += 1
        counts[item.j] += 1
    return [total / count if count else default_score for total, count in zip(totals, counts, strict=True)]


def shortest_bonus(scores: Sequence[float], lengths: Sequence[int], bonus: float, top_percentile: float) -> list[float]:
    """`bonus` for the answer with the shortest non-zero length, if its score is among the top; zeros elsewhere."""
    gained = [0.0] * len(scores)
    candidates = [index for index, length in enumerate(lengths) if length > 0]
    if candidates and bonus:
        threshold = sorted(scores, reverse=True)[max(0, int(len(scores) * top_percentile) - 1)]
        shortest = min(candidates, key=lambda index: lengths[index])
        gained[shortest] = bonus if scores[shortest] >= threshold else 0.0
    return gained


def centred_weights(values: Sequence[float]) -> list[float]:
    """w = 1 - (value - min) / (max - min), minus the group's mean of w: smaller is better, the sum is 0."""
    low, high = min(values), max(values)
    if low == high:
        return [0.0] * len(values)
    raw = [1.0 - (value - low) / (high - low) for value in values]
    mean = sum(raw) / len(raw)
    return [weight - mean for weight in raw]


def style_density(text: str) -> float:
    """Markdown marks (headers, list items, bold, emoji) per character, code blocks left out of both."""
    prose = _CODE_BLOCK.sub("", text)
    length = len(prose.strip())
    return sum(len(mark.findall(prose)) for mark in _STYLE_MARKS) / length if length else 0.0


class GenrmCompareConfig(EnvironmentConfig):
    """Settings, named as in public NeMo-Gym configs. Lengths are characters of the stripped text, as there; style is
    markdown marks per character."""

    comparison_strategy: Strategy = "circular"
    """Which answers are compared: each with the next one, in a circle, or all pairs."""
    num_judges_per_comparison: int = Field(1, ge=1)
    """How often each pair is judged."""
    layout: Layout = "roles"
    """How the judge is shown two answers: in roles of its own chat template, or in one user message."""
    use_principle: bool = False
    """Tell the judge what to judge by: the row's `principle`, or default_principle."""
    default_principle: str = DEFAULT_PRINCIPLE
    """For rows that have no `principle`."""
    aggregator_method: Literal["simple_tiebreaker"] = "simple_tiebreaker"
    """How comparisons become scores: the mean, ties broken by the rankings."""
    reasoning_bonus: float = Field(0.0, ge=0.0)
    """For the shortest reasoning among the best answers."""
    answer_bonus: float = Field(0.0, ge=0.0)
    """For the shortest answer among the best."""
    top_percentile: float = Field(0.2, gt=0.0, le=1.0)
    """Share of the answers that are the best ones."""
    group_reasoning_length_penalty_coeff: float = Field(0.0, ge=0.0)
    """Weight of reasoning that is short beside the group's."""
    group_answer_length_penalty_coeff: float = Field(0.0, ge=0.0)
    """Weight of answers that are short beside the group's."""
    group_style_penalty_coeff: float = Field(0.0, ge=0.0)
    """Weight of little markdown beside the group's."""
    default_score: float = Field(3.0, ge=1.0, le=5.0)
    """Of both answers where no reply can be read, and of a group of one."""
    default_ranking: float = Field(3.5, ge=1.0, le=6.0)
    """Where no reply can be read: between the two middle ones."""
    genrm_parse_retries: int = Field(3, ge=0)
    """How often a judge whose reply cannot be read is asked again."""
    genrm_responses_create_params: JudgeSampling = JudgeSampling()
    """How the judge samples: temperature, top_p, max_output_tokens."""


class GenrmCompare(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "genrm_compare"
    judges_groups: ClassVar[bool] = True
    usual_range = SCORE_RANGE
    config_class = GenrmCompareConfig
    config: GenrmCompareConfig

    def _setup(self) -> None:
        # Scores are in 1-5 and a tie-break moves them by at most 2.5; group weights lie within (-1, 1).
        config = self.config
        terms = config.group_reasoning_length_penalty_coeff + config.group_answer_length_penalty_coeff
        terms += config.group_style_penalty_coeff
        self.reward_range = (-1.5 - terms, 7.5 + terms + config.reasoning_bonus + config.answer_bonus)

    def needed_judges(self) -> tuple[str, ...]:
        return (JUDGE_ROLE,)

    def check_values(self, row: Row) -> None:
        if not any(message["content"].strip() for message in conversation(row)):
            raise RowError("responses_create_params.input", "a message with text", "no text")
        if row.get("principle") is not None and not isinstance(row["principle"], str):
            raise RowError("principle", "a string", type(row["principle"]).__name__)

    def check_row_with_resources(self, row: Row, where: str) -> None:
        """See Environment; also that the judge sees what it compares, and has room for an answer."""
        super().check_row_with_resources(row, where)
        judge = self.judges.get(JUDGE_ROLE)
        if isinstance(judge, MeasuringJudge):
            question = self._question(row, "", "")
            layout = f"env.nemo_gym.environments.{self.name}.layout"
            if unwritten := judge.unwritten(question):
                raise ConfigError(
                    f"the chat template of {JUDGE_ROLE} does not write {' and '.join(unwritten)} messages: the "
                    "judge would not see what it is asked about",
                    where=f"{layout}={self.config.layout}",
                    expected="a generative reward model whose template does, or another layout",
                    hints=(f"{layout}=plain   # one user message, for any chat model",),
                )
            judge.refuse_longer(question, where, max_tokens=self.config.genrm_responses_create_params.max_output_tokens)

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        return (await self.verify_group(row, [response], [session]))[0]

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        if len(responses) < 2:
            return [GradeResult(self.config.default_score, {"group_of_one": 1.0}) for _ in responses]
        return self.aggregate(responses, await self.compare(row, [response.text for response in responses]))

    async def compare(self, row: Row, answers: Sequence[str]) -> list[Comparison]:
        """Every judge call of a group; raises JudgeUnavailableError after all of them have ended."""
        shown = ["" if is_contentless(answer) else answer for answer in answers]
        calls = [
            self._judge(i, j, self._question(row, shown[i], shown[j]))
            for i, j in pairs(self.config.comparison_strategy, len(answers))
            for _ in range(self.config.num_judges_per_comparison)
        ]
        compared: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        for error in (each for each in compared if isinstance(each, BaseException)):
            raise error
        return compared

    def _question(self, row: Row, answer_1: str, answer_2: str) -> Messages:
        principle = (row.get("principle") or self.config.default_principle) if self.config.use_principle else None
        return comparison_messages(conversation(row), answer_1, answer_2, principle, self.config.layout)

    def aggregate(self, responses: Sequence[Response], comparisons: Sequence[Comparison]) -> list[GradeResult]:
        """Scores of a group. Being the shortest must not pay for saying nothing: an answer without content earns no
        bonus and never more than any with content."""
        config = self.config
        n = len(responses)
        empty = [is_contentless(response.text) for response in responses]
        answers = [len(response.text.strip()) for response in responses]
        said = [0 if void else length for length, void in zip(answers, empty, strict=True)]
        thoughts = [len(response.reasoning.strip()) for response in responses]
        base = base_scores(comparisons, n, config.default_score)
        terms: dict[str, list[float]] = {
            "reasoning_bonus": shortest_bonus(base, thoughts, config.reasoning_bonus, config.top_percentile),
            "answer_bonus": shortest_bonus(base, said, config.answer_bonus, config.top_percentile),
        }
        for key, coefficient, values in (
            ("reasoning_length_term", config.group_reasoning_length_penalty_coeff, [float(v) for v in thoughts]),
            ("answer_length_term", config.group_answer_length_penalty_coeff, [float(v) for v in answers]),
            ("style_term", config.group_style_penalty_coeff, [style_density(r.text) for r in responses]),
        ):
            terms[key] = [coefficient * weight for weight in centred_weights(values)]
        rewards = [base[k] + sum(term[k] for term in terms.values()) for k in range(n)]
        ceiling = min((reward for reward, void in zip(rewards, empty, strict=True) if not void), default=None)
        if ceiling is not None:
            rewards = [min(reward, ceiling) if void else reward for reward, void in zip(rewards, empty, strict=True)]
        shared = {
            "judge_score_mean": sum(c.score_1 + c.score_2 for c in comparisons) / (2 * len(comparisons)),
            "tiebreak_rate": sum(c.score_1 == c.score_2 for c in comparisons) / len(comparisons),
            "parse_failure_rate": sum(not c.parsed for c in comparisons) / len(comparisons),
        }
        notes: list[list[Note]] = [[] for _ in responses]
        for c in comparisons:
            for place, k in ((1, c.i), (2, c.j)):
                notes[k] += [{"compared": f"as answer {place} of 2", **c.note}] if c.note else []
        verdicts = []
        for k in range(n):
            components = {"base_score": base[k], "contentless": float(empty[k]), **shared}
            components |= {key: term[k] for key, term in terms.items()}
            verdicts.append(GradeResult(rewards[k], components, details={JUDGE_NOTES: notes[k][:MAX_NOTES]}))
        return verdicts

    async def _judge(self, i: int, j: int, messages: Messages) -> Comparison:
        config = self.config
        for _ in range(config.genrm_parse_retries + 1):
            reply = await config.genrm_responses_create_params.reply(self.judges[JUDGE_ROLE], messages)
            found = parse_reply(split_reasoning(reply)[1], config.default_score, config.default_ranking)
            if found is not None:
                return Comparison(i, j, *found, note=note_of(reply))
        return Comparison(i, j, config.default_score, config.default_score, config.default_ranking, parsed=False)
