"""Comparison chats for a generative reward model out of the user's own pairs of answers, with their principles.

The verdict follows the preference: its ranking is the preference on the judge's scale, 1 (the first is much better) to
6; its scores are the row's `helpfulness_1` and `helpfulness_2` where it has them, else they are as far apart as the
preference is strong.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemotron_steps.config.schema.data_prep import ComparisonConfig
from nemotron_steps.environments.judged.genrm_messages import comparison_messages, is_contentless, verdict_text
from nemotron_steps.environments.responses import split_reasoning
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.rows.lines import Row
from nemotron_steps.rows.messages import texts_of
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction, RowLeftOut
from nemotron_steps.steps.data_prep.pair_layouts import answer_pair

RANKINGS = {-3: 1, -2: 2, -1: 3, 1: 4, 2: 5, 3: 6}
SCORES = {1: (4, 3), 2: (4, 2), 3: (5, 1)}
"""Strength of a preference → scores of the better and the worse answer."""


@dataclass(frozen=True)
class ComparisonWork:
    """See RowWork: a comparison chat of each row, ties left out, as the judge's scale has none.

    Attributes:
        config: its layout and principle.
    """

    config: ComparisonConfig

    def function(self) -> RowFunction:
        """See RowWork."""
        return self._become

    def _become(self, where: str, row: Row) -> list[Row]:
        pair = answer_pair(row, where)
        if pair.preference == 0:
            raise RowLeftOut("neither answer is preferred")
        # As genrm_compare shows them: without reasoning, and one that says nothing as an empty one.
        answers = [split_reasoning(answer)[1] for answer in (pair.answer_1, pair.answer_2)]
        shown = ["" if is_contentless(answer) else answer for answer in answers]
        principle = pair.principle or self.config.principle
        talk = [{"role": m["role"], "content": texts_of(m)} for m in pair.conversation]
        asked = comparison_messages(talk, shown[0], shown[1], principle, self.config.layout)
        reply = verdict_text(*_scores(row, pair.preference, where), RANKINGS[pair.preference])
        return [{"messages": [*asked, {"role": "assistant", "content": reply}], "preference": pair.preference}]


def _scores(row: Row, preference: int, where: str) -> tuple[int, int]:
    given = row.get("helpfulness_1"), row.get("helpfulness_2")
    if given != (None, None):
        for number, score in enumerate(given, start=1):
            if isinstance(score, bool) or not isinstance(score, int) or not 1 <= score <= 5:
                field = f"helpfulness_{number}"
                raise DataError(
                    f"{field} must be a whole number from 1 to 5",
                    where=f"{where} field {field}",
                    found=repr(score),
                    hints=show_line(where),
                )
        return given[0], given[1]  # type: ignore[return-value]
    better, worse = SCORES[abs(preference)]
    return (better, worse) if preference < 0 else (worse, better)
