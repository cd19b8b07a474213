"""What run folders are called, how one is found, and what state its run is really in."""

import json
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.backend import FsspecBackend
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import UnknownNameError
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.run_folder import (
    RunFolder,
    called,
    get_run,
    list_runs,
    parse_lines,
    run_file,
)


def recorded(store: ArtifactStore, name: str, **fields: Any) -> RunFolder:
    folder = RunFolder(store, name)
    folder.update(folder.create("toy", {}), **{"status": "done", **fields})
    return folder


def test_runs_are_listed_from_the_oldest_on_and_by_their_ids_where_they_are_as_old(store: ArtifactStore) -> None:
    for name in "gfedcba":
        recorded(store, name, created=2.0)
    for name, created in (("y", 1.0), ("z", 3.0)):
        recorded(store, name, created=created)
    assert [info.id for info in list_runs(store)] == [*"yabcdefgz"]
    assert get_run(store, "latest").id == "z"


def test_a_run_that_cannot_be_read_hides_no_other(store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abcdef":
        recorded(store, name)
    for name in "bdf":
        (RunFolder(store, name).path / "run.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert [info.id for info in list_runs(store)] == ["a", "c", "e"]
    assert caplog.text.count("cannot be read") == 3


@pytest.mark.parametrize("name", ["run.json", "job.json"])
def test_a_file_that_is_removed_while_it_is_looked_for_was_never_there(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = recorded(store, "a")
    (folder.path / name).unlink(missing_ok=True)
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name == name or is_file(path))
    assert name == "run.json" or get_run(store, "a").job == ""
    assert (folder.load() is None) == (name == "run.json")


def test_a_run_is_found_by_a_part_that_it_has_alone(store: ArtifactStore) -> None:
    for name in ("0101-rlhf-aa", "0102-rlhf-bb", "0103-sft-cc", "0104-rlhf-dd", "0105-rlhf-ee"):
        recorded(store, name)
    assert get_run(store, "sft").id == "0103-sft-cc"
    with pytest.raises(UnknownNameError, match="'rlhf' is part of 4 run ids") as caught:
        get_run(store, "rlhf")
    assert caught.value.expected == "0102-rlhf-bb or 0104-rlhf-dd or 0105-rlhf-ee"
    assert caught.value.hints[0] == "did you mean '0102-rlhf-bb' or '0104-rlhf-dd' or '0105-rlhf-ee'?"
    with pytest.raises(UnknownNameError, match="no run is called 'nothing-like-it'") as caught:
        get_run(store, "nothing-like-it")
    assert caught.value.hints == ("steps runs",)


def test_a_name_is_the_newest_run_of_that_name_where_no_id_begins_so(store: ArtifactStore) -> None:
    ids = ("20260101-000000-rlhf-aa", "20260102-000000-sft-bb", "20260103-000000-sft-cc", "30-x")
    for run, name in zip(ids, ("sft", "sft", "2", "aa"), strict=True):
        recorded(store, run, request={"targets": ["x"], "name": name})
    found = {asked: get_run(store, asked).id for asked in ("sft", "3", "aa", "rlhf")}
    assert found == {"sft": ids[1], "3": ids[3], "aa": ids[3], "rlhf": ids[0]}
    with pytest.raises(UnknownNameError, match="no run is called 'sfft'") as caught:
        get_run(store, "sfft")
    assert caught.value.hints[0] == "did you mean 'sft'?"
    every = list_runs(store)
    assert [called(info, every) for info in every] == ["sft (rlhf-aa)", "sft", "2", "aa"]
    assert called(replace(every[1], request={}), every) == "sft-bb"


def test_a_run_whose_process_cannot_be_seen_from_here_is_not_taken_for_dead(store: ArtifactStore) -> None:
    there = recorded(store, "there", status="running", host="elsewhere")
    here = recorded(store, "here", status="running", host=socket.gethostname())
    assert [get_run(store, folder.id).status for folder in (there, here)] == ["running", "killed"]
    with hold(here.lock, {}, lambda holder: None):
        assert get_run(store, "here").status == "running"


def test_a_submitted_run_is_dead_where_no_job_nobody_who_submits_and_no_process_is_left(store: ArtifactStore) -> None:
    folder = recorded(store, "r1", status="submitted")
    assert get_run(store, "r1").status == "killed"
    for lock in (folder.lock, folder.submit_lock):
        with hold(lock, {}, lambda holder: None):
            assert get_run(store, "r1").status == "submitted"
    (folder.path / "job.json").write_text(json.dumps({"executor": "slurm", "job": "7"}))
    info = get_run(store, "r1")
    assert (info.status, info.executor, info.job) == ("submitted", "slurm", "7")
    (folder.path / "job.json").unlink()
    assert get_run(store, "r1").status == "killed"


def test_a_run_that_is_here_and_not_yet_on_the_object_store_is_listed(tmp_path: Path) -> None:
    url = f"memory://runs-{tmp_path.name}"
    here, there = (ArtifactStore(FsspecBackend(url, tmp_path / name)) for name in ("here", "there"))
    recorded(here, "published").publish()
    recorded(here, "not-yet")
    (here.backend.local("runs") / "no-run").mkdir()
    assert [info.id for info in list_runs(here)] == ["published", "not-yet"]
    assert [info.id for info in list_runs(there)] == ["published"]
    assert run_file(there, "published", "run.json").read_bytes() == run_file(here, "published", "run.json").read_bytes()
    with pytest.raises(UnknownNameError, match="has no report"):
        run_file(there, "published", "report.html")


def test_lines_that_are_no_records_are_left_out() -> None:
    assert parse_lines([b'{"a": 1}', b"[1]", b"5", b"", b'{"b": ', b"[" * 100_000, b'{"c": 2}']) == [{"a": 1}, {"c": 2}]
