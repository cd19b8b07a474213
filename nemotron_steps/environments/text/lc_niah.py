"""lc_niah: find nodes in a long context. F1 of the final list of nodes, reduced by how much of the reasoning was copied
from the prompt."""

import json
import re
from difflib import SequenceMatcher
from typing import ClassVar, Literal

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response, conversation

NGRAM = 16

_FINAL = re.compile(r"Final Answer:\s*\[")

OverlapMetric = Literal["ngram16", "lcs", "seq_match"]


class LcNiahConfig(EnvironmentConfig):
    """Settings."""

    overlap_metric_rule: OverlapMetric = "lcs"
    """ngram16: share of the reasoning's 16-word sequences found in the prompt; lcs: longest common substring over the
    reasoning's length; seq_match: difflib's ratio."""


class LcNiah(Environment):
    """See the module docstring. A row has `expected_answer`, the nodes as a JSON list in a text."""

    name: ClassVar[str] = "lc_niah"
    required_fields: ClassVar[tuple[str, ...]] = ("expected_answer",)
    config_class = LcNiahConfig
    config: LcNiahConfig

    def check_values(self, row: Row) -> None:
        try:
            valid = isinstance(json.loads(row["expected_answer"]), list)
        except (ValueError, TypeError):
            valid = False
        if not valid:
            raise RowError("expected_answer", "a JSON list of nodes, as text", repr(row["expected_answer"])[:80])

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        expected = {str(node) for node in json.loads(row["expected_answer"])}
        found = final_nodes(response.text)
        score = 0.0 if found is None else f1(expected, found)
        prompt = "\n".join(message["content"] for message in conversation(row))
        rule = self.config.overlap_metric_rule
        if rule == "ngram16":
            copied = overlap(response.reasoning, prompt, rule)
        else:  # difflib takes quadratic time: many seconds for an honest answer over a long prompt
            copied = await self.in_helper(overlap, response.reasoning, prompt, rule, cpu_s=60.0)
        return GradeResult(score * (1.0 - copied), {"answer_score": score, "reasoning_overlap": copied})


def final_nodes(text: str) -> set[str] | None:
    """Nodes of "Final Answer: [a, b]" on the last non-empty line, None when the line is not of that form."""
    lines = text.strip().splitlines()
    match = _FINAL.search(lines[-1]) if lines else None
    end = lines[-1].rfind("]") if lines else -1
    if match is None or end < match.end():
        return None
    nodes = (item.strip().strip("\"'").strip() for item in lines[-1][match.end() : end].split(","))
    return {node for node in nodes if node}


def f1(expected: set[str], found: set[str]) -> float:
    """Harmonic mean of precision and recall; 1 for two empty sets."""
    if not expected and not found:
        return 1.0
    return 2 * len(expected & found) / (len(expected) + len(found))


def overlap(reasoning: str, prompt: str, rule: OverlapMetric) -> float:
    """Share of the reasoning copied from the prompt, in [0, 1]; case and spacing ignored, 0 without reasoning."""
    thought, source = (" ".join(text.lower().split()) for text in (reasoning, prompt))
    if not thought:
        return 0.0
    if rule == "seq_match":
        return SequenceMatcher(None, thought, source).ratio()
    if rule == "lcs":
        longest = SequenceMatcher(None, thought, source, autojunk=False).find_longest_match()
        return longest.size / len(thought)
    own, other = _ngrams(thought), _ngrams(source)
    return len(own & other) / len(own) if own else 0.0


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1)}
