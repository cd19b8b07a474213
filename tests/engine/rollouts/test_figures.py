"""Figures over graded groups: evaluations, pass rates, agreement with labels, and requests for brevity."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from nemotron_steps.config.schema.grpo import LowEffortConfig
from nemotron_steps.engine.grpo.rewards import LOW_EFFORT_KEY, low_effort_metrics, reward_brevity
from nemotron_steps.engine.rollouts.data import PromptRow, asks_for_low_effort, low_effort_row
from nemotron_steps.engine.rollouts.evaluation import PassRate, RateJournal, preference, summarize
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.rows.layouts import read_request
from tests.engine.engine_samples import group, rollout


def test_an_evaluation_is_a_mean_over_prompts_and_scores_nothing_that_nobody_graded() -> None:
    several = RolloutGroup(
        "b",
        1,
        [
            rollout("b", 0, reward=3.0, environment="code", truncated=True, components={"x": 1.0}),
            rollout("b", 1, reward=math.nan, environment="code", failure="lost", metadata={"answer_tokens": 7}),
        ],
        0,
    )
    nobody = RolloutGroup("c", 2, [rollout("c", reward=math.nan, failure="lost", components={"x": 9.0})], 0)
    found = summarize([group("a", [0.0, 1.0], components={"x": 4.0}, metadata={"answer_tokens": 3}), several, nobody])
    assert found.reward == pytest.approx((0.5 + 3.0) / 2)
    assert found.standard_error == pytest.approx(math.sqrt(2 * 1.25**2 / 1) / math.sqrt(2))
    assert (found.samples, found.ungraded, found.truncation_rate) == (3, 2, 0.2)
    assert found.answer_tokens == pytest.approx((3 + 3 + 7) / 5)
    assert found.reward_by_environment == {"code": 3.0, "maths": 0.5}
    assert found.components == {"x": pytest.approx(3.0)}
    assert found.metrics("m") == {
        **{f"m/{name}": getattr(found, name) for name in ("reward", "standard_error", "samples", "ungraded")},
        **{"m/truncation_rate": 0.2, "m/answer_tokens": found.answer_tokens},
        **{"m/reward/code": 3.0, "m/reward/maths": 0.5, "m/components/x": found.components["x"]},
    }
    one = summarize([group("a", [2.0])])
    assert one.reward == 2.0 and math.isnan(one.standard_error)
    none = summarize([nobody])
    assert math.isnan(none.reward) and math.isnan(none.standard_error) and (none.samples, none.ungraded) == (0, 1)
    assert summarize([]).truncation_rate == 0.0


def test_a_journal_of_rates_goes_on_after_a_kill_in_the_middle_of_a_line(tmp_path: Any) -> None:
    file = tmp_path / "rates.jsonl"
    rates = [PassRate(3, 4, 4, 1.0, 2.0), PassRate(0, 4, 0, 0.0, 2.0), PassRate(5, 0, 0, None, 2.0)]
    journal = RateJournal(file)
    assert journal.figures() == {}
    for rate in rates:
        journal.add(rate)
        assert json.loads(file.read_text().splitlines()[-1])["index"] == rate.index  # at once
    journal.add(PassRate(6, 4, 1, 0.25, 2.0))
    assert journal.figures() == {
        "pass_rate": pytest.approx(1.25 / 3),
        "always_solved_share": pytest.approx(1 / 3),
        "never_solved_share": pytest.approx(1 / 3),
    }
    journal.close()
    file.write_bytes(file.read_bytes()[:-5])
    back = RateJournal(file)
    assert back.rates == {rate.index: rate for rate in rates}
    assert back.figures()["pass_rate"] == 0.5
    back.add(PassRate(6, 1, 1, 1.0, 0.0))
    back.close()
    assert list(RateJournal(file).rates) == [3, 0, 5, 6]


@pytest.mark.parametrize(
    ("verdict", "preferred"),
    [((4, 3, 6), 1), ((3, 4, 1), 2), ((3, 3, 3), 1), ((3, 3, 4), 2), ((3, 3, 3.5), 0)],
)
def test_scores_decide_and_the_ranking_breaks_their_ties(verdict: tuple[float, float, float], preferred: int) -> None:
    assert preference(verdict) == preferred


LOW = "{reasoning effort: low}"
USER = {"role": "user", "content": f"1 + 1? {LOW}"}
LAST = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": f"2 {LOW}"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": LOW}
ASKED: list[tuple[Any, bool]] = [
    (f"1 + 1? {LOW}", True),
    ([USER], True),
    ([USER, SAID, LAST], False),  # the last user message alone decides
    ([USER, CALL, RESULT], True),
    ([SAID], False),  # which gets a user message
    ([{"role": "user", "content": ["2 + 2?"]}, {"type": "function_call", "role": "user", **CALL}, RESULT], False),
]


@pytest.mark.parametrize(("given", "asks"), ASKED)
def test_the_string_in_the_last_user_message_asks_for_low_effort_and_is_put_there_once(given: Any, asks: bool) -> None:
    row = {"responses_create_params": {"input": given, "tools": []}, "id": 1}
    before = deepcopy(row)
    assert asks_for_low_effort(row, "row", LOW) is asks
    converted = low_effort_row(row, LOW)
    assert row == before and converted["id"] == 1 and asks_for_low_effort(converted, "row", LOW)
    messages = read_request(converted, "row").messages
    last = next(m["content"] for m in reversed(messages) if m["role"] == "user")
    assert last.count(LOW) == 1 and last.endswith(LOW)
    assert low_effort_row(converted, LOW) == converted
    assert [m for m in messages if m["role"] != "user"] == [
        m for m in read_request(row, "row").messages if m["role"] != "user"
    ]


def shaped_by_nemo_rl(reward: float, length: int, *, weight: float, penalty: float, bound: int) -> float:
    """As its documentation has it: reward + reward max(l, 0) + penalty min(l, 0), l = min(1, w (1 - len / ub))."""
    brevity = min(1.0, weight * (1.0 - length / bound))
    return reward + reward * max(brevity, 0.0) + penalty * min(brevity, 0.0)


@pytest.mark.parametrize("weight, penalty, bound", [(0.2, 1.0, 3000), (0.1, 1.0, 15000), (5.0, 2.0, 3)])
def test_rewards_of_low_effort_are_the_references_and_the_others_stay(
    weight: float, penalty: float, bound: int
) -> None:
    config = LowEffortConfig(string=LOW, weight=weight, penalty=penalty, upper_bound_tokens=bound)
    rewards, turns = [1.0, 0.0, -0.5, 1.0], [[(2, 3)], [(2, 4), (5, 9)], [(2, 9)], []]
    rollouts = [
        replace(rollout("a", i, reward=r), turns=t, metadata={"own": i})
        for i, (r, t) in enumerate(zip(rewards, turns, strict=True))
    ]
    failed = rollout("a", 4, reward=float("nan"), failure="judge_unavailable")
    groups = [RolloutGroup(name, 0, [*rollouts, failed], 0) for name in ("low", "high")]
    prompts = [
        PromptRow(i, {"responses_create_params": {"input": text}}, "row") for i, text in enumerate([f"q {LOW}", "q"])
    ]
    low, high = reward_brevity(prompts, groups, config)
    lengths = [1, 4, 7, 0]  # of the last turn
    expected = [
        shaped_by_nemo_rl(r, n, weight=weight, penalty=penalty, bound=bound)
        for r, n in zip(rewards, lengths, strict=True)
    ]
    assert [r.reward for r in low.rollouts[:4]] == pytest.approx(expected, abs=1e-15)
    assert [r.metadata[LOW_EFFORT_KEY]["reward"] for r in low.rollouts[:4]] == rewards
    assert low.rollouts[4] is failed and high is groups[1] and low.rollouts[1].metadata["own"] == 1
    told = low_effort_metrics([*low.rollouts, *high.rollouts])
    assert told["low_effort/share"] == 0.5 and told["low_effort/reward"] == pytest.approx(sum(expected) / 4)
    assert told["low_effort/length"] == told["low_effort/length_of_others"] == 3.0
    off = reward_brevity(prompts, groups, LowEffortConfig())
    assert [group.rollouts for group in off] == [group.rollouts for group in groups]
