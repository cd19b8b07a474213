"""How many turns a rollout takes, what room each has, and what is kept of an agent's."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.rollouts.turns import BrokenTokensError, ChatSettings, Trajectory, trajectory_of
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from nemotron_steps.environments.base import AgentRun, GradeResult, Session

END = 0


def completion(text: str, reason: FinishReason = FinishReason.STOP) -> Completion:
    """Tokens are letters, and an end."""
    return sampled([*map(ord, text), END], reason)


def sampled(tokens: list[int], reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion("r", 0, tokens, [-0.5] * len(tokens), reason, [7] * len(tokens), None)


class Policy:
    """Says what it is told to, and notes what it is asked."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), []

    async def sample(self, prompt: list[int], params: SamplingParams, request_id: str) -> Completion:
        self.asked.append((list(prompt), params.max_new_tokens, request_id))
        return completion(self.texts.pop(0))


CHAT: Any = SimpleNamespace(
    end_ids=(END,),
    decode=lambda tokens: "".join(chr(token) for token in tokens if token),
    count_tokens=len,
    render_continuation=lambda messages, tools, turn_ended: [ord(m["content"][0]) for m in messages] + [turn_ended],
)


class Asking:
    """An environment that asks on, and has a tool."""

    name = "asking"

    def __init__(self, *questions: str | None, max_steps: int | None = None) -> None:
        self.questions = list(questions)
        self.config = SimpleNamespace(max_steps=max_steps)
        self.heard: list[Any] = []

    async def follow_up(self, row: Any, response: Any, session: Any) -> str | None:
        self.heard.append((response.text, response.num_answer_tokens))
        return self.questions.pop(0)

    async def call_tool(self, session: Any, name: str, arguments: dict[str, Any]) -> str:
        return f"{name}={arguments}"


def run(policy: Policy, environment: Asking, first: Completion, *, turns: int = 9, length: int = 99) -> Trajectory:
    async def rollout() -> Trajectory:
        begun: Any = asyncio.get_running_loop().create_future()
        begun.set_result(first)
        made = ChatSettings(policy, CHAT, TurnFormat(), turns)  # type: ignore[arg-type]
        params = SamplingParams(20, stop_token_ids=(9,))
        return await made.run({}, environment, Session(), [1, 2], params, begun, "m", length)  # type: ignore[arg-type]

    return asyncio.run(rollout())


@pytest.mark.parametrize(("turns", "max_steps", "said"), [(1, None, 1), (2, None, 2), (9, 2, 2), (1, 3, 3)])
def test_a_rollout_takes_as_many_turns_as_it_may(turns: int, max_steps: int | None, said: int) -> None:
    environment = Asking(*["Q"] * 9, max_steps=max_steps)
    assert len(run(Policy(*["x"] * 9), environment, completion("x"), turns=turns).texts) == said


@pytest.mark.parametrize(("length", "asked", "kept"), [(9, [1], 9), (8, [], 8), (7, [], 7), (20, [12], 14)])
def test_the_next_turn_has_what_room_is_left(length: int, asked: list[int], kept: int) -> None:
    policy = Policy("zzzzz")
    found = run(policy, Asking("Q", None), completion("abc"), length=length)  # 2 + 4 + 2 tokens before it
    assert [room for _, room, _ in policy.asked] == asked
    assert len(found.token_ids) == len(found.token_mask) == len(found.logprobs) == kept
    assert found.truncated is (length < 14)


def routed(tokens, fed, value):
    chosen = None if value is None else np.full((fed, 2, 3), value, np.int16)
    return Completion("r", 0, tokens, [-0.1] * len(tokens), FinishReason.STOP, [0] * len(tokens), chosen)


def told(turns):
    """A prompt of 4, and a tool's 2 tokens between turns of 3."""
    trajectory = Trajectory([1] * 4, [0] * 4, [0.0] * 4)
    for number, value in enumerate(turns):
        if number:
            trajectory.append_context([2, 2])
        trajectory.append_sampled(routed([3] * 3, len(trajectory.token_ids) + 2, value))
    return trajectory


def test_a_turn_tells_only_of_tokens_that_no_turn_before_told_of():
    found = told([7, 8]).routed_experts
    # Of the first turn's last token nothing is known until the second feeds it.
    assert found[:, 0, 0].tolist() == [7] * 6 + [8] * 5 and found.shape == (11, 2, 3)


def test_what_is_cut_off_has_no_experts():
    trajectory = told([7, 8])
    trajectory.cut(8)
    assert len(trajectory.routed_experts) == len(trajectory.token_ids) == 8


AGENTS_OWN: Any = SimpleNamespace(
    tokenizer=range(50), end_ids=(1,), decode=lambda ids: "".join(chr(96 + i) for i in ids)
)
PARAMS = SamplingParams(9, stop_token_ids=(9,), stop_strings=("bc",))


def turn(prompt: list[int], said: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "type": "message", "prompt_token_ids": prompt, "generation_token_ids": said,
        "generation_log_probs": [-0.5] * len(said), "generation_weight_versions": [4] * len(said), **changes,
    }  # fmt: skip


def read(*items: dict[str, Any], truncated: bool = False) -> Any:
    return trajectory_of(AgentRun(list(items), GradeResult(1.0), truncated), AGENTS_OWN, 3, PARAMS)


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
        {"generation_weight_versions": [4, 2]},
        {"generation_token_ids": [5, 50]},
        {"prompt_token_ids": None},
    ],
    ids=str,
)
def test_what_cannot_be_trained_on_is_refused(broken: dict[str, Any]) -> None:
    read(turn([2], [5, 1], generation_log_probs=[0.0005, 0]))  # rounding, and a whole number
    with pytest.raises(BrokenTokensError):
        read(turn([2], [5, 1], **broken))
