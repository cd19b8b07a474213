"""A row that an environment could not judge is refused before training, by file, line and field; as it is it passes."""

import json
from typing import Any

import pytest

from nemotron_steps.errors import DataError
from tests.environments.cases import CASES, SINGLE, build

WITHOUT_TEXT = {"responses_create_params": {"input": [{"role": "user", "content": " "}]}}


def call(name: str, arguments: str) -> dict[str, str]:
    return {"type": "function_call", "name": name, "arguments": arguments}


BEGUN = {"responses_create_params": {"input": [{"role": role, "content": "x"} for role in ("user", "assistant")]}}


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("calendar", BEGUN, "responses_create_params.input"),
        ("calendar", {"exp_cal_state": [1]}, "exp_cal_state"),
        ("equivalence_llm_judge", {"expected_answer": " "}, "expected_answer"),
        ("genrm_compare", WITHOUT_TEXT, "responses_create_params.input"),
        ("genrm_compare", {"principle": 3}, "principle"),
        ("inverse_if", {"rubric": [{"id": "1", "criteria": "c", "weight": 0}]}, "rubric"),
        ("jailbreak_detection", {"adversarial_prompt": "", **WITHOUT_TEXT}, "adversarial_prompt"),
        ("jailbreak_detection", {"response_policy_mapped": "of nobody"}, "response_policy_mapped"),
        ("math_formal_lean", {"formal_statement": "theorem t : a = a"}, "formal_statement"),
        ("multichallenge", {"rubric": [{"question": "q", "pass_criteria": "MAYBE"}]}, "rubric[0].pass_criteria"),
        (SINGLE, {"expected_action": {"type": "function_call_batch", "calls": []}}, "expected_action.calls"),
        (SINGLE, {"expected_action": call("f", "[1]")}, "expected_action"),
        (SINGLE, {"expected_action": call("", "{}")}, "expected_action"),
        *(
            ("code_gen", {"verifier_metadata": {"unit_tests": tests}}, field)
            for tests, field in (
                ({"inputs": [], "outputs": []}, "unit_tests"),
                ({"packed": "!"}, "unit_tests"),
                ({"inputs": ["1"], "outputs": ["not json"], "fn_name": "f"}, "unit_tests.outputs[0]"),
            )
        ),
        ("instruction_following/title", {"instruction_id_list": ["startend:none"]}, "instruction_id_list[0]"),
        ("instruction_following/lowercase_counting", {"kwargs": [None]}, "kwargs[0]"),
        ("inverse_if", {"rubric": [{"criteria": "x", "weight": "much"}]}, "rubric"),
        ("lc_niah", {"expected_answer": "a"}, "expected_answer"),
        ("mcqa", {"options": []}, "options"),
        ("mcqa", {"expected_answer": "D"}, "expected_answer"),
        ("mcqa", {"grading_mode": "loose"}, "grading_mode"),
        ("mcqa", {"template_metadata": {"output_regex": "("}}, "template_metadata.output_regex"),
        ("multichallenge", {"rubric": [{"pass_criteria": "YES"}]}, "rubric[0].question"),
        ("reasoning_gym/basic_arithmetic", {"metadata": {"source_dataset": "none"}}, "metadata.source_dataset"),
        ("reasoning_gym/basic_arithmetic", {"question": None}, "question"),
        (
            "code_gen",
            {"verifier_metadata": {"unit_tests": {"inputs": ["1\n{"], "outputs": ["1"], "fn_name": "f"}}},
            "unit_tests.inputs[0]",
        ),
        ("instruction_following/number_words", {"kwargs": [{"num_words": "ten", "relation": "at least"}]}, "kwargs[0]"),
        ("math_with_judge", {"expected_answer": r"$\text{}$"}, "expected_answer"),
        ("reasoning_gym/knights_knaves", {"metadata": {"source_dataset": "complex_arithmetic"}}, "metadata"),
        (SINGLE, {"expected_action": call("f", '{"x": NaN}')}, "expected_action"),
        *(
            ("structured_outputs/json", {"schema_str": json.dumps(schema)}, "schema_str")
            for schema in (
                {"$ref": "#/$defs/none"},
                {"$ref": "#"},
                {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
                {"items": {"anyOf": [{"properties": {"a": {"$dynamicRef": "#none"}}}]}},
                {"properties": {"a": {"type": "string", "pattern": "\\p{L}("}}},
                {"properties": {"a": {"multipleOf": 0}}},
            )
        ),
        ("structured_outputs/json", {"schema_type": "ini"}, "schema_type"),
        ("structured_outputs/json", {"schema_str": "{"}, "schema_str"),
        ("structured_outputs/json", {"schema_str": '{"type": "nothing"}'}, "schema_str"),
        ("structured_outputs/tool_call", {"tool_name": ""}, "tool_name"),
        ("swe_pivot", {"expected_action": call("f", "no object")}, "expected_action.arguments"),
        ("swerl_gen", {"mode": "guess"}, "mode"),
        ("terminus_judge", {"metadata": {"harness": "mine"}}, "metadata.harness"),
        ("terminus_judge", {"expected_answer": '{"no": "step"}'}, "expected_answer"),
        ("terminus_judge", {"threshold": float("nan")}, "threshold"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused_by_its_field(name: str, change: dict[str, Any], field: str) -> None:
    (case,) = [each for each in CASES if each.name == name]
    environment = build(case)
    environment.check_row(case.row, "f.jsonl:7")
    with pytest.raises(DataError) as caught:
        environment.check_row({**case.row, **change}, "f.jsonl:7")
    where = str(caught.value.where)
    assert where.startswith("f.jsonl:7 field ") and where.endswith(field)


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/a"}}},
        {"$id": "https://example.com/a", "$defs": {"b": {"$id": "b", "$anchor": "c"}}, "items": {"$ref": "b#c"}},
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}},
        {"enum": [{"$ref": "#/nowhere", "pattern": "("}]},
    ],
)
def test_a_schema_whose_references_are_there_is_accepted(schema: dict[str, Any]) -> None:
    (case,) = [each for each in CASES if each.name == "structured_outputs/json"]
    build(case).check_row({**case.row, "schema_str": json.dumps(schema)}, "f:1")
