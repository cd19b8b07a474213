"""data_prep/tool_preference_prep: preference pairs against tool hallucination, out of single-step tool-use rows. Rows
of one conversation, which repeat each other's turns, stay in one split."""

import asyncio
import hashlib
import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.config.schema.tool_preferences import Hallucination, ToolPreferencePrepConfig, ToolTasksSource
from nemotron_steps.engine.rollouts.data import PromptRows
from nemotron_steps.environments.base import Response, Session, ToolCall
from nemotron_steps.environments.responses import content_text
from nemotron_steps.environments.tools.single_step_tool_use import (
    SingleStepToolUse,
    SingleStepToolUseConfig,
    expected_calls,
)
from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import read_request
from nemotron_steps.rows.lines import Row
from nemotron_steps.rows.messages import wrong
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import REFUSALS, jsonl_source, prepare
from nemotron_steps.steps.data_prep.blends.shards import RowFunction
from nemotron_steps.steps.data_prep.blends.splits import FILES, SPLITS, split_groups, wanted_rows, write_splits

Calls = list[tuple[str, dict[str, Any]]]
"""(tool name, arguments) of every call of a turn."""

REDRAWS = 12
MOST_VALUES, LONGEST_VALUE = 2_000, 16_000
"""Values of one argument that may be borrowed, the first different ones, and the longest in characters of JSON."""


class HallucinationMaker:
    """Makes rejected actions that are wrong in one named way, with names and values of other rows; none that the
    environment would reward."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._grader = SingleStepToolUse(SingleStepToolUseConfig(), {})
        tools: set[str] = set()
        arguments: set[str] = set()
        values: dict[str, dict[str, Any]] = defaultdict(dict)
        for row in rows:
            for tool in tools_of(row):
                tools.add(tool["name"])
                arguments.update(properties_of(tool))
            for _, given in calls_of(row):
                for name, value in given.items():
                    text = json.dumps(value, sort_keys=True)
                    if len(values[name]) < MOST_VALUES and len(text) < LONGEST_VALUE:
                        values[name][text] = value
        # Sorted: what is drawn depends on the seed and the rows alone.
        self._tools = sorted(tools)
        self._arguments = sorted(arguments)
        self._values: dict[str, list[Any]] = defaultdict(list)
        self._values |= {name: [found[text] for text in sorted(found)] for name, found in values.items()}

    def make(self, kind: Hallucination, row: Row, rng: random.Random) -> Calls | None:
        """A rejected action of that kind; None where the row allows none."""
        for _ in range(REDRAWS):
            calls = self._needless_call(row, rng) if kind == "needless_call" else self._altered(kind, row, rng)
            if calls is None:
                return None
            response = Response("", tool_calls=[ToolCall(name, json.dumps(given)) for name, given in calls])
            if asyncio.run(self._grader.verify(row, response, Session())).reward == 0.0:
                return calls
        return None

    def _altered(self, kind: Hallucination, row: Row, rng: random.Random) -> Calls | None:
        calls = calls_of(row)
        if not calls:
            return None
        position = rng.randrange(len(calls))
        name, arguments = calls[position]
        offered = {tool["name"]: tool for tool in reversed(tools_of(row))}  # of two with one name the first
        if kind == "unknown_tool":
            foreign = [other for other in self._tools if other not in offered]
            variants = [f"{name}_now", f"find_{name}", f"{name}_details", *foreign]
            calls[position] = rng.choice([other for other in variants if other not in offered]), arguments
            return calls
        if name not in offered:
            return None
        if kind == "unknown_argument":
            known = {**properties_of(offered[name]), **arguments}
            extra = rng.choice([other for other in (*self._arguments, "priority", "note") if other not in known])
            changed = {**arguments, extra: rng.choice(self._values[extra] or ["high", 1, "urgent"])}
        elif kind == "missing_argument":
            needed = (offered[name].get("parameters") or {}).get("required") or ()
            required = [key for key in needed if key in arguments]
            if not required:
                return None
            dropped = rng.choice(required)
            changed = {key: value for key, value in arguments.items() if key != dropped}
        else:
            # Text and numbers; a flipped switch is a mistake, but nothing was made up.
            choices = [key for key, value in arguments.items() if value != "" and type(value) in (str, int, float)]
            if not choices:
                return None
            key = rng.choice(choices)
            said = json.dumps(row["responses_create_params"]["input"], ensure_ascii=False).lower()
            changed = {**arguments, key: self._invent(key, arguments[key], said, rng)}
        calls[position] = name, changed
        return calls

    def _invent(self, key: str, value: Any, said: str, rng: random.Random) -> Any:
        """Another value of the same type that the conversation does not contain."""
        borrowed = [v for v in self._values[key] if type(v) is type(value) and v != value]
        borrowed = [v for v in borrowed if str(v).lower() not in said]
        if borrowed and rng.random() < 0.8:
            return rng.choice(borrowed)
        if isinstance(value, int | float):
            return value + type(value)(rng.choice((-7, -3, 2, 5, 11, 100)))
        changed = re.sub(r"\d", lambda digit: str((int(digit.group()) + rng.randint(1, 9)) % 10), value)
        return changed if changed != value else f"{value}-{rng.randint(100, 999)}"

    def _needless_call(self, row: Row, rng: random.Random) -> Calls | None:
        if calls_of(row):
            return None
        tools = tools_of(row)
        if not tools:
            return [(rng.choice(self._tools or ["search"]), {})]
        tool = rng.choice(tools)
        needed = (tool.get("parameters") or {}).get("required") or ()
        properties = properties_of(tool)
        return [(tool["name"], {key: self._fill(key, properties.get(key) or {}, rng) for key in needed})]

    def _fill(self, key: str, schema: Mapping[str, Any], rng: random.Random) -> Any:
        if schema.get("enum"):
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind in ("integer", "number"):
            return rng.randint(1, 99)
        if kind == "boolean":
            return rng.random() < 0.5
        if kind in ("array", "object"):
            return [] if kind == "array" else {}
        return rng.choice([v for v in self._values[key] if isinstance(v, str)] or ["unknown"])


def tools_of(row: Row) -> list[dict[str, Any]]:
    """The function tools that a row offers."""
    tools = row["responses_create_params"].get("tools") or []
    return [tool for tool in tools if isinstance(tool, dict) and tool.get("name")]


def properties_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """JSON schemas of a tool's arguments."""
    return (tool.get("parameters") or {}).get("properties") or {}


def calls_of(row: Row) -> Calls:
    """The expected calls; empty when a message is expected."""
    if row["expected_action"]["type"] == "message":
        return []
    return [(call.name, dict(call.parsed_arguments() or {})) for call in expected_calls(row)]


def run(context: StepContext[ToolPreferencePrepConfig]) -> None:
    """Write the `preferences` output. Of the source one row is in memory, and names and values to borrow."""
    config, folder = context.config, context.outputs["preferences"].path
    rows = PromptRows(usable_rows(context))
    # Whole conversations in an order drawn from the seed.
    conversations: dict[bytes, list[int]] = {}
    for each in rows:
        conversations.setdefault(_conversation(each.row, config.seed), []).append(each.index)
    in_order = (conversations[key] for key in sorted(conversations))
    splits = split_groups(in_order, config.rows, of=f"rows of {len(conversations)} conversations")
    summary: dict[str, Any] = {}
    kinds: Counter[str] = Counter()
    chosen_messages = 0
    # Names and values to borrow come from training rows alone: no validation row shows in another split.
    maker = HallucinationMaker(rows[place].row for place in splits["train"])
    for split in SPLITS:
        pairs = (pair for place in splits[split] for pair in pairs_of(rows[place].row, maker, config))
        written = 0
        with (folder / FILES[split]).open("w", encoding="utf-8") as file:
            for pair in pairs:
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
                written += 1
                kinds[pair["hallucination"]] += 1
                chosen_messages += not pair["chosen"].get("tool_calls")
        if not written:
            (folder / FILES[split]).unlink()
        if splits[split]:
            summary[f"{split}_rows"] = len(splits[split])
            summary[f"{split}_pairs"] = written
    if not summary["train_pairs"]:
        raise DataError(
            "no row gives a training pair",
            where="hallucinations",
            expected="rows with an expected call, or needless_call for rows with an expected message",
            found=", ".join(config.hallucinations),
            hints=("hallucinations=[unknown_tool,unknown_argument,missing_argument,made_up_value,needless_call]",),
        )
    context.tracker.summary(
        {
            **summary,
            **{f"pairs_{kind}": kinds[kind] for kind in config.hallucinations},
            "chosen_messages": chosen_messages,
            "chosen_calls": kinds.total() - chosen_messages,
        }
    )


def usable_rows(context: StepContext[ToolPreferencePrepConfig]) -> Path:
    """A file in the work folder with the source's usable rows. Refused ones are named beside the pairs."""
    config, folder = context.config, context.work / "usable"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILES["train"]
    if config.tool_tasks is not None:
        made = tool_rows(config.tool_tasks, sum(wanted_rows(config.rows).values()), config.seed)
        write_splits(folder, FILES, {"train": made, "validation": [], "heldout": []})
        return file
    assert config.jsonl is not None  # the config has exactly one source
    whole = config.model_copy(update={"rows": SplitRows(validation=0)})
    prepare(context, [jsonl_source(config.jsonl)], checked_rows, folder, preparation=whole)
    if (folder / REFUSALS).is_file():
        shutil.copyfile(folder / REFUSALS, context.outputs["preferences"].path / REFUSALS)
    return file


def checked_rows() -> RowFunction:
    """Of single-step tool-use rows: checked, and left as they are."""
    environment = SingleStepToolUse(SingleStepToolUseConfig(), {})

    def become(where: str, row: Row) -> None:
        environment.check_row(row, where)
        read_request(row, where)
        offered = [tool["name"] for tool in tools_of(row)]
        for name, _ in calls_of(row):
            if name not in offered:
                expected = ", ".join(offered) or "a tool in responses_create_params.tools"
                what = "the expected call names a tool that the row does not offer"
                raise wrong(what, where, "expected_action.name", expected=expected, found=name)
        if not calls_of(row) and not message_text(row):
            raise wrong("the expected message is empty", where, "expected_action.content")

    return become


def pairs_of(row: Row, maker: HallucinationMaker, config: ToolPreferencePrepConfig) -> Iterable[Row]:
    """Up to `pairs_per_row` pairs of one row, each with another hallucination."""
    request = row["responses_create_params"]
    rng = random.Random(f"{config.seed}:{json.dumps([request['input'], row['expected_action']], sort_keys=True)}")
    expected = calls_of(row)
    kinds = list(config.hallucinations)
    rng.shuffle(kinds)
    made = ((kind, rejected) for kind in kinds if (rejected := maker.make(kind, row, rng)) is not None)
    for kind, rejected in islice(made, config.pairs_per_row):
        yield {
            "prompt": read_request(row, "row").messages,
            "tools": tools_of(row),
            "chosen": call_message(expected) if expected else {"role": "assistant", "content": message_text(row)},
            "rejected": call_message(rejected),
            "hallucination": kind,
        }


def call_message(calls: Calls) -> Row:
    """An assistant message that makes calls."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ],
    }


def message_text(row: Row) -> str:
    """The expected message."""
    return content_text(row["expected_action"].get("content")).strip()


def _conversation(row: Row, seed: int) -> bytes:
    """A digest, drawn with the seed, of what the rows of one conversation share: all up to the first user message."""
    opening = []
    for message in read_request(row, "row").messages:
        opening.append([message["role"], message["content"]])
        if message["role"] == "user":
            break
    return hashlib.sha256(f"{seed}:{json.dumps(opening)}".encode()).digest()


NO_TOOL = "I have no tool for that."
AGENT = "single_step_tool_use_simple_agent"
_DRAWS_PER_ROW = 50

_VALUES: dict[str, tuple[str, ...]] = {
    "city": ("Paris", "Oslo", "Lima", "Cairo", "Kyoto", "Porto", "Quito", "Riga", "Dakar", "Perth", "Turin", "Bergen"),
    "day": ("today", "tomorrow", "Monday", "Friday", "Sunday"),
    "person": ("Ada", "Ben", "Chloe", "Dev", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jun"),
    "text": ("running late", "all done here", "see you soon", "call me back", "lunch is ready", "well played"),
    "language": ("French", "Polish", "Hindi", "Swahili", "Danish", "Korean"),
    "song": ("Blue Moon", "Hey Jude", "Yesterday", "Imagine", "Clair de Lune", "Respect", "Halo"),
    "currency": ("EUR", "USD", "JPY", "GBP", "BRL"),
    "place": ("Luigi", "Sakura", "Taverna", "Bombay", "Le Coin"),
}


_Task = tuple[str, str, str, dict[str, str]]
"""A tool, what it does, how people ask for it, and argument → kind of value."""
_TASKS: tuple[_Task, ...] = (
    ("set_alarm", "Set an alarm", "Wake me at {time}.", {"time": "time"}),
    ("set_timer", "Start a timer", "Start a timer of {minutes} minutes.", {"minutes": "integer"}),
    ("get_weather", "Weather forecast", "Weather in {city} {day}?", {"city": "city", "day": "day"}),
    ("send_message", "Send a text message", "Tell {to}: {text}.", {"to": "person", "text": "text"}),
    ("play_song", "Play a song", "Play {title}.", {"title": "song"}),
    (
        "convert_money",
        "Convert between currencies",
        "How much is {amount} {source} in {target}?",
        {"amount": "number", "source": "currency", "target": "currency"},
    ),
    (
        "book_table",
        "Book a table",
        "Book a table at {place} for {people} at {time}.",
        {"place": "place", "people": "integer", "time": "time"},
    ),
    ("translate", "Translate a text", 'Say "{text}" in {language}.', {"text": "text", "language": "language"}),
    (
        "find_flight",
        "Search for flights",
        "Flights from {origin} to {destination} {day}?",
        {"origin": "city", "destination": "city", "day": "day"},
    ),
)


def tool_rows(source: ToolTasksSource, count: int, seed: int) -> list[Row]:
    """`count` rows with different requests."""
    rng = random.Random(f"{seed}:tool_tasks")
    rows: dict[str, Row] = {}
    for _ in range(_DRAWS_PER_ROW * count + 1000):
        if len(rows) == count:
            break
        row = _row(source, rng)
        rows.setdefault(row["responses_create_params"]["input"][0]["content"], row)
    if len(rows) < count:
        raise DataError(
            "there are too few different tool requests",
            where="rows",
            expected=str(count),
            found=str(len(rows)),
            hints=(f"rows.train={len(rows) // 2}",),
        )
    return list(rows.values())


def _row(source: ToolTasksSource, rng: random.Random) -> Row:
    task, *others = rng.sample(_TASKS, source.offered + 1)
    tool, _, request, parameters = task
    arguments = {name: _value(kind, rng) for name, kind in parameters.items()}
    answerable = rng.random() >= source.unanswerable_share
    offered = [task, *others[:-1]] if answerable else others
    rng.shuffle(offered)
    expected = (
        {"type": "function_call", "name": tool, "arguments": json.dumps(arguments)}
        if answerable
        else {"type": "message", "content": NO_TOOL}
    )
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": request.format(**arguments)}],
            "tools": [_tool(t) for t in offered],
        },
        "expected_action": expected,
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
    }


def _value(kind: str, rng: random.Random) -> Any:
    if kind == "integer":
        return rng.randint(2, 90)
    if kind == "number":
        return rng.randint(10, 9999) / 10
    if kind == "time":
        return f"{rng.randint(6, 22)}:{rng.choice(('00', '15', '30', '45'))}"
    return rng.choice(_VALUES[kind])


def _tool(task: _Task) -> dict[str, Any]:
    name, description, _, parameters = task
    types = {each: kind if kind in ("integer", "number") else "string" for each, kind in parameters.items()}
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {each: {"type": kind} for each, kind in types.items()},
            "required": list(types),
        },
    }
