"""data_prep/preference_prep: preference pairs for DPO out of rows of two answers each: our own (prompt, chosen,
rejected), HelpSteer 3's, or either layout of lmarena."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.config.schema.data_prep import PreferencePrepConfig
from nemotron_steps.rows.layouts import read_pair, row_tools, with_system
from nemotron_steps.rows.lines import Row
from nemotron_steps.rows.messages import Message, Tool, decoded, read_messages, texts_of, written, wrong
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import prepare, sources_of
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowLeftOut


def run(context: StepContext[PreferencePrepConfig]) -> None:
    """Write the `preferences` output."""
    counts = prepare(context, sources_of(context.config), preference_rows, context.outputs["preferences"].path)
    context.tracker.summary({f"{split}_pairs": count for split, count in counts.items()})


Messages = list[Message]


@dataclass(frozen=True)
class AnswerPair:
    """One comparison; `preference` is -3 (the first is much better), -2 (better), -1 (slightly), to 3; 0: neither."""

    conversation: Messages
    answer_1: str
    answer_2: str
    preference: int
    principle: str | None
    tools: list[Tool]


def answer_pair(row: Row, where: str) -> AnswerPair:
    """The comparison of a row in any of the layouts."""
    if "overall_preference" in row:
        preference, tools = _number(row, "overall_preference", where, -3), row_tools(row, where)
        first, second = (_text(row.get(f"response{i}"), where, f"response{i}") for i in (1, 2))
        asked = read_messages(row.get("context"), where, "context", tools)
        pair = AnswerPair(asked, first, second, preference, _principle(row, where), tools)
    elif "conversation_a" in row or "response_a" in row:
        pair = _arena(row, where)
    else:
        pair = _own(row, where)
    if not pair.conversation or pair.conversation[-1].get("role") != "user":
        raise wrong("the prompt does not end with a message of the user", where)
    return replace(pair, conversation=with_system(row, pair.conversation, where))


def preference_rows() -> RowFunction:
    """A preference pair of each row, ties left out. Rows that are pairs already stay as they are."""

    def become(where: str, row: Row) -> list[Row] | None:
        if "chosen" in row or "rejected" in row:
            read_pair(row, where)
            return None
        pair = answer_pair(row, where)
        if pair.preference == 0:
            raise RowLeftOut("neither answer is preferred")
        if pair.answer_1 == pair.answer_2:
            raise RowLeftOut("both answers are the same")
        answers = (pair.answer_1, pair.answer_2)
        chosen, rejected = answers if pair.preference < 0 else answers[::-1]
        made = {"prompt": written(pair.conversation), "chosen": chosen, "rejected": rejected}
        offered = {"tools": pair.tools} if pair.tools else {}
        return [{**made, **offered, "preference": abs(pair.preference)}]

    return become


def _number(row: Row, field: str, where: str, least: int) -> int:
    """A whole number up to 3, also as text, as tables have it."""
    try:
        number = float(row[field])
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(row[field], bool) or number not in range(least, 4):
        raise wrong(f"`{field}` must be a whole number from {least} to 3", where, field)
    return int(number)


def _arena(row: Row, where: str) -> AnswerPair:
    tools = row_tools(row, where)
    if "conversation_a" in row:
        names = [f"conversation_{side}" for side in "ab"]
        sides = [read_messages(row.get(name), where, name, tools) for name in names]
        conversation, other = sides[0][:-1], sides[1][:-1]
        users = [[m["content"] for m in side if m["role"] == "user"] for side in (conversation, other)]
        if users[0] != users[1]:
            raise wrong("the two conversations do not ask the same", where, "conversation_b")
        answers = [side[-1]["content"] for side in sides]
        if any(side[-1]["role"] != "assistant" for side in sides):
            raise wrong("a conversation does not end with an answer", where, "conversation_a")
        if conversation != other and len(conversation) > 1:
            # Earlier answers differ: only the first question has the same prompt on both sides.
            raise RowLeftOut("the conversations differ before their last turns")
    else:
        turns = {key: _turns(row.get(key), where, key) for key in ("prompt", "response_a", "response_b")}
        if len(turns["prompt"]) != 1:
            raise RowLeftOut("the conversations differ before their last turns")
        conversation = read_messages([{"role": "user", "content": turns["prompt"][0]}], where, "prompt")
        answers = [turns[key][0] if turns[key] else "" for key in ("response_a", "response_b")]
    return AnswerPair(conversation, answers[0], answers[1], _winner(row, where), _principle(row, where), tools)


def _winner(row: Row, where: str) -> int:
    """As a preference: an arena says who won, not by how much, which is taken for "better"."""
    if row.get("winner") in ("model_a", "model_b"):
        return -2 if row["winner"] == "model_a" else 2
    if isinstance(row.get("winner"), str) and re.search(r"tie|both|neither|same", row["winner"]):
        return 0
    if "winner_model_a" in row and "winner_model_b" in row:
        first, second = (_number(row, f"winner_model_{side}", where, 0) for side in "ab")
        return 2 * ((second > 0) - (first > 0))
    raise wrong("the row does not say which answer won", where, "winner")


def _own(row: Row, where: str) -> AnswerPair:
    pair = read_pair(row, where)
    chosen, rejected = ("\n".join(map(texts_of, answer)) for answer in (pair.chosen, pair.rejected))
    strength = 2 if row.get("preference") is None else _number(row, "preference", where, 1)
    asked = pair.prompt
    return AnswerPair(asked.messages, chosen, rejected, -strength, _principle(row, where), asked.tools)


def _principle(row: Row, where: str) -> str | None:
    return None if row.get("principle") is None else _text(row["principle"], where, "principle")


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise wrong(f"`{field}` must be a text", where, field)
    return str(read_messages([{"role": "assistant", "content": value}], where, field)[0]["content"])


def _turns(value: Any, where: str, field: str) -> Sequence[str]:
    turns = decoded(value)
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not all(turn is None or isinstance(turn, str) for turn in turns):
        raise wrong(f"`{field}` must be a text or a list of texts", where, field)
    return [turn or "" for turn in turns]
