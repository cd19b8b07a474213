from __future__ import annotations

import logging
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.recorder import Recorder
from nemotron_steps.runs.run_folder import RunFolder


@pytest.fixture
def recorder(store: ArtifactStore) -> Recorder:
    folder = RunFolder(store, "run-1")
    return Recorder(folder, folder.create("toy", {}), [{"api_key": "sk-of-this-test"}])


def log_of(recorder: Recorder) -> str:
    return (recorder.folder.path / "log.txt").read_text()


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
