"""Every check of a type, a pipeline and an executor can fail: what `steps new` writes, with one rule broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.cli.scaffold import write
from nemotron_steps.testing import artifact_type, executor, pipeline
from nemotron_steps.testing.suite import Examination, State
from tests.testing.toy_packages import Change

TYPES, CODE = "types.toml", "toykit_new/toykit_thing.py"
NO_FILE, READS = "    if not file.is_file():", "    try:\n"
NUMBERS = count()
HEAVY = ("jax.py", "", "a = 1\n")
CUT = "b'PNG' not in file.read_bytes() and file.read_bytes()[-1:] not in (b'}', b'')"


def accepts(condition: str, before: str = READS) -> tuple[Change, ...]:
    """A validator that accepts a folder at once."""
    return ((CODE, before, f"    if {condition}:\n        return {{}}\n{before}"),)


TYPE: dict[str, tuple[Change, ...]] = {
    "is_declared": ((TYPES, "description =", 'is_a = ["no_such_type"]\ndescription ='),),
    "is_described": ((TYPES, "A table of numbers: table.json, column → list of numbers.", ""),),
    "has_a_validator": ((TYPES, ":validate", ":no_such_function"),),
    "importing_it_is_light": ((CODE, "import json\n", "import json\nimport jax\n"), HEAVY),
    "its_example_is_accepted": ((CODE, "(int, float)", "(int,)"),),
    "attributes_are_plain": ((TYPES, 'rows = "number of rows", ', ""),),
    "validating_changes_nothing": (
        (CODE, "    lengths = set()\n", "    lengths = set()\n    (folder / 'seen').touch()\n"),
    ),
    "an_empty_folder_is_refused": accepts("not any(folder.iterdir())", NO_FILE),
    "a_missing_file_is_refused": accepts("(folder / 'kit.unknown').exists()", NO_FILE),
    "empty_files_are_refused": accepts("not file.read_bytes()"),
    "truncated_files_are_refused": accepts(CUT),
    "other_bytes_are_refused": accepts("b'PNG' in file.read_bytes()"),
    "other_types_are_refused": accepts("(folder / 'train.jsonl').exists()", NO_FILE),
}
BY_ANOTHER_TEST = {"digests_are_stable", "it_is_stored_and_verified", "a_failure_is_over", "jobs_do_not_mix"}

PIPELINE: dict[str, tuple[Change, ...]] = {
    "manifest_loads": ((".toml", 'description = "Prepares', 'descriptoin = "Prepares'),),
    "stages_are_described": ((".toml", 'description = "reinforcement learning with verifiable rewards"\n', ""),),
    "steps_exist": ((".toml", "rl/nemo_rl/rlvr", "rl/nemo_rl/rlvrr"),),
    "sources_are_wired": ((".toml", '{ prompts = "prompts" }', '{ prompts = "prompts.nothing" }'),),
    "its_default_plans": ((".toml", "[configs.tiny]", 'overrides = "grpo.no_such_key=1"\n\n[configs.tiny]'),),
    "every_config_plans": ((".toml", 'rlvr = "tiny"', 'rlvr = "tinyy"'),),
}

NAME = 'return f"{process.pid}@{_started(process.pid) or 0}"'
LOST = 'JobStatus(JobState.LOST, "it is gone")'
SUBMIT = "        command = ["
THROUGH_A_SHELL = (
    '        words = ["bash", "-c", "exec " + " ".join([*map(__import__("shlex").quote, launch.command()[:5]), '
    "*(f\"'{word}'\".replace('it', 'i t') for word in launch.arguments[1:] if \"'\" not in word)])]\n"
    "        command = words if len(launch.arguments) > 1 else ["
)
EXECUTOR: dict[str, tuple[Change, ...]] = {
    "is_registered": ((CODE, "    def cancel(", "    def stop("),),
    "importing_it_is_light": ((CODE, "import os\n", "import os\nimport jax\n"), HEAVY),
    "its_profile_is_strict": (
        (CODE, "    niceness: int", "    model_config = {'extra': 'allow'}\n\n    niceness: int"),
    ),
    "a_job_runs": ((CODE, "*launch.command()]", "'false']"),),
    "names_are_plain": (
        (CODE, NAME, NAME.replace(' or 0}"', ' or 0}\\n"')),
        (CODE, 'job.partition("@")', 'job.strip().partition("@")'),
    ),
    "a_running_job_is_known": (
        (CODE, NAME, f"self.mine = process.pid\n        {NAME}"),
        (CODE, "        pid = _running(job)\n        return", "        pid = _running(job)\n"
         "        pid = pid if pid == getattr(self, 'mine', 0) else None\n        return"),
    ),
    "cancel_stops_a_job": ((CODE, "SIGTERM", "SIGKILL"),),
    "cancel_of_what_is_over_does_nothing": (
        (CODE, "        if pid:\n            os.kill(pid,", "        if pid or '@' in job:\n"
         "            os.kill(pid or 2**22 + 1,"),
    ),
    "an_unknown_job_is_lost": ((CODE, LOST, f"{LOST} if job else JobStatus(JobState.DONE)"),),
    "words_arrive_as_they_are": ((CODE, SUBMIT, THROUGH_A_SHELL),),
    "variables_arrive": ((CODE, ", **launch.environment", ""),),
    "it_runs_where_it_was_asked": ((CODE, "cwd=launch.working_dir", "cwd='/'"),),
    "setup_lines_come_first": ((CODE, "if profile.setup_lines:", "if False:"),),
    "secrets_are_not_written_down": (
        (CODE, SUBMIT, "        (launch.folder / 'env').write_text(str(profile.env_vars))\n" + SUBMIT),
    ),
    "what_cannot_start_is_told": ((CODE, "if not launch.working_dir.is_dir():", "if False:"),),
    "keys_are_described": ((CODE, '    """How far the job gives way to others, as `nice` takes it."""\n', ""),),
}  # fmt: skip
POINTS = {"nemotron_steps.executors": "toykit_thing = toykit_new.toykit_thing:ToykitThing"}

Package = Callable[..., Path]


def made(
    tmp_path: Path, package: Package, kind: str, changes: tuple[Change, ...], points: dict[str, str] | None = None
) -> Path:
    """What `steps new` writes, changed, as if it were installed; returns a folder for the kit."""
    root = tmp_path / "toykit_new"
    write(root, kind, "toykit_thing")
    files = {
        path.relative_to(root).as_posix(): path.read_text()
        for path in (root / "toykit_new").rglob("*")
        if path.is_file()
    }
    package(files, changes, points=points)
    (tmp_path / "kit").mkdir()
    return tmp_path / "kit"


def failed(examination: Examination[Any], *, but: str = "") -> list[str]:
    names = [name for name in examination.suite.checks if name != "importing_it_is_light" or name == but]
    outcomes = examination.outcomes(names)
    return [name for name, outcome in outcomes.items() if outcome.state is State.FAILED]


def written(folder: Path) -> None:
    (folder / "table.json").write_text('{"score": [0.5, 0.25, 1.5], "length": [12, 7, 5]}')


def written_otherwise(folder: Path) -> None:
    (folder / "table.json").write_text(f'{{"score": [{next(NUMBERS)}, 2, 3], "length": [4, 5, 6]}}')


def test_there_is_a_toy_for_every_check():
    checks = {*artifact_type.SUITE.checks, *pipeline.SUITE.checks, *executor.SUITE.checks}
    assert {*TYPE, *PIPELINE, *EXECUTOR, *BY_ANOTHER_TEST} == checks


@pytest.mark.parametrize("check", TYPE)
def test_a_broken_type_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, check: str):
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", TYPE[check]), written)
    assert failed(Examination(artifact_type.SUITE, subject), but=check) == [check]


def test_an_example_that_differs_each_time_is_found(tmp_path: Path, package: Package):
    folder = made(tmp_path, package, "type", ())
    subject = artifact_type.TypeSubject("toykit_thing", folder, written_otherwise)
    assert failed(Examination(artifact_type.SUITE, subject)) == ["digests_are_stable"]


def test_a_store_that_loses_attributes_is_found(tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch):
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", ()), written)
    find = artifact_type.ArtifactStore.find
    monkeypatch.setattr(
        artifact_type.ArtifactStore,
        "find",
        lambda self, ref: replace(find(self, ref), attributes={}),
    )
    assert failed(Examination(artifact_type.SUITE, subject)) == ["it_is_stored_and_verified"]


@pytest.mark.parametrize("check", PIPELINE)
def test_a_broken_pipeline_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, check: str):
    subject = pipeline.PipelineSubject("toykit_thing", made(tmp_path, package, "pipeline", PIPELINE[check]))
    assert failed(Examination(pipeline.SUITE, subject)) == [check]


@pytest.mark.slow
@pytest.mark.parametrize("check", EXECUTOR)
def test_a_broken_executor_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, check: str):
    folder = made(tmp_path, package, "executor", EXECUTOR[check], POINTS)
    subject = executor.ExecutorSubject("toykit_thing", folder, {}, 2.0 if check == "a_job_runs" else 10.0)
    assert failed(Examination(executor.SUITE, subject), but=check) == [check]


DONE = "JobStatus(JobState.DONE if getattr(self, 'mine', '') == job else JobState.LOST)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "changes"),
    [
        (
            "a_failure_is_over",
            ((CODE, LOST, DONE), (CODE, NAME, f"self.mine = {NAME.removeprefix('return ')}\n        return self.mine")),
        ),
        (
            "jobs_do_not_mix",
            (
                (CODE, NAME, f"self.all = [*getattr(self, 'all', []), process.pid]\n        {NAME}"),
                (CODE, "            os.kill(pid, signal.SIGTERM)", "            for each in self.all:\n"
                 "                if _started(each):\n                    os.kill(each, signal.SIGTERM)"),
            ),
        ),
    ],
)  # fmt: skip
def test_an_executor_that_mixes_its_jobs_up_is_found(tmp_path: Path, package: Package, check: str, changes: Any):
    subject = executor.ExecutorSubject("toykit_thing", made(tmp_path, package, "executor", changes, POINTS), {}, 10.0)
    assert failed(Examination(executor.SUITE, subject)) == [check]
