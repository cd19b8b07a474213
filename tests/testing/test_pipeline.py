"""Every check of a pipeline can fail: what `steps new` writes, with one rule broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.testing import pipeline
from nemotron_steps.testing.suite import Examination, State
from tests.testing.scaffolds import Package, failed, made
from tests.testing.toy_packages import STEP, Change

PIPELINE: dict[str, tuple[Change, ...]] = {
    "manifest_loads": ((".toml", 'description = "Prepares', 'descriptoin = "Prepares'),),
    "stages_are_described": ((".toml", 'description = "reinforcement learning with verifiable rewards"\n', ""),),
    "steps_exist": ((".toml", "rl/nemo_rl/rlvr", "rl/nemo_rl/rlvrr"),),
    "sources_are_wired": ((".toml", '{ prompts = "prompts" }', '{ prompts = "prompts.nothing" }'),),
    "its_default_plans": ((".toml", "[configs.tiny]", 'overrides = "grpo.no_such_key=1"\n\n[configs.tiny]'),),
    "every_config_plans": ((".toml", 'rlvr = "tiny"', 'rlvr = "tinyy"'),),
    "names_can_be_typed": (
        (".toml", 'name = "rlvr"', 'name = "rl vr"'),
        (".toml", 'rlvr = "tiny"', '"rl vr" = "tiny"'),
    ),
    "it_names_no_path_of_one_machine": (
        (".toml", '{ prompts = "prompts" }', '{ prompts = "prompts", policy = { ref = "/data/model" } }'),
    ),
    "bounds_can_be_met": (
        (".toml", "[configs.tiny]", '[[stages.checks]]\nmetric = "a"\nat_least = 2\nat_most = 1\n\n[configs.tiny]'),
    ),
    "stages_take_what_they_are_given": ((".toml", '{ prompts = "prompts" }', '{ promts = "prompts" }'),),
    "types_chain": ((".toml", '{ prompts = "prompts" }', '{ policy = "prompts" }'),),
    "variants_make_the_same": (
        (".toml", 'prompts = "tiny"', 'prompts = { step = "data_prep/sft_prep", config = "tiny" }'),
    ),
    "no_stage_is_left_over": (
        (".toml", "[configs.tiny]", '[[stages]]\nstep = "data_prep/rl_prep"\nname = "more"\ndescription = "more"\n\n'
         '[configs.tiny]\nmore = "tiny"'),
    ),
    "tiny_needs_no_gpu": ((".toml", 'rlvr = "tiny"', 'rlvr = "one_gpu"'),),
    "commands_show_it": ((".toml", "Prepares prompts and", "Prepares prompts\\nand"),),
}  # fmt: skip

TWO_STAGES = """\
[pipeline]
name = "toykit_twice"
description = "Shortens rows twice."

[[stages]]
step = "toykit/shorten"
name = "first"
description = "the first rows"
config = "tiny"

[[stages]]
step = "toykit/shorten"
name = "second"
description = "the first of those"
config = "tiny"
inputs = { rows = "first" }

[[stages.checks]]
metric = "rows"
at_least = 1
severity = "warn"
"""
CODE, OPENS = "toykit/shorten.py", '    source = context.inputs["rows"]'
CLOSES = '    context.tracker.summary({"rows": len(kept)})\n'
RUN: dict[str, tuple[Change, ...]] = {
    "runs": ((CODE, OPENS, f"    raise DataError('no')\n{OPENS}"),),
    "a_second_run_makes_nothing": (
        ("tiny.yaml", "count: 2", "count: ${oc.env:KIT_COUNT,2}"),
        (CODE, OPENS, f"    import os\n\n    os.environ['KIT_COUNT'] = '1'\n{OPENS}"),
    ),
    "same_seed_same_outputs": (
        (CODE, 'words.clean(row["text"])', 'words.clean(row["text"]) + str(__import__("time").time())'),
    ),
    "goes_on_after_a_kill": (
        (CODE, OPENS, "    from pathlib import Path\n\n    lock = Path.home() / 'toykit.lock'\n"
         f"    lock.parent.mkdir(exist_ok=True)\n    lock.touch(exist_ok=False)\n{OPENS}"),
        (CODE, CLOSES, f"{CLOSES}    lock.unlink()\n"),
    ),
    "checks_find_their_numbers": (("twice.toml", 'metric = "rows"', 'metric = "rowz"'),),
    "it_writes_into_its_home_only": ((CODE, CLOSES, f"{CLOSES}    open('seen', 'w').close()\n"),),
}  # fmt: skip


def test_there_is_a_toy_for_every_check():
    assert {*PIPELINE, *RUN, "its_name_is_its_own"} == set(pipeline.SUITE.checks)


@pytest.mark.parametrize("check", PIPELINE)
def test_a_broken_pipeline_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, check: str):
    subject = pipeline.PipelineSubject("toykit_thing", made(tmp_path, package, "pipeline", PIPELINE[check]))
    assert failed(Examination(pipeline.SUITE, subject)) == [check]


def test_a_pipeline_with_the_name_of_a_step_is_found(tmp_path: Path, package: Package):
    step = STEP["toykit/pack/manifests/toykit/shorten.toml"].replace("toykit/shorten", "toykit_thing")
    folder = made(tmp_path, package, "pipeline", (("toykit_new/pack/manifests/a_step.toml", "", step),))
    subject = pipeline.PipelineSubject("toykit_new:toykit_thing", folder)
    assert failed(Examination(pipeline.SUITE, subject)) == ["its_name_is_its_own"]


def after_overrides(tmp_path: Path, package: Package, override: str) -> State:
    """How the check of paths ends for a stage with an override."""
    change = (".toml", "[configs.tiny]", f"overrides = ['{override}']\n\n[configs.tiny]")
    subject = pipeline.PipelineSubject("toykit_thing", made(tmp_path, package, "pipeline", (change,)))
    return Examination(pipeline.SUITE, subject).outcome("it_names_no_path_of_one_machine").state


@pytest.mark.parametrize("override", ["~policy.scheduler", "~policy/scheduler=cosine", "+a.b=1", "a=~b", "a=[x/y,~3]"])
def test_an_override_that_deletes_or_adds_a_key_is_no_path(tmp_path: Path, package: Package, override: str):
    assert after_overrides(tmp_path, package, override) is State.PASSED


@pytest.mark.parametrize("override", ["a=~", "a=~/b", "++a=~bob/c", "+a=/b", "a=[x,/y]", 'a="C:\\x"'])
def test_an_override_whose_value_is_a_path_of_one_machine_is_found(tmp_path: Path, package: Package, override: str):
    assert after_overrides(tmp_path, package, override) is State.FAILED


def write_rows(folder: Path) -> Path:
    (folder / "train.jsonl").write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(4)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("check", RUN)
def test_a_pipeline_that_runs_badly_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, check: str):
    package({**STEP, "toykit/pack/manifests/pipelines/twice.toml": TWO_STAGES}, RUN[check])
    subject = pipeline.PipelineSubject("toykit_twice", tmp_path / "kit", "tiny", {"first.rows": write_rows})
    assert failed(Examination(pipeline.SUITE, subject), but=check) == [check]


def run_twice(tmp_path: Path, package: Package, changes: tuple[Change, ...]) -> Examination[pipeline.PipelineSubject]:
    package({**STEP, "toykit/pack/manifests/pipelines/twice.toml": TWO_STAGES}, changes)
    return Examination(
        pipeline.SUITE,
        pipeline.PipelineSubject("toykit_twice", tmp_path / "kit", "tiny", {"first.rows": write_rows}),
    )


@pytest.mark.slow
def test_a_stage_that_makes_other_bytes_after_a_kill_is_found(tmp_path: Path, package: Package):
    marks = f"    mark = context.work / 'begun'\n    again = mark.exists()\n    mark.mkdir(exist_ok=True)\n{OPENS}"
    changes = ((CODE, OPENS, marks), (CODE, 'words.clean(row["text"])', 'words.clean(row["text"]) + "!" * again'))
    outcome = run_twice(tmp_path, package, changes).outcome("goes_on_after_a_kill")
    assert outcome.state is State.FAILED
    assert "makes something else" in outcome.text
    assert "second.short" in outcome.text


@pytest.mark.parametrize(("metric", "state"), [("rows", State.PASSED), ("rowz", State.FAILED)])
def test_checks_of_a_fanned_out_stage_are_looked_for_in_each_instance(
    tmp_path: Path, package: Package, metric: str, state: State
):
    twice = "fan_out = { count = [1, 2] }"
    changes = (
        ("twice.toml", 'inputs = { rows = "first" }', f'inputs = {{ rows = "first" }}\n{twice}'),
        ("twice.toml", 'metric = "rows"', f'metric = "{metric}"'),
    )
    assert run_twice(tmp_path, package, changes).outcome("checks_find_their_numbers").state is state
