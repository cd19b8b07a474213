"""A rollout against a model server that speaks the Responses API: NeMo-Gym's simple agent over one environment.

The model is asked, its function calls are run, their outputs are appended, until it says something without a call and
the environment has no further question. What the model server put on its items (token ids, logprobs) stays on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemotron_steps.environments.base import Environment, Session
from nemotron_steps.environments.remote.json_http import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.responses import Response, function_call_output_item, text_of
from nemotron_steps.errors import WorkerLostError

_NOT_FOR_THE_MODEL = ("background", "stream", "store", "previous_response_id")


async def run_rollout(
    environment: Environment, row: Mapping[str, Any], session: Session, client: JsonClient, model: str, max_steps: int
) -> dict[str, Any]:
    """The Responses object of a whole rollout; its `output` has every turn.

    Args:
        client: of the model server, at its `/v1`.
        max_steps: assistant turns.

    Raises:
        WorkerLostError: the model server does not answer, or not with a response.
    """
    asked = {k: v for k, v in row["responses_create_params"].items() if v is not None and k not in _NOT_FOR_THE_MODEL}
    begun = asked["input"]
    begun = [{"type": "message", "role": "user", "content": begun}] if isinstance(begun, str) else list(begun)
    said: list[dict[str, Any]] = []
    for step in range(max_steps):
        body = {**asked, "model": model, "input": begun + said}
        if session.tools:
            body["tools"] = session.tools
        response = await _ask(client, body)
        turn: list[dict[str, Any]] = response["output"]
        said.extend(turn)
        if response.get("incomplete_details") or step + 1 == max_steps:
            break
        calls = Response.from_output(turn).tool_calls
        if calls:
            for call in calls:
                arguments = call.parsed_arguments()
                if arguments is None:
                    output = f"error: the arguments of `{call.name}` are not a JSON object"
                else:
                    output = await environment.call_tool(session, call.name, arguments)
                said.append(function_call_output_item(call.call_id, output))
            continue
        question = await environment.follow_up(row, Response.from_output(said), session)
        if question is None:
            break
        said.append({"type": "message", "role": "user", "content": question})
    return {**response, "output": said}


async def _ask(client: JsonClient, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer, _ = await client.post("/responses", body)
    except (HttpStatusError, ServerUnreachableError) as error:
        raise _lost(client, str(error)) from error
    output = answer.get("output") if isinstance(answer, dict) else None
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise _lost(client, f"no output items: {text_of(answer, 200)}")
    return dict(answer)


def _lost(client: JsonClient, found: str) -> WorkerLostError:
    return WorkerLostError(
        "the model server does not answer",
        where=f"{client.base_url}/responses",
        expected="an OpenAI Responses object",
        found=found,
        hints=(f"curl {client.base_url}/models",),
    )
