"""What becomes of a chat of the user's own: it is checked, and its reasoning is controlled."""

from __future__ import annotations

from dataclasses import dataclass

from nemotron_steps.artifacts.rows import A_CHAT, Row, chat_row, shown_fields
from nemotron_steps.config.schema.data_prep import ReasoningControlConfig
from nemotron_steps.engine.rollouts.low_effort import with_instruction
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction
from nemotron_steps.steps.data_prep.reasoning_control import ReasoningControl


@dataclass(frozen=True)
class ChatWork:
    """See RowWork.

    Attributes:
        reasoning: shares of chats whose reasoning is stripped or cut.
        low_effort_instruction: for chats with `"reasoning_effort": "low"`.
    """

    reasoning: ReasoningControlConfig
    low_effort_instruction: str

    def function(self) -> RowFunction:
        """See RowWork."""
        control = ReasoningControl(self.reasoning)

        def become(where: str, row: Row) -> list[Row] | None:
            problem = chat_row(row)
            if problem is not None:
                field = f"{where} field messages"
                expected = f"a row like {A_CHAT}" if "messages" not in row else None
                raise DataError(
                    problem, where=field, expected=expected, found=shown_fields(row), hints=show_line(where)
                )
            changed = control(row)
            if row.get("reasoning_effort") == "low":
                messages = with_instruction((changed or row)["messages"], self.low_effort_instruction)
                changed = {**(changed or row), "messages": messages}
            return None if changed is None else [changed]

        return become
