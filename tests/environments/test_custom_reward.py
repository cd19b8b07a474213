"""Functions of the user's own as rewards: TRL's and verl's signatures, weights, and every way they can go wrong."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import GradeResult, Session
from nemotron_steps.environments.custom_reward import call, load
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.responses import Response
from nemotron_steps.errors import ConfigError

FILE = Path(__file__).parent / "reward_functions.py"
CHAT = {"responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]}, "answer": "2"}
TEXT = {**CHAT, "prompt": "1 + 1?"}


def graded(functions: Any, answers: list[str], row: dict[str, Any] | None = None, **settings: Any) -> list[GradeResult]:
    names = [functions] if isinstance(functions, str) else functions
    entries = [{"function": f"{FILE}:{each}"} if isinstance(each, str) else each for each in names]

    async def judge() -> list[GradeResult]:
        environment = create("reward_function", {"functions": entries, "workers": 1, **settings})
        try:
            await environment.start()
            sessions = [Session() for _ in answers]
            return await environment.judge_group(row or CHAT, [Response.from_text(text) for text in answers], sessions)
        finally:
            await environment.close()

    return asyncio.run(judge())


@pytest.mark.parametrize(("function", "row"), [("matches", CHAT), ("slow_matches", TEXT)])
def test_a_function_of_trls_signature_gets_columns_and_answers(function: str, row: dict[str, Any]) -> None:
    verdicts = graded(function, ["2", "3"], row)
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]
    assert verdicts[0].components == {function: 1.0}


def test_verls_signature_gets_the_ground_truth() -> None:
    row = {**CHAT, "data_source": "sums", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 1}}
    assert [verdict.reward for verdict in graded("compute_score", ["2", "22"], row)] == [1.0, 0.0]


def test_rewards_are_weighted_and_none_has_no_say() -> None:
    functions = [{"function": f"{FILE}:matches", "weight": 0.5}, {"function": f"{FILE}:sometimes", "weight": -1.0}]
    verdicts = graded(functions, ["2", "?"], TEXT)
    assert [verdict.reward for verdict in verdicts] == [0.5 - 2.0, 0.0]
    assert verdicts[1].components == {"matches": 0.0}


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("too_few", "gave 1 rewards for 2 completions"),
        ("a_text", "gave 'good': a reward must be a finite float32 or None"),
        ("without_a_score", "gave a dict without 'score': it has 'acc', 'pred'"),
        ("a_nested_score", "gave {'acc': 1.0}: a reward must be a finite float32 or None"),
        ("not_a_number", "reward_functions.py:not_a_number gave nan: a reward must be a finite float32 or None"),
        ("raises", "no such key: gold"),
    ],
)
def test_what_is_wrong_with_a_function_is_told_and_is_no_reward(function: str, told: str) -> None:
    for verdict in graded(function, ["2", "3"]):
        assert verdict.reward is None and verdict.failure == "verifier_crashed"
        assert told in verdict.details["message"] and f"reward={FILE}:{function}" in verdict.details["message"]


@pytest.mark.parametrize("weight", [10.0, -10.0])
def test_a_weighted_sum_that_is_no_finite_float32_is_no_reward_and_tells_its_parts(weight) -> None:
    """Advantages are float32: their loss was infinite, and ended the run."""
    (verdict,) = graded(["matches", {"function": f"{FILE}:huge", "weight": weight}], ["2"])
    assert (verdict.reward, verdict.failure) == (None, "verifier_crashed")
    parts = f"1.0 * {FILE}:matches 1.0, {weight} * {FILE}:huge 1e+38"
    assert (
        verdict.details["message"] == f"the sum of the rewards must be a finite float32, found {weight * 1e38}: {parts}"
    )


@pytest.mark.parametrize(
    ("answers", "weight", "rewards", "failure"),
    [
        (["2", "bad", "5", "nan"], 1.0, [0.0, 0.0, 3.0, 0.0], "verifier_crashed"),
        (["2", "bad", "5"], -1.0, [0.0, -3.0, -3.0], "verifier_crashed"),  # no more than the worst of the others
        (["2", "1e7", "5"], 1.0, [0.0, 0.0, 3.0], "verifier_timeout"),
        (["bad", "worse"], 1.0, [None, None], "verifier_crashed"),
    ],
)
def test_an_answer_that_a_function_fails_over_earns_the_least_and_the_others_are_graded_without_it(
    answers: list[str], weight: float, rewards: list[float | None], failure: str
) -> None:
    functions = [{"function": f"{FILE}:numbers", "weight": weight}]
    verdicts = graded(functions, answers, TEXT, timeout_s=1)
    assert [verdict.reward for verdict in verdicts] == rewards
    blamed = [verdict.details["failure"] for verdict in verdicts if "grader_failed" in verdict.components]
    assert blamed == [failure] * {2: 0, 3: 1, 4: 2}[len(answers)]


@pytest.mark.parametrize(
    ("function", "told", "hint"),
    [
        (f"{FILE}:match", "there is no function 'match'", f"reward={FILE}:matches"),
        (f"{FILE}:LIMIT", "'LIMIT' is not a function", ""),
        (f"{FILE}:of_tokens", "takes completion_ids, which it is not given", "def of_tokens(prompts, completions,"),
        ("nothing_there:score", "the reward function's module does not load", "reward=FILE.py:FUNCTION"),
    ],
)
def test_a_function_that_is_not_there_is_told_before_the_first_rollout(function: str, told: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        graded([{"function": function}], ["2"])
    assert told in raised.value.what
    assert not hint or any(hint in each for each in (*raised.value.hints, raised.value.expected or ""))


@pytest.mark.parametrize("text", ["1 / 0", "import json\njson.nothing", "def score(:"])
def test_a_file_that_fails_as_it_is_loaded_is_told_with_its_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match="the reward function's file does not load") as raised:
        load(f"{tmp_path}/broken.py:score")
    assert raised.value.found is not None and "Error: " in raised.value.found


def test_verls_signature_takes_a_column_for_the_ground_truth_and_gives_a_number() -> None:
    given = [f"{FILE}:plain_score", "q", ["2", "3"]]
    assert call(*given, {"ground_truth": "2"}) == [1.0, 0.0]  # type: ignore[arg-type]
    assert call(*given, {"ground_truth": "3", "reward_model": {"ground_truth": "2"}}) == [1.0, 0.0]  # type: ignore[arg-type]
    assert call(*given, {}) == [0.0, 0.0]  # type: ignore[arg-type]


def test_rewards_may_be_an_array_or_the_number_of_the_one_answer() -> None:
    assert call(f"{FILE}:an_array", "q", ["2", "3"], {}) == [1.0, 1.0]
    for name in ("one_number", "a_numpy_number"):
        assert call(f"{FILE}:{name}", "q", ["2"], {}) == [2.0]
    truth = {"ground_truth": "2"}
    assert call(f"{FILE}:a_numpy_score", "q", ["2", "3"], truth) == [0.5, 0.5]
    assert call(f"{FILE}:no_score", "q", ["2"], truth) == [None]
    with pytest.raises(TypeError, match="gave 1 rewards for 2"):
        call(f"{FILE}:one_number", "q", ["2", "3"], {})


def test_a_file_knows_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "answer.txt").write_text("7")
    file = tmp_path / "beside.py"
    file.write_text(
        "import pathlib\ndef one(**_): return float(pathlib.Path(__file__).with_name('answer.txt').read_text())\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = load("beside.py:one")
    monkeypatch.chdir("/")
    assert loaded() == 7.0 == load(f"{file}:one")()


def test_a_file_of_the_same_size_that_changed_is_read_again_and_its_folder_is_on_the_path_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "scores.py"
    for number in (1, 2):
        file.write_text(f"def one(**columns): return {number}\n")
        os.utime(file, ns=(number, number))
        assert load(f"{file}:one")() == number
    assert sys.path.count(str(tmp_path)) == 1
