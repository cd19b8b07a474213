"""Rows of prompts as other trainers have them → NeMo-Gym's shape. Every field of a row survives.

| layout | known by | the prompt |
|---|---|---|
| nemo_gym | `responses_create_params` | as it is, or the column that is named |
| trl, verl | `prompt` | a text, or a list of messages |
| chat | `messages` (or `conversations`) | all but the assistant's last answer, which becomes `completion` |
| table | `question`, `problem`, `instruction`, `query` or `input` | a text |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.artifacts.rows import Row, prompt_row, shown_fields
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction

TABLE_COLUMNS = ("question", "problem", "instruction", "query", "input")
_REQUEST = "responses_create_params"
_CHAT_COLUMNS = ("messages", "conversations")
_NAME = re.compile(r"\w[\w.-]*")
_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of `conversations` there → here."""
CORRECT = '{"prompt": "What is 1 + 1?", "answer": "2"}'


@dataclass(frozen=True)
class PromptImport:
    """See RowWork.

    Attributes:
        column: the column of the prompt; None: told from the names.
        system: a system message before every prompt that has none.
    """

    column: str | None = None
    system: str | None = None

    def function(self) -> RowFunction:
        """See RowWork."""

        def become(where: str, row: Row) -> list[Row]:
            return [self.imported(where, row)]

        return become

    def imported(self, where: str, row: Row) -> Row:
        """One row in NeMo-Gym's shape.

        Raises:
            DataError: nothing in it is a prompt.
        """
        if self.column in (None, _REQUEST) and _REQUEST in row:
            problem = prompt_row(row)
            if problem is not None:
                raise DataError(problem, where=where, found=shown_fields(row), hints=show_line(where))
            return row if self.system is None else {**row, _REQUEST: self._with_system(row[_REQUEST])}
        column = self.column if self.column is not None else layout_of(row)[1]
        if column not in row:
            raise DataError(
                "nothing in the row is a prompt" if self.column is None else f"the row has no column '{column}'",
                where=where,
                expected=f"a row like {CORRECT}",
                found=shown_fields(row),
                hints=(*(f"prompt_column={name}" for name in text_columns(row)[:2]), *show_line(where)),
            )
        messages, answer = _conversation(row[column], column in _CHAT_COLUMNS, f"{where} field {column}", where)
        own = {"completion": answer} if answer is not None and "completion" not in row else {}
        # A row of NeMo-Gym's keeps its tools and its sampling; only the prompt is another.
        request = row[_REQUEST] if isinstance(row.get(_REQUEST), Mapping) else {}
        return {_REQUEST: {}, **row, **own} | {_REQUEST: self._with_system({**request, "input": messages})}

    def _with_system(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request, the system message before its prompt where it has none."""
        prompt = request["input"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system is None or request.get("instructions") or messages[0].get("role") in ("system", "developer"):
            return dict(request)
        return {**request, "input": [{"role": "system", "content": self.system}, *messages]}


def layout_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """(layout, column of the prompt) of a row; ("", "") where it is none of them."""
    if _REQUEST in row:
        return "nemo_gym", _REQUEST
    if row.get("prompt"):
        return ("verl" if "reward_model" in row or "data_source" in row else "trl"), "prompt"
    for name in _CHAT_COLUMNS:
        if row.get(name):
            return "chat", name
    for name in TABLE_COLUMNS:
        if isinstance(row.get(name), str) and row[name].strip():
            return "table", name
    return "", ""


def _conversation(value: Any, is_chat: bool, field: str, where: str) -> tuple[list[dict[str, Any]], str | None]:
    """(messages up to the last one that is not the assistant's, the assistant's answer after it)."""
    if isinstance(value, str) and value.strip():
        return [{"role": "user", "content": value}], None
    messages = [_message(each) for each in value] if _is_list(value) else []
    answer = None
    if is_chat and messages and messages[-1] is not None and messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"]  # type: ignore[index]
    known = [message for message in messages if message is not None]
    if not known or len(known) != len(messages):
        raise DataError(
            "the prompt is neither a text nor a list of messages",
            where=field,
            expected=f'a text, or messages like {{"role": "user", "content": "..."}}, as in {CORRECT}',
            found=json.dumps(value, default=str, ensure_ascii=False)[:120],
            hints=show_line(where),
        )
    return known, answer


def _message(value: Any) -> dict[str, Any] | None:
    """A message with `role` and `content`, also of ShareGPT's `from` and `value`; None where it is none."""
    if not isinstance(value, Mapping):
        return None
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if not isinstance(role, str) or not (isinstance(content, str) or _is_list(content)):
        return None
    others = {key: each for key, each in value.items() if key not in ("from", "value")}
    return {**others, "role": _ROLES.get(role, role), "content": content}


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def text_columns(row: Mapping[str, Any]) -> list[str]:
    """Columns that hold a text, the longest first: the prompt is likely to be one of them. Only those whose name can be
    pasted as the value of an override."""
    texts = [name for name, value in row.items() if _NAME.fullmatch(name) and isinstance(value, str) and value.strip()]
    return sorted(texts, key=lambda name: -len(row[name]))
