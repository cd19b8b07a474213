"""Every check of an environment can fail: a toy that breaks one rule fails the check of that rule and no other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.testing.environment import SUITE
from nemotron_steps.testing.environment_subject import EnvironmentSubject
from nemotron_steps.testing.suite import Examination, State
from tests.testing.toy_packages import ENVIRONMENT, ENVIRONMENT_POINTS, Change

CODE = "environment.py"
TEXT = "        text = response.text.strip()\n"
AWAIT = "        await asyncio.sleep(0)\n"
LOOP = "        for _ in range(0, len(text), 16):\n            text.upper()\n"


def swap(old: str, new: str) -> tuple[Change, ...]:
    return ((CODE, old, new),)


def in_verify(line: str) -> tuple[Change, ...]:
    """One more line of `verify`, before the answer is compared."""
    return ((CODE, TEXT, f"{TEXT}        {line}\n"),)


BROKEN: dict[str, tuple[Change, ...]] = {
    "is_registered": swap('name: ClassVar[str] = "toykit_env"', 'name: ClassVar[str] = "other"'),
    "importing_it_is_light": ((CODE, "import json\n", "import json\nimport jax\n"), ("jax.py", "", "a = 1\n")),
    "it_is_documented": swap("A row has `expected_answer`, the sum as text.", ""),
    "settings_are_strict": swap(
        "    full: float",
        "    @model_validator(mode='before')\n    @classmethod\n    def known(cls, data):\n"
        "        return {key: data[key] for key in data if key == 'full'}\n\n    full: float",
    ),
    "rows_are_accepted": swap(
        "    def check_values(self, row):\n",
        "    def check_values(self, row):\n        raise RowError('a', 'b', 'c')\n",
    ),
    "a_missing_field_is_told": (
        (CODE, 'required_fields = ("expected_answer",)', "required_fields = ()"),
        (CODE, 'if not isinstance(row["expected_answer"], str) or not row["expected_answer"]:', "if False:"),
    ),
    "a_wrong_field_is_told": swap(
        'if not isinstance(row["expected_answer"], str) or not row["expected_answer"]:', "if False:"
    ),
    "right_answers_earn_most": swap("full: float = 1.0", "full: float = 0.0"),
    "worthless_answers_earn_nothing": swap("right = text ==", "right = '\"reward\": 1.0' in text or text =="),
    "the_answer_in_thinking_earns_nothing": swap(
        "response.text.strip()", "response.text.strip() or response.reasoning.strip()"
    ),
    "empty_answers_are_judged": in_verify("response.text[0]"),
    "huge_answers_are_judged": in_verify("text.isdigit() and int(text)"),
    "unicode_answers_are_judged": in_verify("text.encode()"),
    "binary_answers_are_judged": in_verify("assert '\\0' not in text"),
    "broken_markup_is_judged": swap(
        TEXT, f"{TEXT}        try:\n            json.loads(text)\n        except ValueError:\n            pass\n"
    ),
    "typed_answers_are_judged": in_verify("assert 'kit' not in text"),
    "judging_is_deterministic": swap("self.config.full if right", "1.0 - random.random() / 9 if right"),
    "it_keeps_no_state": (
        *in_verify("self.count += 1"),
        (CODE, '"length": min(len(text), 100)', '"length": self.count'),
    ),
    "concurrent_is_serial": swap(AWAIT, f"        self.row = row\n{AWAIT}        row = self.row\n"),
    "rows_stay_as_they_are": in_verify("row['seen'] = True"),
    "verdicts_can_be_written_down": swap('{"found": text[:50]}', '{"found": {text[:50]}}'),
    "groups_are_judged_whole": swap(
        "    async def verify(",
        "    async def verify_group(self, row, responses, sessions):\n"
        "        return [await self.verify(row, responses[0], sessions[0])] * len(responses)\n\n"
        "    async def verify(",
    ),
    "it_never_sleeps_in_the_loop": in_verify("time.sleep(0.001)"),
    "it_can_be_closed": swap(
        "    async def verify(",
        "    async def close(self):\n        self.count += 1\n        assert self.count == 1\n\n    async def verify(",
    ),
    "tools_are_described": swap('"description": "Adds two numbers.",', ""),
    "tool_mistakes_are_told_to_the_policy": swap('arguments.get("a")', 'arguments["a"]'),
    "sessions_are_separate": swap(
        'session.state["calls"] += 1', 'self.count += 1; session.state["calls"] = self.count'
    ),
}
"""Check → what breaks it."""

ROWS = [
    {
        "responses_create_params": {"input": f"{n} + {n}?"},
        "agent_ref": {"name": "toykit_env"},
        "expected_answer": str(2 * n),
    }
    for n in (1, 2, 3)
]


def examined(package: Callable[..., Path], changes: tuple[Change, ...] = ()) -> Examination[EnvironmentSubject]:
    package(ENVIRONMENT, changes, points=ENVIRONMENT_POINTS)
    return Examination(SUITE, EnvironmentSubject("toykit_env", ROWS, lambda row: row["expected_answer"]))


def test_there_is_a_toy_for_every_check():
    assert set(BROKEN) == set(SUITE.checks)
    assert len(SUITE.checks) >= 25


def test_an_environment_that_keeps_to_the_rules_passes_every_check(package: Callable[..., Path]):
    found = examined(package).outcomes()
    assert {name: outcome.text for name, outcome in found.items() if outcome.state is not State.PASSED} == {}


@pytest.mark.parametrize("check", BROKEN)
def test_a_broken_environment_fails_the_check_that_is_about_it(package: Callable[..., Path], check: str):
    in_a_process = {"importing_it_is_light"} - {check}
    found = examined(package, BROKEN[check]).outcomes(name for name in SUITE.checks if name not in in_a_process)
    failed = [name for name, outcome in found.items() if outcome.state is State.FAILED]
    # What is an error alone earns the least in a group that has a right answer.
    assert failed == [check, *(["groups_are_judged_whole"] if check == "empty_answers_are_judged" else [])]
