from __future__ import annotations

import math
from typing import Any

import pytest

from nemotron_steps.config.schema.grpo import RewardPenaltiesConfig
from nemotron_steps.engine.grpo.rewards import REWARD_PENALTIES_KEY, RewardPenalties, RewardPenalty
from nemotron_steps.engine.grpo.rollout_metrics import reward_penalty_metrics
from nemotron_steps.engine.rollouts.conversation import FORMAT_KEY
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.errors import ConfigError
from tests.engine.engine_samples import rollout

TAGS = ("<think>", "</think>")
OPEN, CLOSE = 90, 91
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def penalties(tag_ids: tuple[int, int] | None = None, **keys: Any) -> RewardPenalties:
    return RewardPenalties(RewardPenaltiesConfig.model_validate(keys), tags=TAGS, tag_ids=tag_ids)


def said(*texts: str, parser: str = "nano_v3", **changes: Any) -> Rollout:
    """A rollout of one turn a text: two prompt tokens before each, three sampled."""
    spans = [(5 * i + 2, 5 * i + 5) for i in range(len(texts))]
    tokens = list(range(1, 5 * len(texts) + 1))
    metadata = {"turn_texts": list(texts), FORMAT_KEY: [parser, "hermes"]}
    return rollout(**{"token_ids": tokens, "turns": spans, "metadata": metadata, "reward": 1.0, **changes})


@pytest.mark.parametrize(
    ("texts", "duplicated"),
    [
        (["it is 7</think>it is 7"], True),
        ([" it is 7\n</think> it is 7 "], True),
        (["it is 7</think>7"], False),
        (["</think>"], False),  # nothing repeats nothing
        ([f"f</think>{CALL}", "f</think>f"], True),
        ([f"f</think>{CALL}", "7"], False),
    ],
)
def test_an_answer_that_repeats_its_reasoning(texts: list[str], duplicated: bool) -> None:
    found = penalties(penalize_duplicated_reasoning=True).found(said(*texts))
    assert found == [RewardPenalty.DUPLICATED_REASONING] * duplicated


@pytest.mark.parametrize(
    ("texts", "empty"),
    [
        (["thinking</think>"], True),
        (["thinking without an end"], True),
        (["a</think> \n"], True),
        (["a</think>7"], False),
        ([f"a</think>{CALL}"], False),  # in the middle of its work
        ([f"a</think>7 {CALL}", "b</think>"], True),
    ],
)
def test_a_last_turn_that_says_nothing(texts: list[str], empty: bool) -> None:
    found = penalties(penalize_empty_final_answer=True).found(said(*texts))
    assert found == [RewardPenalty.EMPTY_FINAL_ANSWER] * empty


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ("a</think>b", False),
        ("a</think>b</think>", True),
        ("<think>a</think>b", True),  # the prompt opens it
        ("never closed", True),
    ],
)
def test_think_tags_in_the_text(text: str, malformed: bool) -> None:
    found = penalties(penalize_malformed_think_tag=True).found(said(text))
    assert found == [RewardPenalty.MALFORMED_THINK_TAG] * malformed


@pytest.mark.parametrize(
    ("prompt", "sampled", "malformed"),
    [
        ([1, OPEN], [5, CLOSE, 6], False),
        ([1, OPEN], [5, 6, 7], True),
        ([1, OPEN], [CLOSE, CLOSE, 6], True),
        ([1, OPEN], [OPEN, CLOSE, 6], True),
        ([OPEN, CLOSE], [5, 6, 7], False),  # thinking is switched off
        ([OPEN, CLOSE], [5, CLOSE, 7], True),
        ([OPEN, OPEN], [5, CLOSE, 7], True),
        ([CLOSE, 1], [5, CLOSE, 7], True),
    ],
)
def test_think_tags_are_counted_as_tokens_of_the_turn_against_those_of_its_prompt(
    prompt: list[int], sampled: list[int], malformed: bool
) -> None:
    # The texts are fine, so that the tokens decide; a first turn with nothing wrong goes before.
    good = [1, OPEN, 5, CLOSE, 6]
    judged = said("a</think>b", "a</think>b", token_ids=[*good, *prompt, *sampled])
    found = penalties((OPEN, CLOSE), penalize_malformed_think_tag=True).found(judged)
    assert found == [RewardPenalty.MALFORMED_THINK_TAG] * malformed


def test_a_penalised_rollout_has_reward_0_and_one_below_0_gains_nothing() -> None:
    rollouts = [
        said("a</think>7"),
        said("a</think>", index=1),
        said("a</think>", index=2, reward=-0.5),
        said("a</think>", index=3, reward=math.nan, failure="judge_unavailable"),
    ]
    group = RolloutGroup("g0", 0, rollouts, 0)
    (found,) = penalties(penalize_empty_final_answer=True, penalize_duplicated_reasoning=True).apply([group])
    assert [r.reward for r in found.rollouts[:3]] == [1.0, 0.0, -0.5]
    assert found.rollouts[3] is rollouts[3]
    assert [r.metadata.get(REWARD_PENALTIES_KEY) for r in found.rollouts] == [
        [], ["empty_final_answer"], ["empty_final_answer"], None,
    ]  # fmt: skip
    assert rollouts[1].reward == 1.0  # the collector's own is left alone
    shares = reward_penalty_metrics(found.rollouts)
    assert shares["reward_penalties/empty_final_answer"] == pytest.approx(2 / 3)
    assert shares["reward_penalties/duplicated_reasoning"] == 0.0
    assert reward_penalty_metrics(rollouts) == {}


def test_the_tags_tokens_are_the_tokenizers_unless_the_config_says_so() -> None:
    def tag_ids(tokens: dict[str, list[int]], **ids: int) -> tuple[int, int] | None:
        config = RewardPenaltiesConfig.model_validate({"penalize_malformed_think_tag": True, "token_ids": ids})
        return RewardPenalties.of(config, TAGS, "user x <think>", tokens.__getitem__)._tag_ids

    one, pieces = {"<think>": [90], "</think>": [91]}, {"<think>": [90], "</think>": [9, 1]}
    assert tag_ids(one) == (90, 91)
    assert tag_ids(pieces) is None
    assert tag_ids(pieces, think_close=8) == (90, 8)
    assert tag_ids(one, think_open=12, think_close=13) == (12, 13)
    with pytest.raises(ConfigError, match="has none for the other") as caught:
        tag_ids(pieces, think_open=12)
    assert caught.value.where == "reward_penalties.token_ids.think_close"
