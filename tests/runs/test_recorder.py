from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ConfigError, PlanError
from nemotron_steps.runs.recorder import Recorder, row_at
from nemotron_steps.runs.run_folder import RunFolder


@pytest.fixture
def recorder(store: ArtifactStore) -> Recorder:
    folder = RunFolder(store, "run-1")
    return Recorder(folder, folder.create("toy", {}), [{"api_key": "sk-of-this-test"}])


def log_of(recorder: Recorder) -> str:
    return (recorder.folder.path / "log.txt").read_text()


def test_the_state_of_a_step_changes_without_what_else_is_known_of_it(recorder: Recorder) -> None:
    recorder.set_step("a", "running", cache_key="k", outputs={"rows": "r:v1"})
    recorder.set_step("b", "pending")
    recorder.set_step("a", "failed", outputs={})
    saved = recorder.folder.load()
    assert saved is not None
    assert saved.steps == {"a": {"state": "failed", "cache_key": "k", "outputs": {}}, "b": {"state": "pending"}}


def test_the_log_has_this_packages_infos_and_others_warnings_while_the_run_works(recorder: Recorder) -> None:
    own, other = logging.getLogger("nemotron_steps.of_this_test"), logging.getLogger("of_another_package")
    level, handlers = logging.getLogger("nemotron_steps").level, list(logging.getLogger().handlers)
    records: list[dict[str, Any]] = []
    recorder.listen(records.append)
    logging.getLogger("nemotron_steps").setLevel(logging.ERROR)
    try:
        with recorder.capture_logging():
            own.info("a detail with sk-of-this-test")
            own.warning("look here")
            own.debug("too much")
            other.warning("of the other")
            other.info("a detail of the other")
        own.warning("after the run")
        assert logging.getLogger("nemotron_steps").level == logging.ERROR
        assert logging.getLogger().handlers == handlers
    finally:
        logging.getLogger("nemotron_steps").setLevel(level)
    lines = [line.partition(" ")[2].partition(" ")[2] for line in log_of(recorder).splitlines()]
    assert [line for line in lines if "WARNING" in line or "INFO" in line] == [
        "nemotron_steps.of_this_test INFO: a detail with ***",
        "nemotron_steps.of_this_test WARNING: look here",
        "of_another_package WARNING: of the other",
    ]
    assert [(record["kind"], record["text"]) for record in records] == [("warning", "look here")]


def test_a_step_has_its_own_signals_with_their_last_numbers_and_its_whole_summary(recorder: Recorder) -> None:
    one, other = recorder.tracker("a"), recorder.tracker("b")
    for kl in (1.0, 2.0, 3.0):
        one.signal("kl_spike", kl=kl)
    other.signal("kl_spike", kl=9.0)
    one.summary({"rows": 1, "seconds": 2})
    one.summary({"rows": 3})
    other.summary({"rows": 9})
    assert [(s.name, s.numbers, s.count) for s in recorder.signals("a")] == [("kl_spike", {"kl": 3.0}, 3)]
    assert [(s.numbers, s.count) for s in recorder.signals("b")] == [({"kl": 9.0}, 1)]
    assert recorder.summary("a") == {"rows": 3, "seconds": 2} and recorder.summary("none") == {}


def test_what_run_json_says_of_steps_and_errors_has_no_secret(recorder: Recorder) -> None:
    recorder.set_step("a", "failed", note="key sk-of-this-test")
    recorder.set_status("failed", error={"what": "refused sk-of-this-test"})
    text = (recorder.folder.path / "run.json").read_text()
    assert "sk-of-this-test" not in text and text.count("***") == 2


def test_every_text_of_every_problem_of_an_error_is_masked(recorder: Recorder) -> None:
    said = "key sk-of-this-test"
    problems = [ConfigError(said, where=said, expected=said, found=said, hints=(said, "fine")) for _ in range(2)]
    error = PlanError("the plan cannot be run", problems=problems)
    recorder.mask_error(error)
    for each in problems:
        assert (each.what, each.where, each.expected, each.found) == ("key ***",) * 4
        assert each.hints == ("key ***", "fine") and each.args == ("key ***",)


def test_a_row_is_told_without_its_end_and_one_that_is_not_there_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("a" * 4000 + "\n" + "b" * 4001 + "\n")
    assert row_at(f"{file}:1") == "a" * 4000
    assert row_at(f"{file}:2") == f"{'b' * 2000} … {'b' * 2000}"
    assert [row_at(f"{file}:3"), row_at(f"{tmp_path}/gone.jsonl:1"), row_at(f"{file}:0")] == [""] * 3
