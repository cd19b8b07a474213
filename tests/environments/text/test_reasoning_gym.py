import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.environments.base import GradeResult, Response
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text import expression_guard as guard
from nemotron_steps.environments.text import reasoning_gym as module
from nemotron_steps.errors import DataError

library = pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def environment() -> module.ReasoningGym:
    return create("reasoning_gym")


def rows_of(name: str, size: int = 3, seed: int = 5) -> list[dict[str, Any]]:
    """Rows as they come out of JSON Lines: tuples became lists."""
    items = [json.loads(json.dumps(item)) for item in library.create_dataset(name, size=size, seed=seed)]
    return [{"responses_create_params": {"input": item["question"]}, **item} for item in items]


def score(environment: module.ReasoningGym, row: dict[str, Any], text: str) -> GradeResult:
    return environment.grade(row, Response.from_text(text).text)


@pytest.mark.parametrize(
    "name", ["chain_sum", "basic_arithmetic", "knights_knaves", "letter_counting", "countdown", "arc_agi", "n_queens"]
)
def test_reference_answers_score_one_and_wrong_ones_less(environment: module.ReasoningGym, name: str) -> None:
    for row in rows_of(name):
        environment.check_row(row, "train.jsonl:1")
        assert score(environment, row, f"<answer>{row['answer']}</answer>").reward == 1.0
        wrong = score(environment, row, "<answer>surely not this</answer>")
        assert wrong.reward is not None and wrong.reward < 0.2


def test_answer_comes_from_the_tag_then_the_box_then_the_text() -> None:
    assert module.extract_answer(r"<answer>1</answer> \boxed{3} <answer> 2 </answer>") == "2"
    assert module.extract_answer(r"so \boxed{1} or \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert module.extract_answer("  7\n") == "7"
    assert module.extract_answer(r"\boxed{never closed") == r"\boxed{never closed"


def test_rows_whose_fields_the_scorer_would_execute_are_refused(environment: module.ReasoningGym) -> None:
    poisoned = {**rows_of("number_sorting", 1)[0], "answer": "__import__('os').getpid()"}
    with pytest.raises(DataError, match="answer"):
        environment.check_row(poisoned, "f:1")
    row = rows_of("bitwise_arithmetic", 1)[0]
    environment.check_row(row, "f:1")
    row["metadata"]["problem"] = "__import__('os').getpid()"
    with pytest.raises(DataError, match=r"metadata\.problem"):
        environment.check_row(row, "f:1")


def test_an_answer_that_breaks_the_scorer_is_wrong(environment: module.ReasoningGym) -> None:
    row = rows_of("game_of_life", 1)[0]
    assert score(environment, row, f"<answer>{row['answer']}</answer>").reward == 1.0
    assert score(environment, row, "<answer>12</answer>").reward == 0.0


@pytest.mark.parametrize("name", sorted(module.EVALUATED_AS_LITERAL | module.EVALUATED_AS_EXPRESSION))
def test_answers_that_are_code_are_never_executed(environment: module.ReasoningGym, name: str, tmp_path: Path) -> None:
    row = rows_of(name, 1)[0]
    witness = tmp_path / "executed"
    for attack in (
        f"open({str(witness)!r}, 'w').write('x')",
        f"[open({str(witness)!r}, 'w').write(c) for c in 'x']",
        f"(lambda: open({str(witness)!r}, 'w'))()",
        f"S({f'open({str(witness)!r}, 1)'!r})",
        "().__class__.__base__.__subclasses__()",
        "9**9**9**9",
        "(((9**99)**99)**99)**99",
        "[0] * 10**10",
    ):
        verdict = score(environment, row, f"<answer>{attack}</answer>")
        assert verdict.reward is not None and verdict.reward <= 0.05
        assert verdict.components["answer_refused"] == 1.0
    assert not witness.exists()


def test_the_lists_of_evaluating_scorers_match_the_installed_library() -> None:
    root = Path(library.__file__).parent
    evaluating = set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        body = re.search(r"def score_answer\(.*?(?=\n    def |\nclass |\Z)", text, re.DOTALL)
        if body and re.search(r"(?<!_)\beval\(|parse_expr\(|sympify\(|\bexec\(", body.group(0)):
            evaluating.add(path.stem)
    assert evaluating == module.EVALUATED_AS_LITERAL | module.EVALUATED_AS_EXPRESSION | {"number_sorting"}


TEN_TO_15 = "1" + "0" * 15


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        (TEN_TO_15, TEN_TO_15[:-1] + "01"),
        ("-1", "not 1"),
        ("x**100", "x**101"),
        ("x**1.5", "x**100.5"),
        ("x**(100/100)", "x**(101/100)"),
        ("x**(1/2)", "x**(1/0)"),
        ("x**n", "x**pi"),
        ("(x**2)**3", "((x**2)**3)**4"),
        ("x + pi", "xy + pi"),
        ("sin(x)", "sin(x, y)"),
        ("sqrt(2)", "eval(2)"),
        ("1", "True"),
        ("x**2", "x**True"),
        ("1" + " " * (guard.MAX_EXPRESSION_LENGTH - 1), "1" + " " * guard.MAX_EXPRESSION_LENGTH),
        ("+".join("1" * 600), "+".join("1" * 800)),  # few letters, too many nodes
    ],
)
def test_arithmetic_is_bounded_where_the_limits_say(accepted: str, refused: str) -> None:
    assert guard.is_bounded_arithmetic(accepted)
    assert not guard.is_bounded_arithmetic(refused)


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ("[1, -2, (x, {'a': {3}})]", "[1, x()]"),
        ("not python at all", "x.y"),
        ("'" + "a" * (guard.MAX_LENGTH - 2) + "'", "'" + "a" * (guard.MAX_LENGTH - 1) + "'"),
        ("'a'", "f'{a}'"),
        ("+1", "1 + 1"),
    ],
)
def test_literals_are_inert_and_nothing_else_is(accepted: str, refused: str) -> None:
    assert guard.is_inert_literal(accepted)
    assert not guard.is_inert_literal(refused)


@given(
    st.lists(st.sampled_from(["9", "99", "**", "*", "(", ")", "x", "1e9", "+", "sin", "C"]), max_size=14).map("".join)
)
@settings(max_examples=200, deadline=5000)
def test_whatever_passes_as_arithmetic_evaluates_at_once(text: str) -> None:
    import sympy

    if guard.is_bounded_arithmetic(text):
        try:
            sympy.parse_expr(text)
        except (TypeError, ZeroDivisionError, ValueError, AttributeError, SyntaxError):
            return


def test_scores_lie_between_0_and_1_and_what_is_no_number_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"answer": "1", "metadata": {"source_dataset": "gcd"}}
    for told, score in ((-0.1, 0), (0, 0), (0.3, 0.3), (1, 1), (1.1, 1), (float("nan"), 0), (float("inf"), 0)):
        monkeypatch.setattr(module, "scorer_of", lambda source, told=told: lambda answer, entry: told)
        assert module.score_answer("1", entry) == (score, "")
    assert module._as_tuples([[1, [2]], "a"]) == ((1, (2,)), "a")


@pytest.mark.parametrize(
    "name", ["complex_arithmetic", "coin_flip", "game_of_life_halting", "chain_sum", "spell_backward"]
)
def test_what_the_librarys_scorers_pay_for_anything_is_not_paid(environment: module.ReasoningGym, name: str) -> None:
    for row in rows_of(name, 8):
        environment.check_row(row, "train.jsonl:1")
        for junk in ("nan", "NaN + 1i", "inf", "0", "0.", "True", "False", "x"):
            verdict = score(environment, row, f"<answer>{junk}</answer>")
            assert verdict.reward is not None and (verdict.reward < 0.5 or module._is_same(junk, row["answer"])), (
                row["answer"],
                junk,
            )
        assert score(environment, row, f"<answer>{row['answer']}</answer>").reward == 1.0
