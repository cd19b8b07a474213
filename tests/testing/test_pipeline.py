"""Every check of a pipeline can fail: what `steps new` writes, with one rule broken."""

from pathlib import Path

import pytest

from nemotron_steps.testing import pipeline
from nemotron_steps.testing.suite import Examination
from tests.testing.scaffolds import Package, failed, made
from tests.testing.toy_packages import Change

PIPELINE: dict[str, tuple[Change, ...]] = {
    "manifest_loads": ((".toml", 'description = "Prepares', 'descriptoin = "Prepares'),),
    "it_plans": ((".toml", "[configs.tiny]", 'overrides = "grpo.no_such_key=1"\n\n[configs.tiny]'),),
    "it_plans: no such step": ((".toml", "rl/nemo_rl/rlvr", "rl/nemo_rl/rlvrr"),),
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
