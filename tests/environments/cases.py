"""One small row of every built-in environment, with what it needs beside the row, and how an answer reaches it.

For tests that hold for every environment alike.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.environments.base import Environment
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.responses import Response, ToolCall

PROMPT: dict[str, Any] = {"responses_create_params": {"input": [{"role": "user", "content": "Answer."}]}}


@dataclass(frozen=True)
class Case:
    """An environment and a row it can score.

    Attributes:
        wrap: texts an answer is put into to pass the environment's first gates; `%s` marks the place.
        tool: the answer is the arguments of a call of this tool, not a message.
    """

    environment: str
    row: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    wrap: tuple[str, ...] = ("%s",)
    tool: str | None = None
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.environment}{'/' if self.label else ''}{self.label}"

    def answers(self, text: str) -> list[Response]:
        """The answer in every wrapping."""
        return [self.response(wrapping.replace("%s", text)) for wrapping in self.wrap]

    def response(self, text: str) -> Response:
        if self.tool is None:
            return Response.from_text(text)
        return Response("", tool_calls=[ToolCall(self.tool, text, "c")])


def structured(kind: str, *wrap: str) -> Case:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    row = {**PROMPT, "schema_str": json.dumps({"type": "array", "items": schema}), "schema_type": kind}
    return Case("structured_outputs", row, wrap=("%s", *wrap), label=kind)


INSTRUCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("detectable_format:title", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 10**9}),
    ("detectable_content:number_placeholders", {"num_placeholders": 10**9}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 10**9}),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 10**9}),
    ("detectable_format:json_format", {}),
    ("detectable_format:sentence_hyphens", {}),
    ("detectable_format:bigram_wrapping", {}),
    ("detectable_format:square_brackets", {}),
    ("length_constraints:number_sentences", {"num_sentences": 10**9, "relation": "at least"}),
    ("length_constraints:number_words", {"num_words": 10**9, "relation": "at least"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 10**9}),
    ("combination:two_responses", {}),
    ("change_case:capital_word_frequency", {"capital_frequency": 10**9, "capital_relation": "at least"}),
    ("copy:repeat_phrase", {"phrase": "a b c", "small_n": 1}),
    ("paragraphs:paragraphs2", {}),
    ("first_word:first_word_sent", {"first_word": "x"}),
    ("last_word:last_word_sent", {"last_word": "x"}),
    ("count:lowercase_counting", {"N": 0}),
    ("count:counting_composition", {"n_sent": 1, "n_words": 1}),
    ("count:count_unique", {}),
    ("keywords:no_adjacent_consecutive", {}),
    ("keywords:palindrome", {}),
    ("keywords:keyword_specific_position", {"keyword": "x", "n": 10**9, "m": 1}),
]
"""Every check whose work depends on more than counting one word."""

STEP_1 = {
    "state_analysis": "a",
    "explanation": "b",
    "commands": [{"keystrokes": "ls -la\n", "is_blocking": True, "timeout_sec": 1}],
    "is_task_complete": False,
}
CALENDAR = {"0": {"event_id": 0, "duration": 60, "constraint": None, "min_time": "10am", "max_time": "4pm"}}
EVENT = '[{"event_id": 0, "event_name": "x", "start_time": "%s", "duration": 60}]'
LEAN = {**PROMPT, "header": "import Mathlib\n", "formal_statement": "theorem t (a : ℕ) : a = a := by\n"}
FILES = {"pkg/a.py": "def f():\n    return 1\n", "pkg/b.py": "x = 1\n"}
REPOSITORY = {
    **PROMPT,
    "metadata": {"image": "repo:1", "relevant_file_contents": json.dumps(FILES)},
    "instance": {"FAIL_TO_PASS": ["t::new"], "PASS_TO_PASS": ["t::old"], "test_script": "pytest -rA", "patch": "p"},
    "mode": "eval",
}
EDIT = "<solution>```python\n### pkg/a.py\n<<<<<<< SEARCH\n    return 1\n=======\n%s\n>>>>>>> REPLACE\n```</solution>"
BOX, TAG, THOUGHT = "\\boxed{%s}", "<answer>%s</answer>", "<think>%s</think>x"
SINGLE = "single_step_tool_use_with_argument_comparison"
NODES = {**PROMPT, "expected_answer": '["a"]'}
MATHS = {**PROMPT, "question": "q", "expected_answer": "7"}
CHOICE = {**PROMPT, "options": [{"A": "one"}, {"B": "two"}], "expected_answer": "A"}
TERMS = {"knight": "knight", "knave": "knave", "a_knight": "a knight", "a_knave": "a knave"}
KNIGHTS = {"statements": [], "solution": [True, False], "names": ["Zoey", "Riley"]}
KNIGHTS["knight_knave_terms"] = {**TERMS, "Knight": "Knight", "Knave": "Knave"}
REPLACED = {"command": "str_replace", "path": "/a/b.py", "old_str": "x = 1\n" * 400, "new_str": "y"}
TOOL_SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}}'


def gym(dataset: str, answer: str | None, **metadata: Any) -> Case:
    row = {**PROMPT, "question": "q", "answer": answer, "metadata": {"source_dataset": dataset, **metadata}}
    return Case("reasoning_gym", row, wrap=("%s", TAG), label=dataset)


def action(name: str, arguments: Any) -> dict[str, Any]:
    made = {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}
    return {**PROMPT, "expected_action": made}


CASES: tuple[Case, ...] = (
    Case("calendar", {**PROMPT, "exp_cal_state": CALENDAR}, wrap=("%s", EVENT, "[%s]")),
    Case(
        "code_gen",
        {**PROMPT, "verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": ["1"]}}},
        wrap=("%s", "```python\n%s\n```"),
    ),
    Case(
        "equivalence_llm_judge",
        {**PROMPT, "question": "q", "expected_answer": "a"},
        {"response_extract_regex": r"Answer:\s*```(?:\w+)?\s*([\s\S]*?)\s*```(?=[\s\S]*$)"},
        wrap=("%s", "Answer: ```%s```"),
    ),
    Case("genrm_compare", PROMPT),
    *(
        Case(
            "instruction_following",
            {**PROMPT, "instruction_id_list": [name], "kwargs": [kwargs]},
            label=name.partition(":")[2],
        )
        for name, kwargs in INSTRUCTIONS
    ),
    Case("inverse_if", {**PROMPT, "rubric": [{"id": "1", "criteria": "c"}]}),
    Case("jailbreak_detection", {**PROMPT, "adversarial_prompt": "p"}),
    Case("lc_niah", NODES, wrap=("%s", "Final Answer: [%s]", THOUGHT)),
    Case("lc_niah", NODES, {"overlap_metric_rule": "ngram16"}, (THOUGHT,), label="ngram16"),
    Case("lc_niah", NODES, {"overlap_metric_rule": "seq_match"}, (THOUGHT,), label="seq_match"),
    Case("math_formal_lean", LEAN, wrap=("%s", "```lean4\n%s\n```", "```lean\ntheorem t : 1 = 1 := by\n%s\n```")),
    Case("math_with_judge", MATHS, {"should_use_judge": False}, ("%s", BOX)),
    Case("mcqa", CHOICE, wrap=("%s", BOX)),
    *(
        Case("mcqa", {**CHOICE, "grading_mode": mode}, wrap=wrap, label=mode)
        for mode, wrap in (
            ("lenient_boxed", (BOX,)),
            ("lenient_answer_colon", ("%s", "Answer: %s")),
            ("lenient_answer_colon_md", ("Answer: %s",)),
        )
    ),
    Case(
        "mcqa",
        {**CHOICE, "template_metadata": {"output_regex": r"(?:\s*Option\s*)+:\s*([A-Z])"}},
        label="regex",
    ),
    Case("multichallenge", {**PROMPT, "rubric": [{"question": "q", "pass_criteria": "YES"}]}),
    Case("ns_tools", MATHS, {"should_use_judge": False}, ("%s", BOX)),
    Case("over_refusal_detection", {**PROMPT, "safe_prompt": "p"}),
    gym("knights_knaves", "Zoey is a knight, and Riley is a knave.", **KNIGHTS),
    gym("basic_arithmetic", "7"),
    Case(SINGLE, action("f", {"x": ["a b c", 1.0]}), wrap=("%s", '{"x": ["%s", 1.0]}', '{"x": [%s]}'), tool="f"),
    Case(SINGLE, {**PROMPT, "expected_action": {"type": "message", "content": "m"}}, label="message"),
    structured("json", "[%s]", '[{"a": "%s", "n": 1}]', '[{"a": "x", "n": %s}]'),
    structured("yaml", "- a: %s\n  n: 1"),
    structured("xml", "<r>%s</r>", "<r><i><a>%s</a><n>1</n></i></r>"),
    structured("toml", "a = %s", "[%s]"),
    structured("csv", "a,n\n%s"),
    Case(
        "structured_outputs",
        {**PROMPT, "schema_str": TOOL_SCHEMA, "schema_type": "json", "response_mode": "tool_call", "tool_name": "f"},
        wrap=("%s", '{"a": "%s"}'),
        tool="f",
        label="tool_call",
    ),
    Case(
        "swe_pivot",
        action("bash", {"command": "grep -rn x ./src/a.py"}),
        wrap=("%s", '{"command": "grep %s ./src/a.py"}', '{"command": "%s"}'),
        tool="bash",
    ),
    Case(
        "swe_pivot",
        action("str_replace_editor", REPLACED),
        wrap=('{"command": "str_replace", "path": "/a/b.py", "old_str": "%s", "new_str": "y"}', '{"path": "%s"}'),
        tool="str_replace_editor",
        label="edit",
    ),
    Case("swerl_gen", REPOSITORY, wrap=("%s", "<solution>%s</solution>", EDIT)),
    Case("swerl_gen", {**REPOSITORY, "mode": "repro-gen"}, wrap=("%s", "```python\n%s\n```"), label="repro"),
    Case(
        "terminus_judge",
        {**PROMPT, "expected_answer": json.dumps(STEP_1), "metadata": {"harness": "terminus_1"}},
        wrap=(
            "%s",
            json.dumps(STEP_1).replace("ls -la\\n", "%s"),
            json.dumps(STEP_1).replace('"commands": [', '"commands": [%s, '),
        ),
    ),
)
"""Every built-in environment but `remote` and `remote_agent`, which are servers'; `workplace_assistant` needs its
databases."""


class Silent:
    """A judge that always answers with every label there is."""

    async def complete(self, messages: Sequence[dict[str, str]], **sampling: float) -> str:
        return '[[A=B]] [[SAFE]] [[YES]] [[COMPLIED]] {"result": "PASS"} {"score_1": 3, "score_2": 3, "ranking": 3}'


def build(case: Case) -> Environment:
    """The environment of a case."""
    judge = Silent()
    return create(case.environment, case.config, dict.fromkeys(("judge_model", "genrm_model", "safety_model"), judge))
