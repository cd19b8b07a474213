"""Agents with harnesses of their own, as clients of the endpoint: what each sends, turn after turn, continues the
tokens that were sampled. The clients are scripted after the messages that OpenHands and mini-SWE-agent send."""

from __future__ import annotations

import json

from tests.engine.serving.taught_model import QUESTION, TOOL
from tests.engine.serving.test_chat_api import complete

NESTED = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
FINISH = {
    "type": "function",
    "function": {"name": "finish", "description": "End.", "parameters": {"type": "object", "properties": {}}},
}


def continued(first: dict, second: dict) -> bool:
    """Whether the second answer's prompt begins with the first one's tokens."""
    prefix = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    return second["prompt_token_ids"][: len(prefix)] == prefix and len(second["prompt_token_ids"]) > len(prefix)


def test_openhands_calls_functions_and_gives_contents_in_parts(endpoint) -> None:
    def parts(text: str) -> list[dict]:
        return [{"type": "text", "text": text}]

    messages = [{"role": "user", "content": parts(QUESTION["content"])}]
    first = complete(endpoint, messages, model="tiny", tools=[NESTED], tool_choice="auto", return_token_ids=True)
    said = first["choices"][0]["message"]
    (made,) = said["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"by": 2}
    # The answer goes back without what only this endpoint adds, reasoning left out, its content an empty list of parts.
    messages += [
        {"role": "assistant", "content": parts(said["content"] or ""), "tool_calls": said["tool_calls"]},
        {"role": "tool", "content": parts("now 2"), "tool_call_id": made["id"], "name": "add"},
    ]
    second = complete(endpoint, messages, model="tiny", tools=[NESTED], tool_choice="auto", return_token_ids=True)
    assert continued(first, second) and second["choices"][0]["message"]["content"] == "It is 2."


def test_mini_swe_agent_writes_plain_text_and_reads_outputs_as_the_user(endpoint) -> None:
    messages = [{"role": "system", "content": "Answer with one command."}, {"role": "user", "content": "hello"}]
    answers = []
    for output in ("a.py", "done"):
        answer = complete(endpoint, messages, model="tiny", return_token_ids=True, max_tokens=24)
        answers.append(answer)
        messages += [
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": f"<returncode>0</returncode>\n<output>\n{output}\n</output>"},
        ]
    assert continued(*answers)
