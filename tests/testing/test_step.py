"""Every check of a step can fail: a toy that breaks one rule fails the check of that rule and no other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.testing.step_manifest import SUITE as MANIFEST
from nemotron_steps.testing.step_runs import SUITE
from nemotron_steps.testing.step_subject import StepSubject
from nemotron_steps.testing.suite import Examination, State
from tests.testing.toy_packages import STEP, TABLE_STEP, Change

TOML, CODE = "shorten.toml", "toykit/shorten.py"
LAST = "    context.tracker.summary("
TABLE_CODE = "toykit_table/add.py"
BEGUN_ONCE = """\
    rows = []
    begun = context.work / "begun"
    if begun.exists():
        raise DataError("begun before")
    begun.touch()
"""
AT = "    at: float = Field(default_factory=__import__('time').time)\n"
LAZILY = "words = __import__('importlib').import_module('.'.join(['toykit', 'words']))\n"
OTHER = '[step]\nid = "toykit/shorten"\n[[produces]]\ntype = "training_jsonl"\n'


def swap(old: str, new: str, file: str = CODE) -> tuple[Change, ...]:
    return ((file, old, new),)


def at_end(code: str) -> tuple[Change, ...]:
    """More code before the step reports its summary."""
    return swap(LAST, code + LAST)


STATIC: dict[str, tuple[Change, ...]] = {
    "manifest_loads": swap('name = "Shorten"', 'nmae = "Shorten"', TOML),
    "manifest_has_no_warnings": (
        (TOML, '[[consumes]]\nname = "rows"\ntype = "training_jsonl"\ndescription = "rows to shorten"\n\n', ""),
        (TOML, '[[produces]]\nname = "short"\ntype = "training_jsonl"\ndescription = "the first of them"\n', ""),
    ),
    "manifest_is_complete": swap('description = "the first of them"\n', "", TOML),
    "id_is_its_own": (("../manifests/x.toml", "", OTHER),),
    "entry_takes_a_context": swap("def run(context):", "def run(context, other):"),
    "config_model_is_strict": (
        (CODE, "class ShortenConfig", "class Inner(BaseModel):\n    a: int = 1\n\n\nclass ShortenConfig"),
        (CODE, "    count: PositiveInt = 3", "    inner: Inner = Inner()\n    count: PositiveInt = 3"),
    ),
    "parameters_exist": swap('name = "count"', 'name = "cuont"', TOML),
    "every_config_composes": (("toykit/pack/configs/toykit/shorten/large.yaml", "", "cuont: 9\n"),),
    "parameters_tell_their_defaults": swap("default = 3", "default = 4", TOML),
    "choices_are_accepted": swap('["first", "last"]', '["first", "last", "middle"]', TOML),
    "overrides_can_be_pasted": swap('"count*=2|6"', '"cuont=6"', TOML),
    "importing_it_is_light": ((CODE, "import json\n", "import json\nimport jax\n"), ("jax.py", "", "a = 1\n")),
    "wrong_values_are_refused": swap("count: PositiveInt = 3", "count: Any = 3"),
}

RUN: dict[str, tuple[Change, ...]] = {
    "dry_run_needs_no_data": (
        ("toykit/pack/configs/toykit/shorten/large.yaml", "", "count: 9\ninputs: {rows: {step: no/such_step}}\n"),
    ),
    "runs": at_end("    raise KeyError('x')\n"),
    "outputs_validate": swap('file.write(json.dumps({"text"', 'file.write("}" + json.dumps({"text"'),
    "says_what_it_did": at_end("    return\n"),
    "a_second_run_is_cached": swap("    count: PositiveInt = 3", AT + "    count: PositiveInt = 3"),
    "same_seed_same_outputs": swap('{"text": words', '{"hash": hash("a"), "text": words'),
    "resumes_after_a_kill": swap("    rows = []\n", BEGUN_ONCE),
    "stops_when_asked": at_end(
        "    import signal\n    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    (context.work / 'x').touch()\n    signal.signal(signal.SIGTERM, before)\n"
    ),
    "writes_only_where_it_may": at_end("    open('debug.txt', 'w').close()\n"),
    "removes_its_temporary_files": at_end("    __import__('tempfile').mkstemp()\n"),
    "inputs_stay_as_they_are": at_end("    source.open('a').close()\n"),
    "leaves_nothing_running": at_end("    __import__('subprocess').Popen(['sleep', '20'])\n"),
    "asks_no_other_machine": at_end(
        "    import socket\n    asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    asked.connect(('192.0.2.1', 9))\n    asked.close()\n"
    ),
    "keeps_secrets_out": swap('{"text": words', '{"key": __import__("os").environ.get("KIT_API_KEY"), "text": words'),
    "key_knows_the_code": swap("from toykit import words\n", LAZILY),
}
"""Check → what breaks it, of those that run the step."""

BAD_INPUT: dict[str, tuple[Change, ...]] = {
    "a_missing_input_is_told": swap("if not file.is_file():", "if file.is_dir():", TABLE_CODE),
    "a_wrong_type_is_told": swap("except UnicodeDecodeError", "except RecursionError", TABLE_CODE),
    "a_truncated_file_is_told": swap("except json.JSONDecodeError", "except RecursionError", TABLE_CODE),
}
"""Of those that feed it what is broken; the toy has a type of its own, for which nothing else looks."""

SLOW = {"dry_run_needs_no_data", "resumes_after_a_kill", "stops_when_asked"} | {
    name for name in SUITE.checks if name.endswith("_is_told")
}
"""Checks with processes of their own, which are asked only of the toys that are about them."""


def examined(folder: Path, step: str = "toykit/shorten", **options) -> Examination[StepSubject]:
    folder.mkdir()
    return Examination(SUITE, StepSubject(step, folder, **options))


def failed(examination: Examination[StepSubject], names: list[str]) -> list[str]:
    outcomes = examination.outcomes(names)
    return [name for name in names if outcomes[name].state is State.FAILED]


def test_there_is_a_toy_for_every_check():
    assert {*STATIC, *RUN, *BAD_INPUT, "a_broken_row_is_told"} == set(SUITE.checks)
    assert len(SUITE.checks) >= 25


@pytest.mark.slow
def test_a_step_that_keeps_to_the_rules_passes_every_check(package: Callable[..., Path], tmp_path: Path):
    package(STEP)
    found = examined(tmp_path / "kit").outcomes()
    assert {name: outcome.text for name, outcome in found.items() if outcome.state is not State.PASSED} == {}


@pytest.mark.parametrize("check", STATIC)
def test_a_broken_manifest_fails_the_check_that_is_about_it(package: Callable[..., Path], tmp_path: Path, check: str):
    package(STEP, STATIC[check])
    assert failed(examined(tmp_path / "kit"), list(MANIFEST.checks)) == [check]


@pytest.mark.slow
@pytest.mark.parametrize("check", RUN)
def test_a_broken_function_fails_the_check_that_is_about_it(package: Callable[..., Path], tmp_path: Path, check: str):
    package(STEP, RUN[check])
    names = [name for name in SUITE.checks if name not in MANIFEST.checks and (name == check or name not in SLOW)]
    assert failed(examined(tmp_path / "kit"), names) == [check]


BENIGN = {
    "writes_only_where_it_may": (
        "    import os, shutil\n    from pathlib import Path\n    (context.work / 'a').mkdir()\n"
        "    (context.work / 'a' / 'b').touch()\n    shutil.rmtree(context.work / 'a')\n"
        "    (Path(os.environ['XDG_CACHE_HOME']) / 'toykit').mkdir(parents=True, exist_ok=True)\n"
    ),
    "leaves_nothing_running": (
        "    import multiprocessing\n    worker = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    worker.start()\n    worker.join()\n"
    ),
}
"""What a step may do: remove a folder, fill a cache, use worker processes."""


@pytest.mark.parametrize("check", BENIGN)
def test_what_python_and_libraries_do_for_a_step_is_not_held_against_it(
    package: Callable[..., Path], tmp_path: Path, check: str
):
    package(STEP, ((CODE, LAST, BENIGN[check] + LAST),))
    outcome = examined(tmp_path / "kit").outcome(check)
    assert outcome.state is State.PASSED, outcome.text


def written_table(folder: Path) -> Path:
    (folder / "table.json").write_text('{"a": [1, 2, 3], "b": [4, 5, 6]}')
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("check", [None, *BAD_INPUT])
def test_what_raises_without_a_code_is_found(package: Callable[..., Path], tmp_path: Path, check: str | None):
    package(TABLE_STEP, BAD_INPUT[check] if check else ())
    examination = examined(tmp_path / "kit", "toykit_table/sum", inputs={"table": written_table})
    assert failed(examination, list(BAD_INPUT)) == ([check] if check else [])


@pytest.mark.slow
def test_a_row_that_raises_without_a_code_is_found(package: Callable[..., Path], tmp_path: Path):
    package(STEP, ((CODE, '        if not isinstance(row.get("text"), str):', "        if not row['text'].strip():"),))
    names = [name for name in SUITE.checks if name.endswith("_is_told")]
    assert failed(examined(tmp_path / "kit"), names) == ["a_broken_row_is_told"]


def test_a_step_that_is_not_there_is_told_once(tmp_path: Path):
    found = examined(tmp_path / "kit", "toykit/nowhere").outcomes()
    assert [name for name, outcome in found.items() if outcome.state is State.FAILED] == ["manifest_loads"]
    assert {outcome.state for outcome in found.values()} == {State.FAILED, State.SKIPPED}
