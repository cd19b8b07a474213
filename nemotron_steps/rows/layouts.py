"""Prompts, chats and preference pairs of a row, in any of the layouts that trainers and public data sets have.

| what | columns |
|---|---|
| messages | `messages`, `conversations`, `conversation`: messages, ShareGPT's turns, texts in turn |
| prompt | `responses_create_params`, `prompt`, messages but for the last answer, or a text: `instruction` (with its |
| | `input` or `context`, after `history`), `question`, `problem`, `query`, `input` |
| answer | `completion`, `response`, `output`, `answers`, `generated_solution`, `solution`, `answer` |
| pair | `chosen` and `rejected`, with a prompt, or repeating it, or with a common beginning |
| all | `tools` (`functions`), `system` (`system_prompt`), `chat_template_kwargs`; texts of "Human:" and "Assistant:" |

docs/data.md has the table of who writes what. Columns that are not named here stay in the row, for its environment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import Row, shown_fields
from nemotron_steps.rows.messages import (
    MEDIA,
    Message,
    Tool,
    decoded,
    flat,
    is_blank,
    is_list,
    read_messages,
    read_template_kwargs,
    read_tools,
    unpadded,
    written,
    wrong,
)

REQUEST = "responses_create_params"
CHATS = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "question", "problem", "query", "input")
ANSWERS = ("completion", "response", "output", "answers", "generated_solution", "solution", "answer")
_SYSTEM = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
_COMPARED = frozenset({"overall_preference", "conversation_a", "response_a"})
_PYTHON = re.compile(r"\s*\[\{'(?:role|from|content)'")
_NAME = re.compile(r"\w[\w.-]*")
_READ = frozenset({REQUEST, "prompt", "chosen", "rejected", "context", *CHATS, *QUESTIONS, *ANSWERS, *_TOOLS})
_SPEAKER = re.compile(r"(?:^\s*|\n\n|\s*### ?)(System|Human|User|Assistant):[ \t]?")
"""Turns of a text, as Anthropic's and Guanaco's sets have them."""

A_PROMPT = (
    '{"responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]}, "agent_ref": {"name": "AGENT"}}, '
    "with the fields that its environment needs"
)
A_CHAT = '{"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}'
A_PAIR = '{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}'


@dataclass(frozen=True)
class Chat:
    """A conversation, its tools (messages.py) and the variables of its template."""

    messages: list[Message]
    tools: list[Tool]
    template_kwargs: dict[str, Any]

    @property
    def beside(self) -> Row:
        """What a template is given beside the messages, as a row has it."""
        return {"tools": self.tools, "chat_template_kwargs": self.template_kwargs}


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as messages without the prompt."""

    prompt: Chat
    chosen: list[Message]
    rejected: list[Message]


def read_chat(row: Mapping[str, Any], where: str) -> Chat:
    """The chat of a row, with at least one answer."""
    tools, kwargs = row_tools(row, where), read_template_kwargs(row.get("chat_template_kwargs"), where)
    column, question = _chat_column(row), _question_column(row)
    answer = next((name for name in ANSWERS if not is_blank(row.get(name)) and name != question), None)
    if answer == "completion" and row.get("label") is False:
        raise wrong("`label` is false: the completion is not one to imitate", where, "label")
    if column is not None:
        messages = _turns(row[column], where, column, tools)
        if messages[-1]["role"] == "user" and answer is not None:
            messages += _answer(row[answer], where, answer, tools)
    elif row.get("text") and question is None:
        messages = _transcript(row["text"], where, "text")
    elif question is None or answer is None:
        raise _unknown("a chat", A_CHAT, row, where)
    else:
        messages = [*_question(row, question, where, tools), *_answer(row[answer], where, answer, tools)]
    if not any(message["role"] == "assistant" for message in messages):
        raise wrong("no message is the assistant's: there is nothing to train on", where, column or "")
    return Chat(with_system(row, messages, where), tools, kwargs)


def read_prompt(row: Mapping[str, Any], where: str, column: str | None = None) -> Chat:
    """What the policy is asked by a row: a NeMo-Gym request, or another trainer's prompt."""
    if column in (None, REQUEST) and row.get(REQUEST) is not None:
        return read_request(row, where)
    tools, kwargs = row_tools(row, where), read_template_kwargs(row.get("chat_template_kwargs"), where)
    return Chat(with_system(row, _asked(row, where, column, tools)[0], where), tools, kwargs)


def read_pair(row: Mapping[str, Any], where: str) -> Pair:
    """The preference pair of a row. The prompt stands once, whether the answers repeat it or not."""
    tools, kwargs = row_tools(row, where), read_template_kwargs(row.get("chat_template_kwargs"), where)
    sides = []
    for side in ("chosen", "rejected"):
        value = row.get(side)
        if value is None or value == "" or value == []:
            raise wrong(f"the row has no {side} answer", where, side, expected=f"a row like {A_PAIR}")
        is_text = _is_transcript(value)
        sides.append(_transcript(value, where, side) if is_text else _answer(value, where, side, tools))
    chosen, rejected = sides
    column = _question_column(row) or _chat_column(row) or ("context" if row.get("context") else None)
    shared = _shared(chosen, rejected)
    if column is None:
        prompt = shared
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
    else:
        whole = column in CHATS
        prompt = _turns(row[column], where, column, tools) if whole else _question(row, column, where, tools)
        if whole and prompt[-1]["role"] == "assistant" and _said(prompt[-1]) == _said(chosen[-1]):
            prompt = prompt[:-1]  # the whole chat with its better answer
        systems = {m["content"].strip() for m in (*prompt, *chosen, *rejected) if m["role"] == "system"}
        if len(systems) > 1:
            raise wrong("the prompt and the answers have different system prompts", where, column)
        prompts, answers = zip(*(_split(prompt, side) for side in (chosen, rejected)), strict=True)
        (prompt, other), (chosen, rejected) = prompts, answers
        if [*map(_said, prompt)] != [*map(_said, other)]:
            found = [message["content"] for message in prompt]
            raise wrong("the two answers repeat different prompts", where, "chosen", found=found)
    prompt = with_system(row, prompt, where) if prompt else prompt
    for side, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or answer[0]["role"] not in ("assistant", "tool"):
            begins = f"a message of the {answer[0]['role']}" if answer else "nothing"
            expected = "the assistant's answer, or the prompt's messages as in `prompt` and then the answer"
            raise wrong(f"the {side} answer begins with {begins} after the prompt", where, side, expected=expected)
    if not prompt:
        raise _unknown("a prompt", A_PAIR, row, where)
    if chosen == rejected:
        raise wrong("`chosen` and `rejected` are the same answer", where)
    return Pair(Chat(prompt, tools, kwargs), chosen, rejected)


def imported_prompt(row: Mapping[str, Any], where: str, column: str | None = None, system: str | None = None) -> Row:
    """A row in NeMo-Gym's shape, every column kept: prompt and tools in `responses_create_params`, and of a chat whose
    last message is the assistant's, that one as `completion`."""
    chat = read_prompt(row, where, column)
    held = decoded(row.get(REQUEST))
    request = held if isinstance(held, Mapping) else {}
    imported = column not in (None, REQUEST) or row.get(REQUEST) is None
    own = {}
    if imported:
        answer = _asked(row, where, column, chat.tools)[1]
        if answer is not None and row.get("completion") is None:
            own["completion"] = written([answer]) if answer.get("tool_calls") else answer["content"]
        tools = {"tools": [flat(tool) for tool in chat.tools]} if chat.tools else {}
        request = {**request, **tools, "input": written(chat.messages)}
    if system is not None and chat.messages[0]["role"] != "system":
        given = request["input"]
        asked = [{"role": "user", "content": given}] if isinstance(given, str) else given
        request = {**request, "input": [{"role": "system", "content": system}, *asked]}
    return {REQUEST: request, **row, **own} | {REQUEST: request}


def prompt_layout(row: Mapping[str, Any]) -> tuple[str, str]:
    """(layout, column) of a row's prompt; ("", "") where nothing in it is one."""
    if row.get(REQUEST) is not None:
        return "nemo_gym", REQUEST
    if row.get("prompt"):
        return ("verl" if "reward_model" in row or "data_source" in row else "trl"), "prompt"
    column = _chat_column(row)
    if column is not None:
        return "chat", column
    question = _question_column(row)
    return ("table", question) if question is not None else ("", "")


def has_pair(row: Mapping[str, Any]) -> bool:
    """Whether a row has two answers to compare."""
    return {"chosen", "rejected"} <= row.keys() or not _COMPARED.isdisjoint(row)


def text_columns(row: Mapping[str, Any]) -> list[str]:
    """Columns that hold messages, then texts, the longest first: the prompt is likely to be one of them. Only those
    whose name can be pasted as the value of an override."""
    named = [name for name in row if _NAME.fullmatch(name)]
    texts = [name for name in named if isinstance(row[name], str) and row[name].strip()]
    lists = [name for name in named if is_list(row[name]) and row[name]]
    chats = [n for n in lists if all(isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in row[n])]
    return [*chats, *sorted(texts, key=lambda name: -len(row[name]))]


def without_padding(row: Row) -> Row:
    """A row of a columnar file without the nulls in its messages and tools that are there for other rows' values."""
    return {key: unpadded(value, ("arguments",)) if key in _READ else value for key, value in row.items()}


def check_packed(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row that is not of packed_chats: `input_ids`, for each whether the next one is trained, and where each
    chat begins. DataError: E410."""
    ids, mask, starts = (row.get(key) for key in ("input_ids", "loss_mask", "seq_start_id"))
    if not isinstance(ids, list) or {*map(type, ids)} != {int} or min(ids) < 0:
        raise wrong("must be a non-empty list of token ids", where, "input_ids")
    # The types first: what a broken row has here may not go into a set.
    numbers = isinstance(mask, list) and {*map(type, mask)} <= {int, float, bool}
    if not isinstance(mask, list) or not numbers or len(mask) != len(ids) or not {*mask} <= {0, 1}:
        raise wrong("must be a 0 or 1 for each of `input_ids`", where, "loss_mask")
    places = [*starts, len(ids)] if isinstance(starts, list) and {*map(type, starts)} == {int} else [1]
    if places[0] != 0 or any(b <= a for a, b in pairwise(places)):
        expected = "places that begin with 0, rise, and end before the last of `input_ids`"
        raise wrong("must be a list of places", where, "seq_start_id", expected=expected)


def sniff_row(row: Mapping[str, Any]) -> str:
    """The finest artifact type whose shape the row has."""
    shapes = {
        "rl_prompts": {REQUEST},
        "preference_pairs": {"chosen", "rejected"},
        "sft_chats": {"messages"},
        "packed_chats": {"input_ids", "seq_start_id"},
    }
    return next((name for name, columns in shapes.items() if columns <= row.keys()), "training_jsonl")


def read_request(row: Mapping[str, Any], where: str) -> Chat:
    """The prompt of a row in NeMo-Gym's shape: `instructions`, and `input` as a text or items."""
    if "_hf_placeholder" in row:
        raise wrong("the row is a placeholder that data preparation has not filled in (`_hf_placeholder`)", where)
    request = decoded(row.get(REQUEST))
    if not isinstance(request, Mapping):
        raise wrong("must be an object with `input`", where, REQUEST, expected=f"a row like {A_PROMPT}", found=request)
    tools = read_tools(request.get("tools"), where, f"{REQUEST}.tools")
    metadata = request.get("metadata")
    own = metadata.get("chat_template_kwargs") if isinstance(metadata, Mapping) else None
    kwargs = read_template_kwargs(row.get("chat_template_kwargs") or own, where)
    beside, keys = decoded(row.get("tools")), {"function", "parameters"}
    schemas = [isinstance(each, Mapping) and keys & each.keys() for each in (beside if is_list(beside) else ())]
    if not tools and schemas and all(schemas):
        raise wrong(f"the row has tools beside `{REQUEST}`, which offers none", where, "tools")
    given = request.get("input")
    if isinstance(given, str) and not given.strip():
        raise wrong("is empty", where, f"{REQUEST}.input")
    shown = _as_messages(given)
    if shown is None:
        shown = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = read_messages(shown, where, f"{REQUEST}.input", tools)
    if request.get("instructions"):
        # One system message, as in NeMo-Gym: many templates take no second one.
        own_system = [{"role": "system", "content": request["instructions"]}]
        told = [read_messages(own_system, where, f"{REQUEST}.instructions")[0]["content"]]
        while messages and messages[0]["role"] == "system":
            told.append(messages.pop(0)["content"])
        messages.insert(0, {"role": "system", "content": "\n\n".join(told)})
    return Chat(messages, tools, kwargs)


def _asked(
    row: Mapping[str, Any], where: str, column: str | None, tools: Sequence[Tool]
) -> tuple[list[Message], Message | None]:
    """(the prompt's messages, the answer that stood after them in a chat)."""
    named = column if column is not None else prompt_layout(row)[1]
    if named not in row:
        if column is not None:
            raise wrong(f"the row has no column '{column}'", where, expected=f"one of {', '.join(sorted(row))[:120]}")
        error = _unknown("a prompt", '{"prompt": "What is 1 + 1?", "answer": "2"}', row, where)
        error.hints = (*(f"prompt_column={name}" for name in text_columns(row)[:2]), *error.hints)
        raise error
    if named not in CHATS:
        return _question(row, named, where, tools), None
    messages = _turns(row[named], where, named, tools)
    answer = messages.pop() if messages[-1]["role"] == "assistant" else None
    if not messages:
        raise wrong("has an answer and no question before it", where, named)
    return messages, answer


def _question(row: Mapping[str, Any], column: str, where: str, tools: Sequence[Tool]) -> list[Message]:
    """The messages of a prompt's column, with what stands beside an instruction."""
    text = row[column]
    given = _as_messages(text, alone=True)
    if given is not None:
        return read_messages(given, where, column, tools)
    if not isinstance(text, str) or not text.strip():
        raise wrong("must be a text or a list of messages", where, column, found=text)
    _refuse_python(text, where, column)
    if _is_transcript(text):
        turns = _transcript(text, where, column)
        return turns[:-1] if turns[-1]["role"] == "assistant" and not turns[-1]["content"] else turns
    messages: list[Message] = []
    for said in decoded(row.get("history")) or ():
        if not is_list(said) or len(said) != 2:
            raise wrong("must be a list of [question, answer]", where, "history", found=said)
        messages += [{"role": role, "content": each} for role, each in zip(("user", "assistant"), said, strict=True)]
    for name in {"instruction": ("input", "context"), "question": ("context",)}.get(column, ()):
        more = row.get(name)
        if is_blank(more):
            continue
        if not isinstance(more, str | int | float):
            raise wrong("must be a text beside a question", where, name, found=more)
        text = text if str(more) in text else f"{text}\n\n{more}"
    chat = _chat_column(row)
    told = _turns(row[chat], where, chat, tools)[:2] if chat else []
    begins = len(told) == 2 and told[0]["role"] == "system" and told[1]["content"].strip() == text.strip()
    if column == "prompt" and begins:
        messages.insert(0, told[0])  # the system prompt of a chat that begins with this question
    return read_messages([*messages, {"role": "user", "content": text}], where, column, tools)


def _answer(value: Any, where: str, column: str, tools: Sequence[Tool]) -> list[Message]:
    """The messages of an answer's column: a text, a message or messages, or calls as JSON text."""
    _refuse_python(value, where, column)
    calls = decoded(value) if tools else None
    calls = [calls] if isinstance(calls, Mapping) and "arguments" in calls else calls
    if is_list(calls) and calls and all(isinstance(each, Mapping) and "arguments" in each for each in calls):
        return read_messages([{"role": "assistant", "tool_calls": calls}], where, column, tools)
    given = _as_messages(value)
    if given is not None:
        return read_messages(given, where, column, tools)
    if not isinstance(value, str) or not value:
        raise wrong("the answer must be a text, a message or a list of messages", where, column, found=value)
    return read_messages([{"role": "assistant", "content": value}], where, column, tools)


def _refuse_python(value: Any, where: str, column: str) -> None:
    """pandas writes lists into a CSV as Python does, which nothing reads back safely."""
    if isinstance(value, str) and _PYTHON.match(value):
        raise wrong("is messages as Python writes them", where, column, expected="JSON text", found=value)


def _as_messages(value: Any, *, alone: bool = False) -> Any:
    """What is meant to be messages: a list, an object, or messages as JSON text; None for any other text."""
    if not isinstance(value, str):
        return [value] if isinstance(value, Mapping) else value if is_list(value) else None
    given = decoded(value)
    given = [given] if alone and isinstance(given, Mapping) else given
    shapes = ({"role", "content"}, {"role", "tool_calls"}, {"role", "function_call"}, {"from", "value"})
    items = ("reasoning", "function_call", "function_call_output")

    def is_message(each: Any) -> bool:
        if not isinstance(each, Mapping):
            return False
        return any(shape <= each.keys() for shape in shapes) or each.get("type") in items

    return given if is_list(given) and given and all(map(is_message, given)) else None


def _turns(value: Any, where: str, column: str, tools: Sequence[Tool]) -> list[Message]:
    """The messages of a chat's column, also of texts in turn and of pairs of `input` and `output`."""
    given = decoded(value)
    if isinstance(given, str):
        return _transcript(given, where, column)
    if not is_list(given) or not given:
        return read_messages(given, where, column, tools)
    if all(isinstance(each, str) and isinstance(decoded(each), Mapping) for each in given):
        given = [decoded(each) for each in given]
    elif all(isinstance(each, str) for each in given):
        given = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(given)]
    elif all(isinstance(each, Mapping) and {"input", "output"} <= each.keys() for each in given):
        roles = (("user", "input"), ("assistant", "output"))
        given = [{"role": role, "content": each[key]} for each in given for role, key in roles]
    return read_messages(given, where, column, tools)


def _transcript(text: Any, where: str, column: str) -> list[Message]:
    """The turns of a text that names who speaks."""
    before, *parts = _SPEAKER.split(text) if isinstance(text, str) else ("",)
    if not parts or before.strip():
        said = "plain text has no turns: a trainer of chats cannot tell what is an answer"
        expected = f"a row like {A_CHAT}, or a text of turns that begin with Human: and Assistant:"
        raise wrong(said, where, column, expected=expected, found=text)
    roles = {"System": "system", "Assistant": "assistant"}
    pairs = zip(parts[::2], parts[1::2], strict=True)
    turns = [{"role": roles.get(who, "user"), "content": each.strip()} for who, each in pairs]
    return read_messages(turns, where, column)


def _is_transcript(value: Any) -> bool:
    """Whether a text is turns of a person and an assistant, from its beginning."""
    return isinstance(value, str) and _SPEAKER.match(value) is not None and {"Assistant"} < {*_SPEAKER.findall(value)}


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """The longest common beginning, without an answer that both end with."""
    pairs = zip(chosen, rejected, strict=False)
    same = list(takewhile(lambda pair: _said(pair[0]) == _said(pair[1]), pairs))
    return list(chosen[: min(len(same), len(chosen) - 1, len(rejected) - 1)])


def _split(prompt: list[Message], side: list[Message]) -> tuple[list[Message], list[Message]]:
    """(prompt, answer) of an answer that may repeat the prompt; a system message is in either or in both."""
    told, repeated = ([m for m in each if m["role"] != "system"] for each in (prompt, side))
    if repeated[: len(told)] and [*map(_said, repeated[: len(told)])] == [*map(_said, told)]:
        begin = next(place for place, message in enumerate(side) if message is repeated[len(told) - 1]) + 1
        own = side[:begin]
        return (prompt if len(own) < len(prompt) else own), side[begin:]
    if len(prompt) == len(side) == 1 and len(prompt[0]["content"].split()) > 2:  # texts that begin with it
        before, begins, after = side[0]["content"].partition(prompt[0]["content"])
        if begins and not before.strip() and after.strip():
            return prompt, [{**side[0], "content": after.lstrip()}]
    return prompt, side


def _said(message: Message) -> tuple[str, str, str, str]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["role"], message["content"].strip(), message.get("reasoning_content", "").strip(), repr(calls)


def with_system(row: Mapping[str, Any], messages: list[Message], where: str) -> list[Message]:
    """The messages after the row's own system prompt."""
    for name in _SYSTEM:
        if is_blank(row.get(name)) or (isinstance(row[name], str) and not row[name].strip()):
            continue
        given = row[name] if isinstance(row[name], Mapping) and "content" in row[name] else {"content": row[name]}
        (told,) = read_messages([{**given, "role": "system"}], where, name)
        if messages[0]["role"] != "system":
            messages = [told, *messages]
        elif messages[0]["content"].strip() != told["content"].strip():
            what = f"the messages begin with another system prompt than the column `{name}` has"
            raise wrong(what, where, name, expected="one system prompt", found=row[name])
    return messages


def row_tools(row: Mapping[str, Any], where: str) -> list[Tool]:
    """The tools of a row's own columns. DataError for one that has pictures or sound beside its texts."""
    for name in MEDIA:
        if not is_blank(decoded(row.get(name))):
            raise wrong(f"the row has {name}, and models here read text alone", where, name)
    found = [tools for name in _TOOLS if (tools := read_tools(row.get(name), where, name))]
    if len(found) > 1 and found[0] != found[1]:
        raise wrong("the row has other `functions` than `tools`", where, "functions")
    return found[0] if found else []


def _chat_column(row: Mapping[str, Any]) -> str | None:
    return next((name for name in CHATS if row.get(name)), None)


def _question_column(row: Mapping[str, Any]) -> str | None:
    """The column of a prompt beside chats' columns."""
    if row.get("prompt"):
        return "prompt"
    texts = (name for name in QUESTIONS if isinstance(row.get(name), str) and row[name].strip())
    return next(texts, "input" if is_list(row.get("input")) and row["input"] else None)


def _unknown(what: str, correct: str, row: Mapping[str, Any], where: str) -> DataError:
    empty = next((name for name in (*CHATS, "prompt") if name in row and not row[name]), None)
    said = f"nothing in the row is {what}" if empty is None else "must be a non-empty list of messages, or a text"
    error = wrong(said, where, empty or "", expected=f"a row like {correct}")
    error.found = shown_fields(row)
    return error
