"""Answers that make a careless verifier slow, or raise: one short unit each, repeated to any size."""

UNITS = (
    "\\boxed{", "\\boxed{A}", "\\text{", "\\", "{", "}", "[", "]", '["a", ', '{"a": ', '[{"a": 1}, ',
    '{"a": "x", "n": 1}, ', "0, ", "[0], ", "<answer>", "</answer>", "`", "```\n", "```json\n", "```lean\n", '"',
    "'", ",", "a,1\n", "\n", "\r", " ", "\t", " \n x", "a b c ", "a", "-", "- ", "*", "*a ", "**a", ".", "?!",
    "Mr. ", "<<", "<< a", "<  ", "[a ", "<<a>>", "/-", "/- a -/", "--", "<think>", "</think>", "9", "9**", "9e9",
    "\\frac{1}{", "\ud800", "\ud83d\ude00", "\x00", "\x1b[2J", "\u202e", "e\u0301", "\U0001f600", "\u0628 ", "<a>",
    "<a/>", '<a b="1" ', "&lt;", "&a [*a, ", "- ", "? ", "a: ", "[a, {b: ", "a.", "[[a]]\n", "a.b.c.d = 1\n",
    "### pkg/a.py\n<<<<<<< SEARCH\n", "=======\n", "Final Answer: [", "answer: ", "Answer: ```", "Option ",
    "Section 1", "p. ", "theorem t : a := by ", ":= by\n", "import os;",
    '{"event_id": 0, "start_time": "10am", "duration": 60}, ', "/a", " a/b", '"score_1" ', "<|im_end|>",
    "</candidate>", "[[A=B]]",
)  # fmt: skip

LEADS = (
    ("<", " "),
    ('"', " "),
    ("[", " "),
    ("10am", " "),
    ("Answer:", " "),
    ("\\boxed", " "),
    ("[" * 900 + '"', "a"),
    ("[0.", "1"),
    ("```python\n", "a "),
    ("a," * 2000 + "\n", "\n1"),
)
"""A beginning, then a unit repeated, then something that does not fit."""


def hostile(size: int, chosen: slice = slice(None)) -> dict[str, str]:
    """Answers by name, each of `size` characters or a little less: every one, or those chosen of them."""
    answers = {repr(unit): unit * (size // len(unit)) for unit in UNITS}
    for begin, unit in LEADS:
        name = f"{begin[:9]!r}, then {unit!r}"
        answers[name] = begin + unit * max(1, (size - len(begin) - 1) // len(unit)) + "!"
    return {name: answers[name] for name in [*answers][chosen]}
