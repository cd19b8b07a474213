"""None"""

import math
from typing import Any

import pytest
import torch

from nemotron_steps.config.schema.grpo import GrpoConfig, RewardPenaltiesConfig
from nemotron_steps.config.schema.policy import ReasoningParserName, ToolParserName
from nemotron_steps.engine.grpo.rewards import (
    REWARD_PENALTIES_KEY,
    RewardPenalties,
    RewardPenalty,
    Violation,
    has_invalid_tool_call,
    has_malformed_thinking,
    penalize_turns,
    scale_rewards,
    shape_rewards,
    treatments,
)
from nemotron_steps.engine.grpo.step import rollout_metrics
from nemotron_steps.engine.rollouts.conversation import FORMAT_KEY, TurnFormat
from nemotron_steps.engine.types import Rollout, RolloutGroup
from tests.engine.engine_samples import rollout


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shaping(**keys: Any) -> GrpoConfig:
    return GrpoConfig.model_validate({"reward_shaping": {"enabled": True, **keys}})


def test_scaling_clamps_then_maps_linearly() -> None:
    def scale(*rewards: float, **keys: Any) -> list[float]:
        return scale_rewards(f64(*rewards), GrpoConfig.model_validate({"reward_scaling": keys})).tolist()

    own = {"enabled": True, "source_min": 1.0, "source_max": 5.0, "target_min": -1.0, "target_max": 1.0}
    assert scale(0.0, 1.0, 2.0, 3.0, 5.0, 9.0, **own) == [-1.0, -1.0, -0.5, 0.0, 1.0, 1.0]
    clipped = {"enabled": True, "source_max": 5.0, "target_max": 5.0}  # as rlhf's strategy says
    assert scale(-0.5, 0.0, 3.2, 5.0, 5.9, **clipped) == [0.0, 0.0, 3.2, 5.0, 5.0]
    assert scale(0.3, 7.0) == [0.3, 7.0]


def test_overlong_penalty_grows_over_the_buffer_up_to_the_limit_of_the_config_or_the_generator() -> None:
    lengths = torch.tensor([50, 80, 85, 90, 100, 110])
    config = shaping(overlong_buffer_length=20, overlong_buffer_penalty=2.0)
    got = shape_rewards(torch.zeros(6).double(), lengths, torch.zeros(6).bool(), config, max_response_length=100)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -2.0, -3.0])
    own = shaping(overlong_buffer_length=20, overlong_buffer_penalty=2.0, max_response_length=95)
    got = shape_rewards(torch.zeros(6).double(), lengths, torch.zeros(6).bool(), own, max_response_length=100)
    assert got.tolist() == pytest.approx([0.0, -0.5, -1.0, -1.5, -2.5, -3.5])


def test_stop_properly_scales_truncated_rewards_only_and_replaces_the_length_penalty() -> None:
    lengths, truncated = torch.tensor([100, 100]), torch.tensor([True, False])
    config = shaping(stop_properly_penalty_coef=0.25)
    got = shape_rewards(f64(0.8, 0.8), lengths, truncated, config, max_response_length=100)
    assert got.tolist() == pytest.approx([0.2, 0.8])


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("parser", "broken", "fine"),
    [
        ("hermes", '<tool_call>{"name": "f"', "<TOOLCALL> <function=f>"),
        ("qwen3_coder", "<function=f><parameter=x>1</parameter></function>", "<TOOLCALL> <|python_tag|>"),
        ("nemotron_json", '<TOOLCALL>[{"name": "f"', "<tool_call> <function=f>"),
        ("llama3_json", "let me see <|python_tag|>f(1)", "<tool_call> <TOOLCALL>"),
    ],
)
def test_an_invalid_call_is_one_in_the_markers_of_the_turns_own_format(
    parser: ToolParserName, broken: str, fine: str
) -> None:
    written = TurnFormat(tool_parser=parser)
    assert has_invalid_tool_call(broken, turn_format=written)
    assert not has_invalid_tool_call(fine, turn_format=written)
    assert not has_invalid_tool_call(broken, turn_format=TurnFormat(tool_parser="none"))
    assert has_invalid_tool_call(fine, fine.split(), written)  # the config's own markers come first


@pytest.mark.parametrize("parser", ["nano_v3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("text", "truncated", "malformed"),
    [
        ("a thought, and the answer: 7", False, True),  # it ended inside the thinking that its template opened
        ("a thought", True, False),
        ("a</think>b", False, False),
        ("<think>a</think>b", False, False),
    ],
)
def test_a_turn_ends_the_thinking_that_its_template_began(
    text: str, truncated: bool, malformed: bool, parser: ReasoningParserName
) -> None:
    written = TurnFormat(reasoning_parser=parser)
    assert has_malformed_thinking(text, truncated=truncated, turn_format=written) is malformed
    assert not has_malformed_thinking(text, truncated=truncated, turn_format=TurnFormat(reasoning_parser="none"))


def broken(rollouts: list[Rollout], *kinds: Violation, **more: Any) -> dict[Violation, list[int]]:
    """Rows whose turns break each rule."""
    found = {}
    for kind in kinds or tuple(Violation):
        advantages, mask = torch.zeros(len(rollouts), 9), torch.ones(len(rollouts), 9)
        penalize_turns(rollouts, {kind: 1.0}, advantages, mask, **more)
        found[kind] = [row for row, values in enumerate(advantages.tolist()) if any(values)]
        assert all(values[2:6] in ([0.0] * 4, [1.0] * 4) and not any(values[6:]) for values in advantages.tolist())
    return found


def test_a_rollout_is_judged_in_the_format_it_was_sampled_in() -> None:
    calls, thinking = Violation.INVALID_TOOL_CALL, Violation.MALFORMED_THINKING

    def rollouts(*texts: str) -> list[Rollout]:
        formats = (["nano_v3", "nemotron_json"], ["qwen3", "hermes"])
        return [
            rollout(index=n, metadata={FORMAT_KEY: form, "turn_texts": [text]})
            for n, (form, text) in enumerate(zip(formats, texts, strict=True))
        ]

    texts = rollouts("no end </think> <TOOLCALL>", "no end <TOOLCALL>")
    assert broken(texts) == {calls: [0], thinking: []}
    assert broken(rollouts("no end", "no end")) == {calls: [], thinking: [0]}
    assert broken(texts, calls, patterns=())[calls] == []  # the config's: none
    assert broken(texts, calls, patterns=("end",))[calls] == [1]  # the other's is in its thinking


@pytest.mark.parametrize(
    ("text", "truncated", "malformed"),
    [
        ("<think>a</think>b", False, False),
        ("<think>a", True, False),
        ("<think>a", False, True),
        ("<think>a</think>b</think>", False, True),
    ],
)
def test_malformed_thinking(text: str, truncated: bool, malformed: bool) -> None:
    assert has_malformed_thinking(text, truncated=truncated) is malformed


@pytest.mark.parametrize(
    ("keys", "call", "thinking"),
    [
        ({}, "off", "off"),
        ({"invalid_tool_call_advantage": -5, "malformed_thinking_advantage": -7}, -5, -7),
        ({"invalid_tool_call_strategy": "mask", "invalid_tool_call_advantage": -5}, None, "off"),
    ],
)
def test_which_turns_are_penalised_and_how(keys: dict[str, object], call: object, thinking: object) -> None:
    found = treatments(GrpoConfig.model_validate(keys))
    assert found.get(Violation.INVALID_TOOL_CALL, "off") == call
    assert found.get(Violation.MALFORMED_THINKING, "off") == thinking


TAGS = ("<think>", "</think>")
OPEN, CLOSE = 90, 91


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
        ([f"a</think>{CALL}"], False),  # in the middle of its work
        ([f"a</think>7 {CALL}", "b</think>"], True),
    ],
)
def test_a_last_turn_that_says_nothing(texts: list[str], empty: bool) -> None:
    found = penalties(penalize_empty_final_answer=True).found(said(*texts))
    assert found == [RewardPenalty.EMPTY_FINAL_ANSWER] * empty


@pytest.mark.parametrize(
    ("prompt", "sampled", "malformed"),
    [
        ([1, OPEN], [5, CLOSE, 6], False),
        ([1, OPEN], [CLOSE, CLOSE, 6], True),
        ([OPEN, CLOSE], [5, 6, 7], False),  # thinking is switched off
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
    shares = rollout_metrics(found.rollouts, torch.zeros(4), 0)
    assert shares["reward_penalties/empty_final_answer"] == pytest.approx(2 / 3)
    assert shares["reward_penalties/duplicated_reasoning"] == 0.0
    assert not [name for name in rollout_metrics(rollouts, torch.zeros(4), 0) if "penalties" in name]
