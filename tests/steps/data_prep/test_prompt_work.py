"""Prompts that are left out for their length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import PromptLengthConfig
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.steps.data_prep.blends.row_work import RowLeftOut
from nemotron_steps.steps.data_prep.prompt_work import LengthCheck


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> LengthCheck:
    """At most five tokens, of a template that has one for each letter and ten for each tool."""

    def render(messages: Any, tools: Any) -> list[int]:
        return [0] * (sum(len(message["content"]) for message in messages) + 10 * len(tools))

    monkeypatch.setattr(ChatFormat, "from_folder", lambda folder: SimpleNamespace(render=render))
    return LengthCheck(PromptLengthConfig(tokenizer="folder", max_tokens=5))


def test_a_prompt_of_exactly_the_most_tokens_stays(check: LengthCheck) -> None:
    check("f:1", {"responses_create_params": {"input": "abcde"}})
    with pytest.raises(RowLeftOut, match="more than 5 tokens"):
        check("f:1", {"responses_create_params": {"input": "abcdef"}})


def test_the_tools_that_a_prompt_offers_count(check: LengthCheck) -> None:
    check("f:1", {"responses_create_params": {"input": "a", "tools": None}, "tools": [{}]})
    with pytest.raises(RowLeftOut, match="more than 5 tokens"):
        check("f:1", {"responses_create_params": {"input": "a", "tools": [{"name": "a"}]}})
