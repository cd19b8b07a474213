"""What becomes of a chat of the user's own: it is read, and its reasoning is controlled."""

from __future__ import annotations

from dataclasses import dataclass

from nemotron_steps.config.schema.data_prep import ReasoningControlConfig
from nemotron_steps.engine.rollouts.low_effort import with_instruction
from nemotron_steps.rows.layouts import read_chat
from nemotron_steps.rows.lines import Row
from nemotron_steps.rows.messages import is_list, written
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
            chat = read_chat(row, where)
            read = {**row, "messages": written(chat.messages), **({"tools": chat.tools} if chat.tools else {})}
            changed = control(read)
            if row.get("reasoning_effort") == "low":
                messages = with_instruction((changed or read)["messages"], self.low_effort_instruction)
                changed = {**(changed or read), "messages": messages}
            # A chat that its trainer reads as it is stays so, byte for byte.
            return None if changed is None and is_list(row.get("messages")) else [changed or read]

        return become
