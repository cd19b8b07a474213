"""The built-in manifests say what the code does: every name in them exists."""

import re
from typing import get_args

import pytest
import torch

from nemotron_steps.config.schema.policy import ReasoningParserName, ToolParserName
from nemotron_steps.config.validation import has_key, load_schema
from nemotron_steps.engine.signals import RULES
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.runs.hints import hints_for_failure

REGISTRY = load_registry(PackSearch((open_pack(builtin_pack_root(), "nemotron_steps", "built-in"),)))
STEPS = list(REGISTRY.steps.values())
OF_TEACHERS = {"teacher_kl_stalled"}
"""Signals that only distillation raises."""


def ids(step: StepManifest) -> str:
    return step.id


def test_nothing_is_wrong_with_the_built_in_pack() -> None:
    assert [p.render() for p in (*REGISTRY.problems, *REGISTRY.warnings)] == []


@pytest.mark.parametrize("step", STEPS, ids=ids)
def test_every_config_key_it_names_exists(step: StepManifest) -> None:
    schema = load_schema(step.step.config_schema or "")
    named = [key for port in step.consumes for key in (*port.bindings, *port.instead_of, *port.unless)]
    named += [parameter.name for parameter in step.parameters]
    for entry in (*step.strategies, *step.errors):
        named += [re.split(r"[*/<>]?=", text.lstrip("+~"))[0] for text in entry.override]
    assert [key for key in named if not has_key(schema, key)] == []


@pytest.mark.parametrize("step", [s for s in STEPS if s.id.startswith("rl/nemo_rl/r")], ids=ids)
def test_grpo_steps_answer_every_signal(step: StepManifest) -> None:
    answered = {signal for strategy in step.strategies for signal in strategy.signal}
    assert set(RULES) - OF_TEACHERS <= answered


def test_pipeline_stages_name_steps_and_ports_that_exist() -> None:
    for pipeline in REGISTRY.pipelines.values():
        for stage in pipeline.stages:
            ports = REGISTRY.step(stage.step).inputs
            for name in stage.inputs:
                port, dot, _ = name.partition(".")
                assert port in ports and ports[port].many == bool(dot), (pipeline.name, stage.name, name)


@pytest.mark.parametrize("step", ["rl/nemo_rl/rlvr", "rl/nemo_rl/swe"])
def test_parser_choices_are_those_of_the_config(step: str) -> None:
    choices = {p.name: p.choices for p in REGISTRY.steps[step].parameters}
    assert set(choices["policy.generation.tool_parser"]) == set(get_args(ToolParserName))
    assert set(choices["policy.generation.reasoning_parser"]) == set(get_args(ReasoningParserName))


def test_memory_that_ran_out_gets_the_advice_of_every_step_that_has_some_on_a_cpu_too() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 45)
    advising = [step for step in STEPS if any(entry.name == "out_of_memory" for entry in step.errors)]
    assert len(advising) >= 10
    for step in advising:
        assert [hint.name for hint in hints_for_failure(caught.value, [], step, {})][:1] == ["out_of_memory"], step.id
