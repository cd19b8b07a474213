"""/v1/responses: OpenAI's Responses API, with NeMo-Gym's token fields.

The last output item of a turn carries `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, so that an
agent's trajectory can be trained on, and its next request continues exactly those tokens. Stateless: no
previous_response_id, no streaming.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from pydantic import Field

from nemotron_steps.engine.serving.chat_api import recorded_ids, usage_of
from nemotron_steps.engine.serving.known_conversations import all_said, said_in_item
from nemotron_steps.engine.serving.served_model import (
    Answer,
    ApiModel,
    Begun,
    Prompt,
    ServedModel,
    SharedFields,
    parse_body,
    refused,
)
from nemotron_steps.environments.http_server import Reply
from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import read_request


class ResponsesTool(ApiModel):
    """A function tool, flat as the Responses API writes it."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(ApiModel):
    """Only free text is generated."""

    format: dict[Literal["type"], Literal["text"]] | None = None


class ResponsesRequest(SharedFields):
    """Body of /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[ResponsesTool] = Field(default_factory=list)
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextFormat | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    stream: Literal[False] = False
    include: list[str] = Field(default_factory=list, max_length=0)
    return_token_ids: bool = True


async def create_response(model: ServedModel, body: dict[str, Any], request_id: str | None) -> Reply:
    """Answer one Responses request. `request_id` as in chat_completion."""
    request = parse_body(ResponsesRequest, body)
    model.check_name(request.model)
    prompt = _prompt(model, request)
    prompt_ids = prompt.token_ids
    answers = model.answers(prompt, request, max_tokens=request.max_output_tokens, label=request_id)
    (answer,) = [item async for item in answers]
    output = _output(request, prompt_ids, answer)
    model.remember(prompt, answer, [said_in_item(item) for item in output])
    truncated = answer.finish_reason == "length"
    counts = usage_of(len(prompt_ids), [answer])
    reasoning_tokens = model.chat.count_tokens(answer.turn.reasoning)
    return Reply(
        200,
        {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": time.time(),
            "model": model.name,
            "status": "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "error": None,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_output_tokens": request.max_output_tokens,
            "tool_choice": request.tool_choice,
            "tools": [tool.model_dump() for tool in request.tools],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": counts["total_tokens"],
            },
        },
    )


def _prompt(model: ServedModel, request: ResponsesRequest) -> Prompt:
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    begun = None
    for position, item in enumerate(items):
        if item.get("generation_token_ids"):
            begun = Begun(recorded_ids(item, f"input.{position}"), position + 1)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    said = all_said([*system, *items], said_in_item)
    if begun is None and (known := model.begun(said, request.offered)) is not None:
        begun = Begun(known.token_ids, known.count - len(system))
    asked: dict[str, Any] = {"input": items[begun.count if begun is not None else 0 :]}
    if begun is None:
        asked["instructions"] = request.instructions
    try:
        messages = read_request({"responses_create_params": asked}, "input").messages
    except DataError as error:
        raise refused(error, "input") from error
    return Prompt(model.prompt_ids(messages, request.offered, begun, "input"), said, request.offered)


def _output(request: ResponsesRequest, prompt_ids: list[int], answer: Answer) -> list[dict[str, Any]]:
    items = answer.turn.output_items()
    if not request.parallel_tool_calls:
        first = next((i for i, item in enumerate(items) if item["type"] == "function_call"), len(items))
        items = items[: first + 1]
    prefixes = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
    output = []
    for item in items:
        filled = {"id": f"{prefixes[item['type']]}_{uuid.uuid4().hex}", **item}
        if item["type"] != "reasoning":
            filled["status"] = "completed"
        output.append(filled)
    if request.return_token_ids:
        completion = answer.completion
        output[-1].update(
            prompt_token_ids=prompt_ids,
            generation_token_ids=completion.token_ids,
            generation_log_probs=completion.logprobs,
            generation_weight_versions=completion.weight_versions,
        )
    return output
