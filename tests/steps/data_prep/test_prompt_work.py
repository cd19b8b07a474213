"""Prompts that are left out for their length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import PromptLengthConfig
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.steps.data_prep.rl_prep import LengthCheck


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> LengthCheck:
    """At most five tokens, of a template that has one for each letter and ten for each tool."""

    def render(messages: Any, tools: Any) -> list[int]:
        return [0] * (sum(len(message["content"]) for message in messages) + 10 * len(tools))

    monkeypatch.setattr(ChatFormat, "from_folder", lambda folder: SimpleNamespace(render=render))
    return LengthCheck(PromptLengthConfig(tokenizer="folder", max_tokens=5))


@pytest.mark.parametrize(
    ("request_", "beside", "fits"),
    [
        ({"input": "abcde"}, {}, True),
        ({"input": "abcdef"}, {}, False),
        ({"input": "a", "tools": None}, {"tools": [{}]}, True),
        ({"input": "a", "tools": [{"name": "a"}]}, {}, False),
    ],
)
def test_a_prompt_of_exactly_the_most_tokens_fits_and_its_tools_count(
    check: LengthCheck, request_: dict[str, Any], beside: dict[str, Any], fits: bool
) -> None:
    assert check.fits({"responses_create_params": request_, **beside}, "f:1") is fits
