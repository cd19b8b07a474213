"""Every check of a pipeline can fail: what `steps new` writes, with one rule broken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.testing import pipeline
from nemotron_steps.testing.suite import Examination, Unmet
from tests.testing.scaffolds import Package, failed, made
from tests.testing.toy_packages import STEP, Change

PIPELINE: dict[str, tuple[Change, ...]] = {
    "manifest_loads": ((".toml", 'description = "Prepares', 'descriptoin = "Prepares'),),
    "it_names_no_path_of_one_machine": (
        (".toml", '{ prompts = "prompts" }', '{ prompts = "prompts", policy = { ref = "/data/model" } }'),
    ),
    "it_plans": ((".toml", "[configs.tiny]", 'overrides = "grpo.no_such_key=1"\n\n[configs.tiny]'),),
    "it_plans: no such step": ((".toml", "rl/nemo_rl/rlvr", "rl/nemo_rl/rlvrr"),),
    "it_plans: no such input": ((".toml", '{ prompts = "prompts" }', '{ promts = "prompts" }'),),
    "it_plans: another type": ((".toml", '{ prompts = "prompts" }', '{ policy = "prompts" }'),),
    "it_plans: no such config": ((".toml", 'rlvr = "tiny"', 'rlvr = "tinyy"'),),
    "it_plans: under a config, a step that makes another type": (
        (".toml", 'prompts = "tiny"', 'prompts = { step = "data_prep/sft_prep", config = "tiny" }'),
    ),
}


def test_there_is_a_toy_for_every_check():
    assert {toy.partition(":")[0] for toy in PIPELINE} == set(pipeline.SUITE.checks)


@pytest.mark.parametrize("toy", PIPELINE)
def test_a_broken_pipeline_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, toy: str):
    subject = pipeline.PipelineSubject("toykit_thing", made(tmp_path, package, "pipeline", PIPELINE[toy]))
    assert failed(Examination(pipeline.SUITE, subject)) == [toy.partition(":")[0]]


def test_a_pipeline_with_the_name_of_a_step_is_found(tmp_path: Path, package: Package):
    step = STEP["toykit/pack/manifests/toykit/shorten.toml"].replace("toykit/shorten", "toykit_thing")
    folder = made(tmp_path, package, "pipeline", (("toykit_new/pack/manifests/a_step.toml", "", step),))
    subject = pipeline.PipelineSubject("toykit_new:toykit_thing", folder)
    assert failed(Examination(pipeline.SUITE, subject)) == ["manifest_loads"]


TAME = ("~policy.scheduler", "~policy/scheduler=cosine", "+a.b=1", "a=~b", "a=[x/y,~3]", "a=b/c")
"""Before a key, + adds it and ~ takes it away."""
OVERRIDES = ("a=~", "a=~/b", "++a=~bob/c", "+a=/b", "a=[x,/y]", 'a="C:\\x"')
WRONG: list[dict[str, Any]] = [
    {"inputs": {"policy": SimpleNamespace(ref="/models/a")}},
    {"fan_out": {"inputs.policy": ["org/model", "~/models/a"]}},
    *({"overrides": (override,)} for override in OVERRIDES),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_path_of_one_machine_is_found_wherever_a_stage_has_it(wrong: dict[str, Any]):
    def look(**fields: Any) -> None:
        manifest = SimpleNamespace(stages=[SimpleNamespace(name="train", **fields)], where=lambda *place: "here")
        pipeline.it_names_no_path_of_one_machine(SimpleNamespace(manifest=manifest))  # type: ignore[arg-type]

    tame = {"inputs": {"policy": SimpleNamespace(ref="org/model")}, "overrides": TAME, "fan_out": {"seed": [1]}}
    look(**tame)
    with pytest.raises(Unmet, match="names a path of one machine"):
        look(**{**tame, **wrong})
