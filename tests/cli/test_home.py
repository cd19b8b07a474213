"""What a home holds, and what is freed of it: never what a run, a resume or another artifact needs."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli.main import steps
from nemotron_steps.runs.home import free, to_free
from nemotron_steps.runs.locks import hold
from tests.cli.conftest import Cli

TRAIN = ("run", "toy/train", "-c", "tiny")


@pytest.fixture
def home(cli: Cli, workplace: Path) -> Path:
    """A home with two models, what only a resume needs, and what nothing needs."""
    assert cli(*TRAIN).code == 0
    assert cli(*TRAIN, "steps=4", "end=interrupt_once", "--name", "stopped").code == 130
    assert cli(*TRAIN, "steps=5", "end=interrupt_once", "--name", "changed").code == 130
    assert cli(*TRAIN, "--resume", "changed", "steps=6").code == 0
    home = workplace / "home"
    (workplace / "rows.jsonl").write_text('{"number": 7}\n')
    assert cli("artifacts", "add", "rows.jsonl", "--type", "toy_rows", "--name", "extra").code == 0
    shutil.rmtree(home / "artifacts/names/extra")
    (home / "artifacts/staging/killed").mkdir(parents=True)
    (home / "runs/.r1.0123.corrupt").mkdir()
    exported = workplace / ".trained.export-abcdefgh"
    (exported / "tree").mkdir(parents=True)
    for path in (exported, exported / "tree"):
        os.utime(path, (0, 0))
    (workplace / ".mine.export-abcdefgh" / "tree").mkdir(parents=True)  # perhaps somebody's at work
    (workplace / ".notes.export-abcdefgh").write_text("the user's own")
    os.utime(workplace / ".notes.export-abcdefgh", (0, 0))
    return home


def kinds(cli: Cli) -> dict[str, int]:
    return {title: kind["count"] for title, kind in cli("home", "--json").json["kinds"].items() if kind["count"]}


def test_what_nothing_needs_is_freed_and_the_rest_goes_on(cli: Cli, home: Path) -> None:
    held = {"artifacts": 3, "runs": 3, "work folders": 2, "left by killed commands": 3, "without a name": 1}
    assert kinds(cli) == held and "steps gc" in cli("home").out
    unasked = cli("gc")
    assert unasked.code == 2 and "--dry-run" in unasked.err
    assert len(cli("gc", "--dry-run", "--json").json["freed"]) == 5 and kinds(cli) == held
    assert cli("gc", "--yes").code == 0
    assert kinds(cli) == {"artifacts": 3, "runs": 3, "work folders": 1} and cli("artifacts", "verify").code == 0
    assert cli("gc", "--yes", "--runs", "0").code == 0 and [r["run_name"] for r in cli("runs", "--json").json] == [
        "stopped"
    ]
    assert "continues from its work folder" in cli("run", "--resume", "stopped").out


def test_an_artifact_goes_with_all_that_was_made_from_it(cli: Cli, home: Path) -> None:
    refused = cli("gc", "--artifact", "toy/make/rows", "--yes")
    assert refused.code == 2 and "newer artifacts were made from it" in refused.err
    whole = ("gc", "--yes", "--artifact", "toy/make/rows:v1", *("--artifact", "toy/train/model:v1"))
    whole = (*whole, "--artifact", "toy/train/model:v2")
    unfinished = cli(*whole)
    assert unfinished.code == 2 and "is not over, and may need it" in unfinished.err
    assert cli("run", "--resume", "stopped").code == 0
    assert cli(*whole, "--artifact", "toy/train/model:v3").code == 0
    assert "artifacts" not in kinds(cli) and not list((home / "artifacts/objects").iterdir())
    assert cli(*TRAIN).code == 0 and cli("artifacts", "verify").code == 0  # made anew, under the numbers there were


def test_what_others_are_at_stays(cli: Cli, home: Path) -> None:
    store = ArtifactStore(home)
    wanted = to_free(store, days=0)
    locks = [home / "work" / f"{h.name}.lock" if h.kind == "work folder" else h.path / "lock" for h in wanted]
    for held, lock in zip(wanted, locks, strict=True):
        if held.kind in ("run", "work folder"):
            with hold(lock, {}, lambda holder: None):
                assert held not in free(store, [held]) and held.path.is_dir()
    with store.staging() as staged:
        assert staged not in [held.path for held in to_free(store)]


def test_a_kill_at_any_moment_leaves_a_home_that_is_whole(cli: Cli, home: Path) -> None:
    assert cli("run", "--resume", "stopped").code == 0
    command = ["gc", "--yes", "--runs", "0"]
    command += [each for n in (1, 2, 3) for each in ("--artifact", f"toy/train/model:v{n}")]
    whole, moment, code = home.with_name("whole"), 0, 1
    shutil.copytree(home, whole)
    while code:
        shutil.rmtree(home)
        shutil.copytree(whole, home)
        moment += 1
        if (child := os.fork()) == 0:
            left = iter(range(moment - 1, -1, -1))

            def die(event: str, _: object, left: Iterator[int] = left) -> None:
                if event in ("os.rename", "os.remove", "os.rmdir") and next(left) == 0:
                    os._exit(9)

            sys.addaudithook(die)
            os._exit(steps(command))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9) and cli("artifacts", "verify").code == 0
        assert not cli("runs").err and cli("gc", "--yes").code == 0
        assert "left by killed commands" not in kinds(cli) and "without a name" not in kinds(cli)
    assert moment > 10
