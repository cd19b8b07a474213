"""How often a judge agrees with known labels: the held-out figure of a generative reward model.

Rows are comparison chats whose last turn is the right verdict; the judge is asked the rest and its verdict is read
by the environment's own parser. Order matters only in which answer is preferred; equal verdicts on a labelled
preference count as disagreement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.judges import GeneratorJudge
from nemotron_steps.environments.judged.genrm_scores import parse_reply
from nemotron_steps.environments.responses import split_reasoning


@dataclass(frozen=True)
class Agreement:
    """Counts over held-out pairs."""

    pairs: int
    agreed: int
    unparsed: int

    @property
    def rate(self) -> float:
        """Share of pairs on which judge and label prefer the same answer."""
        return self.agreed / self.pairs if self.pairs else float("nan")


def preference(verdict: tuple[float, float, float]) -> int:
    """1 or 2: the preferred answer; 0: a tie. Scores decide, the ranking breaks their ties."""
    score_1, score_2, ranking = verdict
    if score_1 != score_2:
        return 1 if score_1 > score_2 else 2
    return 0 if ranking == 3.5 else (1 if ranking < 3.5 else 2)


def measure_agreement(
    judge: GeneratorJudge, rows: Sequence[PromptRow], *, temperature: float, max_tokens: int
) -> tuple[Agreement, list[dict[str, Any]]]:
    """Ask the judge every row.

    Returns:
        The counts, and one record a pair (question, label, reply).
    """

    async def ask_all() -> list[str]:
        return list(
            await asyncio.gather(
                *(
                    judge.complete(row.row["messages"][:-1], temperature=temperature, top_p=1.0, max_tokens=max_tokens)
                    for row in rows
                )
            )
        )

    replies = asyncio.run(ask_all())
    agreed = unparsed = 0
    records: list[dict[str, Any]] = []
    for row, reply in zip(rows, replies, strict=True):
        label_text = row.row["messages"][-1]["content"]
        label = parse_reply(split_reasoning(label_text)[1], 3.0, 3.5)
        found = parse_reply(split_reasoning(reply)[1], 3.0, 3.5)
        unparsed += found is None
        same = label is not None and found is not None and preference(found) == preference(label)
        agreed += same
        records.append(
            {
                "prompt": row.row["messages"][-2]["content"],
                "response": reply,
                "label": label_text,
                "reward": float(same),
            }
        )
    return Agreement(len(rows), agreed, unparsed), records
