"""What the checks of a step and of a pipeline find in what was seen of it, told here without a run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from nemotron_steps.errors import StepFailedError
from nemotron_steps.testing import step_manifest, step_runs, watching
from nemotron_steps.testing.step_subject import Ran
from nemotron_steps.testing.suite import Examination, NotApplicable, Suite, Unmet
from tests.testing.config_models import Changing, Open, Strict

NOTHING: dict[str, Any] = {"written": [], "children": [], "threads": [], "changed": [], "hosts": []}


def a_step(left: Mapping[str, list[str]] | None = None, **seen: Any) -> Any:
    """A step whose first run was seen to do this, and left these files in its folders."""
    return SimpleNamespace(
        fed={"rows": Path("/inputs/rows")},
        first=SimpleNamespace(seen={**NOTHING, **seen}),
        leftovers=lambda name, folder: (left or {}).get(folder, []),
    )


@pytest.mark.parametrize(
    ("left", "written", "found"),
    [
        ({"cwd": ["a.txt"]}, [], "a.txt in the working directory"),
        ({"user": [".toy/b"]}, [], ".toy/b in HOME"),
        ({}, ["/etc/toy"], "/etc/toy"),
    ],
)
def test_a_file_is_found_wherever_a_step_leaves_it(left: dict[str, list[str]], written: list[str], found: str) -> None:
    # What it writes to its inputs is for another check, and its temporary files are too.
    step_runs.writes_only_where_it_may(a_step({"tmp": ["c"]}, written=["/inputs/rows/train.jsonl"]))
    with pytest.raises(Unmet, match=found):
        step_runs.writes_only_where_it_may(a_step(left, written=written))


@pytest.mark.parametrize("what", ["children", "threads"])
def test_whatever_a_step_leaves_running_is_found(what: str) -> None:
    step_runs.leaves_nothing_running(a_step())
    with pytest.raises(Unmet, match="the last one"):
        step_runs.leaves_nothing_running(a_step(None, **{what: ["the last one"]}))


def test_a_step_is_fed_each_kind_of_broken_input(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    rows = '{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n'
    (given / "train.jsonl").write_text(rows)
    cases = list(step_runs._cases(SimpleNamespace(fed={"rows": given}, folder=tmp_path)))  # type: ignore[arg-type]
    assert [(case.check, case.must_fail) for case in cases] == [
        ("a_missing_input_is_told", True),
        ("a_wrong_type_is_told", True),
        ("a_truncated_file_is_told", False),
        *[("a_broken_row_is_told", False)] * 2,
    ]
    missing, pictures, cut, *broken = (case.path for case in cases)
    assert [path.name for path in missing.iterdir()] == ["kit.unknown"]
    assert (pictures / "train.jsonl").read_bytes().startswith(b"\x89PNG")
    assert rows.startswith(text := (cut / "train.jsonl").read_text()) and 0 < len(text) < len(rows)
    lines = [[json.loads(line) for line in (path / "train.jsonl").read_text().splitlines()] for path in broken]
    first, last = {"a": 1, "b": "x"}, {"a": 2, "b": "y"}
    assert lines == [[first, {}, last], [first, {"a": None, "b": None}, last]]
    assert (given / "train.jsonl").read_text() == rows


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ({"code": "E300", "what": "the row has no text"}, None),
        ({"code": None, "what": "KeyError: 'text'"}, "without a code"),
        ({"code": StepFailedError.code, "what": "step 'toy' failed: KeyError: 'text'"}, "without a code"),
        (None, "says nothing"),
    ],
)
def test_what_a_step_says_of_a_broken_input_has_a_code(
    error: dict[str, Any] | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = json.dumps({"error": error and {"where": None, **error}})
    case = step_runs.Case("a_wrong_type_is_told", "rows", Path(), "pictures", must_fail=True)
    tells = step_runs.SUITE.checks["a_wrong_type_is_told"].run
    step: Any = SimpleNamespace(fed={"rows": Path()})
    monkeypatch.setattr(step_runs, "_fed_broken", lambda step: ([case], Ran(Path(), [{"out": out}], {}, 0)))
    if found is None:
        tells(step)
    else:
        with pytest.raises(Unmet, match=found):
            tells(step)
    monkeypatch.setattr(step_runs, "_fed_broken", lambda step: ([case], Ran(Path(), [], {}, 0)))
    with pytest.raises(Unmet, match="died"):
        tells(step)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> watching.Watch:
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)  # one that is added stays for good
    made = watching.Watch((str(tmp_path / "home"),), str(tmp_path / "home/work"), "toykit")
    made._active = True
    return made


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("open", ("OUT", "w", os.O_WRONLY | os.O_CREAT)),
        ("os.mkdir", ("OUT", 0o777, -1)),
        ("os.rename", ("IN", "OUT", -1, -1)),
        ("os.rename", ("OUT", "IN", -1, -1)),
        ("os.remove", ("OUT", -1)),
        ("os.symlink", ("anything", "OUT", -1)),
        ("os.link", ("IN", "OUT", -1, -1)),
        ("os.truncate", ("OUT", 0)),
        ("os.chmod", ("OUT", 0o600, -1)),
    ],
)
def test_every_way_to_change_a_file_elsewhere_is_seen(
    watch: watching.Watch, tmp_path: Path, event: str, arguments: tuple[Any, ...]
) -> None:
    # Beside the folder that is allowed, with a name that begins like its.
    places = {"OUT": str(tmp_path / "home-of-another"), "IN": str(tmp_path / "home/work/a")}
    watch._hook(event, tuple(places.get(each, each) for each in arguments))
    assert watch.seen.written == [places["OUT"]]


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


def test_each_part_of_the_process_that_changes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed() -> list[str]:
        after = watching.process_state()
        return [name for name, value in before.items() if after[name] != value]

    before = watching.process_state()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/x")
    assert changed() == []
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert changed() == ["the working directory"]
    with monkeypatch.context() as patch:
        patch.setenv("KIT_TOY", "1")
        assert changed() == ["the environment"]
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert changed() == ["a signal's handler"]
    signal.signal(signal.SIGTERM, handler)
    umask = os.umask(0o123)
    assert changed() == ["the umask"]
    os.umask(umask)
    assert changed() == []


class WithOpenParts(Strict):
    parts: dict[str, list[Open]] = {}  # noqa: RUF012, pydantic copies it


@pytest.mark.parametrize(("model", "found"), [(Open, "Open"), (Changing, "Changing"), (WithOpenParts, "Open")])
def test_a_model_that_is_open_or_changes_is_found_however_deep(model: type[BaseModel], found: str) -> None:
    step_manifest.config_model_is_strict(SimpleNamespace(schema=Strict))  # type: ignore[arg-type]
    with pytest.raises(Unmet, match=f":{found} lets unknown keys"):
        step_manifest.config_model_is_strict(SimpleNamespace(schema=model))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import sys\nsys.stderr.write('hello')", "prints"),
        ("print('hello')", "prints"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads"),
        ("raise ImportError('no')", "fails"),
    ],
)
def test_whatever_an_import_does_is_found(
    code: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toykit_imported.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unmet, match=found):
        step_manifest.check_import(["toykit_imported"])


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


def test_pytest_shows_an_unexpected_exception_as_it_was_raised(tmp_path: Path) -> None:
    def shown(ended: str, name: str) -> None:
        tests: Any = suite_of(ended).test_class("a toy", lambda folder: None)
        getattr(tests(), f"test_{name}")(Examination(suite_of(ended), None))

    shown("well", "first")
    with pytest.raises(KeyError, match="of the subject's own code"):
        shown("error", "first")
    with pytest.raises(pytest.fail.Exception, match="found"):
        shown("unmet", "first")
    with pytest.raises(pytest.skip.Exception, match="first comes first"):
        shown("unmet", "second")
