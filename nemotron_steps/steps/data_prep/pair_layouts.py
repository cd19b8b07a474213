"""Two answers to one prompt and which is preferred, read from the layouts of public data sets.

own           prompt (text or messages), chosen, rejected
HelpSteer 3   context (messages), response1, response2, overall_preference: -3 (the first is much better) to 3
lmarena       conversation_a, conversation_b (messages), winner: model_a, model_b, tie, ...; or prompt, response_a and
              response_b as JSON lists of turns, winner_model_a, winner_model_b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.errors import DataError, show_line
from nemotron_steps.rows.layouts import read_pair
from nemotron_steps.rows.lines import Row
from nemotron_steps.rows.messages import decoded, read_messages, texts_of
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction, RowLeftOut

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class AnswerPair:
    """One comparison.

    Attributes:
        conversation: messages, the last one the user's.
        answer_1, answer_2: texts.
        preference: -3 (the first is much better), -2 (better), -1 (slightly), to 3; 0: neither.
        principle: what the preference goes by, if the row says.
    """

    conversation: Messages
    answer_1: str
    answer_2: str
    preference: int
    principle: str | None


def answer_pair(row: Row, where: str) -> AnswerPair:
    """The comparison of a row in any of the layouts.

    Raises:
        DataError: the row is in none of them, or lacks something.
    """
    if "overall_preference" in row:
        pair = _helpsteer(row, where)
    elif "conversation_a" in row or "response_a" in row:
        pair = _arena(row, where)
    else:
        pair = _own(row, where)
    if not pair.conversation or pair.conversation[-1].get("role") != "user":
        raise _wrong("the prompt does not end with a message of the user", where, None)
    return pair


@dataclass(frozen=True)
class PreferenceWork:
    """See RowWork: a preference pair of each row, ties left out. Rows that are pairs already stay as they are."""

    def function(self) -> RowFunction:
        """See RowWork."""

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
            made = {"prompt": pair.conversation, "chosen": chosen, "rejected": rejected}
            return [{**made, "preference": abs(pair.preference)}]

        return become


def _helpsteer(row: Row, where: str) -> AnswerPair:
    preference = row["overall_preference"]
    if isinstance(preference, bool) or not isinstance(preference, int) or not -3 <= preference <= 3:
        raise _wrong("overall_preference must be a whole number from -3 to 3", where, "overall_preference")
    first, second = (_text(row.get(f"response{i}"), where, f"response{i}") for i in (1, 2))
    return AnswerPair(
        _messages(row.get("context"), where, "context"), first, second, preference, _principle(row, where)
    )


def _arena(row: Row, where: str) -> AnswerPair:
    if "conversation_a" in row:
        sides = [_messages(row.get(f"conversation_{side}"), where, f"conversation_{side}") for side in "ab"]
        conversation, other = sides[0][:-1], sides[1][:-1]
        users = [[m["content"] for m in side if m["role"] == "user"] for side in (conversation, other)]
        if users[0] != users[1]:
            raise _wrong("the two conversations do not ask the same", where, "conversation_b")
        answers = [side[-1]["content"] for side in sides]
        if any(side[-1]["role"] != "assistant" for side in sides):
            raise _wrong("a conversation does not end with an answer", where, "conversation_a")
        if conversation != other and len(conversation) > 1:
            # Earlier answers differ: only the first question has the same prompt on both sides.
            raise RowLeftOut("the conversations differ before their last turns")
    else:
        turns = {key: _turns(row.get(key), where, key) for key in ("prompt", "response_a", "response_b")}
        if len(turns["prompt"]) != 1:
            raise RowLeftOut("the conversations differ before their last turns")
        conversation = [{"role": "user", "content": turns["prompt"][0]}]
        answers = [turns[key][0] if turns[key] else "" for key in ("response_a", "response_b")]
    return AnswerPair(conversation, answers[0], answers[1], _winner(row, where), _principle(row, where))


def _winner(row: Row, where: str) -> int:
    """As a preference: an arena says who won, not by how much, which is taken for "better"."""
    if row.get("winner") in ("model_a", "model_b"):
        return -2 if row["winner"] == "model_a" else 2
    if isinstance(row.get("winner"), str):
        return 0
    if "winner_model_a" in row and "winner_model_b" in row:
        return 2 * (bool(row["winner_model_b"]) - bool(row["winner_model_a"]))
    raise _wrong("the row does not say which answer won", where, "winner")


def _own(row: Row, where: str) -> AnswerPair:
    pair = read_pair(row, where)
    conversation = [{"role": m["role"], "content": texts_of(m)} for m in pair.prompt.messages]
    chosen, rejected = (texts_of(answer[-1]) for answer in (pair.chosen, pair.rejected))
    return AnswerPair(conversation, chosen, rejected, -int(row.get("preference") or 2), _principle(row, where))


def _principle(row: Row, where: str) -> str | None:
    return None if row.get("principle") is None else _text(row["principle"], where, "principle")


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(f"`{field}` is not a text", where, field)
    return value


def _turns(value: Any, where: str, field: str) -> Sequence[str]:
    turns = decoded(value)
    if not isinstance(turns, list) or not all(turn is None or isinstance(turn, str) for turn in turns):
        raise _wrong(f"`{field}` is not a list of texts", where, field)
    return [turn or "" for turn in turns]


def _messages(value: Any, where: str, field: str) -> Messages:
    return [{"role": m["role"], "content": texts_of(m)} for m in read_messages(value, where, field)]


def _wrong(what: str, where: str, field: str | None) -> DataError:
    return DataError(what, where=where if field is None else f"{where} field {field}", hints=show_line(where))
