"""math_with_judge with its judge off: math-verify alone."""

import random
from typing import Any

from tests.agreement.answers import Items, asking, pick, read, styled
from tests.agreement.compare import FINAL_MESSAGE, MASKED, Rule
from tests.agreement.gym import Gym

SETTINGS = {"should_use_judge": False}


PROBLEMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "32": (
        ("32", "32.0", "\\text{32}", "32\\text{ ways}", "2^5", "2^{5}", "\\frac{64}{2}", "+32"),
        ("33", "-32", "3.2"),
    ),
    "\\frac{1}{2}": (
        ("\\frac{1}{2}", "\\frac12", "\\dfrac{1}{2}", "1/2", "0.5", "\\tfrac{2}{4}", ".5"),
        ("2", "\\frac{1}{3}"),
    ),
    "2\\sqrt{3}": (("2\\sqrt{3}", "\\sqrt{12}", "2 \\sqrt 3", "2\\sqrt3"), ("3\\sqrt{2}", "\\sqrt{3}", "3.46")),
    "\\(\\frac{333}{1997}\\)": (("\\frac{333}{1997}", "333/1997", "\\dfrac{333}{1997}"), ("\\frac{83}{499}", "0.1667")),
    "(1, 2)": (("(1, 2)", "(1,2)", "\\left(1, 2\\right)"), ("(2, 1)", "1, 2", "[1, 2]")),
    "\\{1, 3, 5\\}": (("\\{1, 3, 5\\}", "\\{5,3,1\\}", "1, 3, 5"), ("\\{1, 3\\}", "\\{1,3,5,7\\}")),
    "x^2 + 2x + 1": (("x^2 + 2x + 1", "(x+1)^2", "x^2+2x+1", "1 + 2x + x^2"), ("x^2 + 1", "(x-1)^2")),
    "x = 5": (("x = 5", "5", "x=5"), ("x = 6", "y = 6")),
    "$10\\%$": (("10\\%", "10", "0.1", "10%"), ("1\\%", "90\\%")),
    "\\pi": (("\\pi", "π", "\\pi "), ("2\\pi", "3.14", "22/7")),
    "[0, 1)": (("[0, 1)", "[0,1)", "0 \\le x < 1"), ("[0, 1]", "(0, 1)")),
    "1{,}000": (("1000", "1,000", "1{,}000", "10^3"), ("100", "1.000")),
    "-\\infty": (("-\\infty",), ("\\infty", "0")),
    "\\text{Tuesday}": (("\\text{Tuesday}", "Tuesday"), ("\\text{Monday}", "Friday")),
    "45^\\circ": (("45^\\circ", "45", "45^{\\circ}", "\\frac{\\pi}{4}"), ("90^\\circ", "54")),
}
"""Expected answer → (ways to write it, wrong answers)."""

SHAPES = {
    "\\boxed{%A}": 40,
    "$\\boxed{%A}$": 12,
    "\\[\n\\boxed{%A}\n\\]": 10,
    "The answer is \\boxed{%A}.": 12,
    "\\boxed{ %A }": 3,
    "\\boxed{\\text{The answer is }%A}": 1,
    "**%A**": 1,
    "The answer is $%A$.": 3,
    "Final answer: %A": 3,
    "\\fbox{%A}": 0.5,
    "\\boxed{%A": 1,
    "\\boxed{%O}, so \\boxed{%A}": 4,
    "\\boxed{}": 0.5,
    "\\boxed{%A} and \\boxed{%O}": 1,
}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    made = [asking("What is it?", question="What is it?", expected_answer=key) for key in PROBLEMS]
    return [*made, *read(gym.data("math_with_judge"))]


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    expected = row["expected_answer"]
    rights, wrongs = PROBLEMS.get(expected, ((expected.removeprefix("\\(").removesuffix("\\)"),), ("1", "\\sqrt{7}")))
    right, wrong = rng.choice(rights), rng.choice(wrongs)
    kind = pick(rng, {"right": 6, "wrong": 4})
    chosen, other = (right, wrong) if kind == "right" else (wrong, right)
    shape = pick(rng, SHAPES)
    core = shape.replace("%A", chosen).replace("%O", other)
    style, items = styled(core, shape.replace("%A", other).replace("%O", chosen), rng)
    return f"{kind}, {style}", items


def theirs(gym: Gym) -> Any:
    """Their server forks a process for each answer, to be able to end it; here their function is called as it is."""
    grader = gym.grader(
        "math_with_judge",
        "LibraryJudgeMath",
        should_use_judge=False,
        judge_model_server={"type": "responses_api_models", "name": "judge"},
        judge_responses_create_params={"input": []},
    )
    app = gym.module("math_with_judge")
    library = app.math_metric(
        gold_extraction_target=(app.LatexExtractionConfig(),),
        pred_extraction_target=(app.ExprExtractionConfig(), app.LatexExtractionConfig()),
    )

    async def verify(expected: str, text: str) -> tuple[float, str | None]:
        return app._run_math_verify(library, expected, text)

    object.__setattr__(grader.server, "_verify_answer_with_library_async", verify)
    return grader


RULES = (
    FINAL_MESSAGE,
    MASKED,
    Rule(
        "of several boxes the last complete one counts (there all are read as one answer), and `\\fbox` is a box",
        lambda answer: answer.final.count("\\boxed") > 1 or "\\fbox" in answer.final,
    ),
)
