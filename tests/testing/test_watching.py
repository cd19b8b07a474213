"""What a watched function is seen to do, what a step is fed, and which checks are skipped behind one that failed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.testing import watching
from nemotron_steps.testing.step_subject import StepSubject
from nemotron_steps.testing.suite import Examination, NotApplicable, Suite, Unmet

WATCHED = """
import json, sys
from contextlib import ExitStack
from pathlib import Path
from nemotron_steps.sandbox.probe import _canary_file
from nemotron_steps.testing.watching import Watch

watch = Watch((), "work", "package")
with watch.watching(), ExitStack() as stack:
    exec(sys.argv[1])
print(json.dumps(watch.seen.written))
"""


@pytest.mark.parametrize(
    ("code", "written"), [("Path('mine').touch()", ["mine"]), ("_canary_file(stack, Path.cwd())", [])]
)
def test_a_sandbox_may_look_whether_the_folders_of_its_user_are_hidden(
    code: str, written: list[str], tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED, code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(ran.stdout) == [str(tmp_path / name) for name in written]
    assert [file.name for file in tmp_path.iterdir()] == written


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> watching.Watch:
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)  # one that is added stays for good
    made = watching.Watch((str(tmp_path / "home"),), str(tmp_path / "home/work"), "toykit")
    made._active = True
    return made


def test_a_file_written_elsewhere_is_seen(watch: watching.Watch, tmp_path: Path) -> None:
    beside = str(tmp_path / "home-of-another")  # with a name that begins like the folder's that is allowed
    watch._hook("open", (beside, "w", os.O_WRONLY | os.O_CREAT))
    assert watch.seen.written == [beside]


def test_reading_and_what_is_inside_are_no_writes_elsewhere(watch: watching.Watch, tmp_path: Path) -> None:
    watch._hook("open", (str(tmp_path / "elsewhere"), "r", os.O_RDONLY))
    watch._hook("open", (str(tmp_path / "home/work/a"), "w", os.O_WRONLY | os.O_CREAT))
    watch._hook("open", (str(tmp_path / "home/b"), "w", os.O_WRONLY | os.O_CREAT))
    watch._hook("open", ("/dev/null", "w", os.O_WRONLY))
    assert (watch.seen.written, watch.seen.writes_inside) == ([], 1)


def test_only_other_machines_are_told_as_asked(watch: watching.Watch) -> None:
    for address in (("127.0.0.1", 1), ("::1", 2, 0, 0), ("localhost", 3), "/run/socket", ("192.0.2.1", 9)):
        watch._hook("socket.connect", (None, address))
    assert watch.seen.hosts == ["192.0.2.1:9"]


def test_a_step_is_fed_what_was_given_and_samples_where_it_needs_them(tmp_path: Path, monkeypatch: Any) -> None:
    def port(name: str, kind: str, *, required: bool = True) -> Any:
        return SimpleNamespace(name=name, type=kind, required=required)

    made = StepSubject("toy/step", tmp_path, inputs={"mine": tmp_path / "mine", "made": lambda folder: folder / "here"})
    made.__dict__["manifest"] = SimpleNamespace()
    made.manifest.consumes = [
        port("mine", "unknown"), port("made", "unknown", required=False), port("rows", "training_jsonl"),
        port("more", "training_jsonl", required=False), port("wired", "unknown"),
    ]  # fmt: skip
    monkeypatch.setattr(StepSubject, "compose", lambda self: SimpleNamespace(inputs={"wired": "another"}))
    assert made.fed == {
        "mine": tmp_path / "mine",
        "made": tmp_path / "inputs/made/here",
        "rows": tmp_path / "inputs/rows",
    }
    assert (tmp_path / "inputs/made").is_dir() and (tmp_path / "inputs/rows/train.jsonl").is_file()


def suite_of(*ended: str) -> Suite[None]:
    """A check that ends like this, one behind it, and one behind that."""
    suite: Suite[None] = Suite()

    @suite.check()
    def first(subject: None) -> None:
        if "n/a" in ended:
            raise NotApplicable("nothing to look at")
        if "unmet" in ended:
            raise Unmet("found")
        if "error" in ended:
            raise KeyError("of the subject's own code")

    @suite.check("first")
    def second(subject: None) -> None:
        """Passes."""

    @suite.check("second")
    def third(subject: None) -> None:
        """Passes."""

    return suite


@pytest.mark.parametrize(
    ("ended", "states", "why"),
    [
        ("well", ("passed", "passed", "passed"), ""),
        ("n/a", ("skipped", "skipped", "skipped"), "nothing to look at"),
        ("unmet", ("failed", "skipped", "skipped"), "first comes first, and fails"),
        ("error", ("failed", "skipped", "skipped"), "first comes first, and fails"),
    ],
)
def test_a_check_is_skipped_behind_one_that_did_not_pass(ended: str, states: tuple[str, ...], why: str) -> None:
    outcomes = Examination(suite_of(ended), None).outcomes()
    assert tuple(outcome.state.value for outcome in outcomes.values()) == states
    assert outcomes["third"].text == why
