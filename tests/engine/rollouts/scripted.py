"""A generator that says what it is told to, in tokens that a tokenizer would not make of it; conversations over it."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import Completion, FinishReason, GenerationRequest, SamplingParams
from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Session
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import Tracker
from tests.models.stock_chats import tool_parser_of

TOOL = {"type": "function", "name": "add", "parameters": {"properties": {"by": {"type": "integer"}}}}
WORDS = ["7", "yes", "the answer is\n\n7", "<b>", "die Lösung 😀", "no more"]


def a_call(family: str, by: int) -> str:
    """A tool call as the family's models write it."""
    if tool_parser_of(family) == "hermes":
        return f'<tool_call>\n{{"name": "add", "arguments": {{"by": {by}}}}}\n</tool_call>'
    if tool_parser_of(family) == "llama3_json":
        return f'{{"name": "add", "parameters": {{"by": {by}}}}}'
    return f"<tool_call>\n<function=add>\n<parameter=by>\n{by}\n</parameter>\n</function>\n</tool_call>"


def a_turn(family: str, chat: ChatFormat, drawn: random.Random, *, calls: int) -> str:
    """An assistant turn: reasoning where the family thinks, an answer, calls."""
    said = drawn.choice(WORDS)
    if family == "llama3":
        return "; ".join(a_call(family, drawn.randrange(9)) for _ in range(calls)) or said
    thinks = chat.opens_thinking or (family == "qwen3" and drawn.random() < 0.7)
    opening = "<think>\n" if thinks and not chat.opens_thinking else ""
    thought = f"{opening}{drawn.choice(WORDS)}\n</think>\n\n" if thinks else ""
    return thought + "\n".join([said, *(a_call(family, drawn.randrange(9)) for _ in range(calls))])


def odd_tokens(chat: ChatFormat, text: str) -> list[int]:
    """The text cut into single letters: decoded and tokenised again, it would be other tokens."""
    markup = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    ids: list[int] = []
    while text:
        piece = next((tag for tag in markup if text.startswith(tag)), text[0])
        ids += chat.tokenizer.encode(piece, add_special_tokens=False)
        text = text[len(piece) :]
    return ids


class ScriptedGenerator:
    """Says `speak(request, index)`: (text, whether the turn's end token follows, how it ended)."""

    weight_version = 0

    def __init__(self, chat: ChatFormat, speak: Callable[[GenerationRequest, int], tuple[str, bool, FinishReason]]):
        self.chat, self._speak = chat, speak
        self.requests: list[GenerationRequest] = []
        self.completions: list[Completion] = []
        """Every one ever made, beside `requests` with their prompts."""
        self._queue: list[GenerationRequest] = []

    @property
    def sampled_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(replace(request, prompt_ids=list(request.prompt_ids)))
        self._queue.append(request)

    def step(self) -> list[Completion]:
        queue, self._queue = self._queue, []
        done = []
        for request in queue:
            for index in range(request.n):
                text, ended, reason = self._speak(request, index)
                ids = odd_tokens(self.chat, text) + [self.chat.tokenizer.eos_token_id] * ended
                logprobs = [-0.001 * (1 + token % 97) for token in ids]
                versions = [self.weight_version] * len(ids)
                done.append(Completion(request.request_id, index, ids, logprobs, reason, versions))
        self.completions += done
        return done

    def pending(self) -> int:
        return len(self._queue)

    def cancel(self, request_id: str) -> None:
        self._queue = [r for r in self._queue if r.request_id != request_id]

    def close(self) -> None:
        pass


class Talk(Environment):
    """Answers whatever is said, with a tool's result or another question, until `turns` are over."""

    name = "talk"

    def __init__(self, drawn: random.Random, turns: int) -> None:
        super().__init__(EnvironmentConfig(), {})
        self.drawn, self.turns = drawn, turns

    async def seed(self, row) -> Session:
        return Session(tools=[TOOL], state=0)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        return json.dumps({"sum": arguments["by"], "note": self.drawn.choice(WORDS)})

    async def follow_up(self, row, response: Response, session: Session) -> str | None:
        session.state += 1
        return self.drawn.choice(WORDS) if session.state < self.turns else None

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        return GradeResult(0.5)


def collector_of(chat: ChatFormat, speak: Any, records: list[Any] | None = None, **options: Any) -> Any:
    """A collector over a ScriptedGenerator, and that; `records` receives what it reports."""
    generator = ScriptedGenerator(chat, speak)
    params = SamplingParams(400, stop_token_ids=(chat.tokenizer.eos_token_id,), stop_strings=("unused",))
    reporter = None if records is None else Tracker("test", None, records.append)
    settings = {"max_total_length": 4000, "max_turns": 6, "reporter": reporter, **options}
    return RolloutCollector(AsyncSampler(generator), chat, EnvironmentSet({}, {}), params, **settings), generator


def grouped(collector: Any, environment: Environment, row: dict[str, Any], members: int, **more: Any) -> Any:
    """The group `g` of a row, `rows.jsonl:8`."""
    prompt = PromptRow(7, row, "rows.jsonl:8")
    collecting = collector.collect_group(prompt, group_id="g", num_generations=members, environment=environment, **more)
    return asyncio.run(collecting)
