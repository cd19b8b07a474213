"""Tokens of an agent's rollout: what is trained, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.engine.rollouts.turns import BrokenTokensError, trajectory_of
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.environments.base import AgentRun, GradeResult

CHAT: Any = SimpleNamespace(tokenizer=range(50), end_ids=(1,), decode=lambda ids: "".join(chr(96 + i) for i in ids))
PARAMS = SamplingParams(9, stop_token_ids=(9,), stop_strings=("bc",))


def turn(prompt: list[int], said: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "type": "message", "prompt_token_ids": prompt, "generation_token_ids": said,
        "generation_log_probs": [-0.5] * len(said), "generation_weight_versions": [4] * len(said), **changes,
    }  # fmt: skip


def read(*items: dict[str, Any], truncated: bool = False) -> Any:
    return trajectory_of(AgentRun(list(items), GradeResult(1.0), truncated), CHAT, 3, PARAMS)


def test_turns_are_sampled_and_everything_between_them_is_context() -> None:
    second = turn([2, 3, 5, 1, 6], [7, 1], generation_weight_versions=[4, 5])
    found = read(turn([2, 3], [5, 1]), {"type": "function_call_output"}, second)
    assert found.token_ids == [2, 3, 5, 1, 6, 7, 1] and found.token_mask == [0, 0, 1, 1, 0, 1, 1]
    assert found.logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5, -0.5]
    assert found.weight_versions == [4, 4, 4, 5] and found.turns == [(2, 4), (5, 7)]
    assert found.texts == ["ea", "ga"] and not found.truncated and len(found.output) == 3


@pytest.mark.parametrize(
    ("said", "agent_cut", "truncated"),
    [
        ([5, 1], False, False),
        ([5, 9], False, False),
        ([2, 3], False, False),
        ([5, 6], False, True),
        ([5, 1], True, True),
    ],
)
def test_a_turn_is_whole_where_it_ended_by_itself(said: list[int], agent_cut: bool, truncated: bool) -> None:
    assert read(turn([2], said), truncated=agent_cut).truncated is truncated


@pytest.mark.parametrize(
    "broken",
    [
        {"generation_log_probs": [-0.5]},
        {"generation_log_probs": [-0.5, 0.002]},
        {"generation_log_probs": [-0.5, math.nan]},
        {"generation_log_probs": [-0.5, -math.inf]},
        {"generation_log_probs": None},
        {"generation_log_probs": [-0.5, "-0.5"]},
        {"generation_weight_versions": [4]},
        {"generation_weight_versions": [4, True]},
        {"generation_weight_versions": [4, 2]},
        {"generation_token_ids": []},
        {"generation_token_ids": [5, 50]},
        {"generation_token_ids": [5, -1]},
        {"generation_token_ids": [5, 1.0]},
        {"prompt_token_ids": None},
    ],
    ids=str,
)
def test_what_cannot_be_trained_on_is_refused(broken: dict[str, Any]) -> None:
    read(turn([2], [5, 1], generation_log_probs=[0.0005, 0]))  # rounding, and a whole number
    with pytest.raises(BrokenTokensError):
        read(turn([2], [5, 1], **broken))
