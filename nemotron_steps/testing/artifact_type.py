"""Checks of an artifact type in use: its validator in a user's process, its artifacts in a home and in commands."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import sha256_file
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet
from nemotron_steps.testing.type_declared import DECLARED_SUITE
from nemotron_steps.testing.type_refusals import REFUSAL_SUITE
from nemotron_steps.testing.type_subject import TypeSubject, contents_of, files_of
from nemotron_steps.testing.watching import process_state, stdout_seen

__all__ = ["SUITE", "TypeSubject"]

_LARGE = 2**20
"""Bytes of a file that is validated to see what memory that takes."""

_SENDING = ("connect", "connect_ex", "sendto")

SUITE: Suite[TypeSubject] = Suite(DECLARED_SUITE, REFUSAL_SUITE)


@SUITE.check("its_example_is_accepted")
def validating_changes_nothing(subject: TypeSubject) -> None:
    """The validator leaves the folder as it is."""
    folder = subject.written("unchanged")
    before = tree_of(folder)
    subject.validated(folder)
    if tree_of(folder) != before:
        raise Unmet("the validator changes the folder")


@SUITE.check("its_example_is_accepted")
def validating_prints_nothing(subject: TypeSubject) -> None:
    """Nothing goes to stdout, which belongs to `--json`."""
    folder = subject.written("printing")
    with stdout_seen() as printed:
        subject.validated(folder)
    if any(printed):
        raise Unmet("the validator prints to stdout", found=repr(printed[0][:200]), hint="logging")


@SUITE.check("its_example_is_accepted")
def validating_leaves_the_process_as_it_was(subject: TypeSubject) -> None:
    """Working directory, environment and signal handlers are as before: it runs in everybody's process."""
    before = process_state()
    subject.validated(subject.written("process"))
    changed = [name for name, value in process_state().items() if value != before[name]]
    if changed:
        raise Unmet(f"the validator changes {', '.join(changed)} of the process")


@SUITE.check("its_example_is_accepted")
def validating_asks_no_other_machine(subject: TypeSubject) -> None:
    """An artifact is judged by its files: on a cluster's nodes there may be nobody to ask."""
    folder = subject.written("alone")
    with _no_network() as asked, suppress(Exception):  # that it is accepted was checked before
        subject.validated(folder)
    if asked:
        raise Unmet("the validator asks another machine", found=asked[0], hint="local_files_only=True, or no request")


@SUITE.check("its_example_is_accepted")
def folders_have_any_name(subject: TypeSubject) -> None:
    """Brackets, spaces, quotes, `%` and letters beyond ASCII in the path change nothing."""
    _same(subject, subject.written("any [1]* 'a' %s \u00e9\u6f22"), "in a folder with an awkward name")


@SUITE.check("its_example_is_accepted")
def a_relative_path_will_do(subject: TypeSubject) -> None:
    """A path from the working directory is as good as one from the root."""
    folder = subject.written("relative")
    with chdir(folder.parent):
        _same(subject, Path(folder.name), "given a relative path")


@SUITE.check("its_example_is_accepted")
def other_files_are_let_be(subject: TypeSubject) -> None:
    """A README, a file of git's and the store's own record beside its files change nothing."""
    folder = subject.written("others")
    for name in ("README.md", ".gitattributes", "artifact.json"):
        if not (folder / name).exists():
            (folder / name).write_text("{}")
    _same(subject, folder, "with a README.md, .gitattributes and artifact.json beside its files")


@SUITE.check("its_example_is_accepted")
def attributes_know_no_order(subject: TypeSubject) -> None:
    """Files written in another order, long ago, have the same attributes."""
    _same(subject, _copied(subject.written("order"), subject.folder / "order-again"), "copied in another order")


@SUITE.check("its_example_is_accepted")
def large_files_are_read_in_pieces(subject: TypeSubject) -> None:
    """Validating JSON Lines takes less memory than the file: rows are read one by one."""
    folder = subject.written("large")
    rows = [file for file in files_of(folder) if file.suffix == ".jsonl"]
    if not rows:
        raise NotApplicable("its example has no JSON Lines, which can be made longer")
    for file in rows:
        data = file.read_bytes()
        file.write_bytes(data * (_LARGE // len(data) + 1))
    tracemalloc.start()
    try:
        subject.validated(folder)
        peak = tracemalloc.get_traced_memory()[1]
    except StepsError as error:
        raise NotApplicable(f"its rows cannot be repeated: {error.what}") from error
    finally:
        tracemalloc.stop()
    if peak > _LARGE * 2 // 3:
        raise Unmet(
            f"validating {_LARGE / 2**20:.0f} MiB takes {peak / 2**20:.1f} MiB of memory",
            hint="for line in file: …, not read_text() nor a list of all rows",
        )


@SUITE.check("its_example_is_accepted")
def digests_are_stable(subject: TypeSubject) -> None:
    """Two copies, written in another order at another time, are one artifact in two homes."""
    first, second = subject.written("digest-1"), subject.folder / "digest-2"
    second.mkdir()
    for file in sorted(files_of(first), reverse=True):
        target = second / file.relative_to(first)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    if contents_of(subject.written("digest-3")) != contents_of(first):
        raise Unmet("the example is not the same twice", hint="write no times, no paths and nothing random")
    digests = {_committed(subject, folder, f"home-{index}") for index, folder in enumerate((first, second))}
    if len(digests) > 1:
        raise Unmet("two copies have two digests")


@SUITE.check("its_example_is_accepted")
def it_is_stored_and_verified(subject: TypeSubject) -> None:
    """Committed and opened again it is whole, with all of its attributes."""
    store = ArtifactStore(subject.folder / "home-whole")
    name = f"kit/{subject.name}"
    artifact = store.commit(subject.written("whole"), subject.name, name=name, supertypes=subject.ancestors)
    if store.verify(artifact):
        raise Unmet("an artifact is corrupt as it was committed", found=store.verify(artifact)[0].what)
    if store.open(artifact.ref).type != subject.name:
        raise Unmet("an artifact comes back as another type")
    missing = [key for key in subject.validated(artifact.path) if key not in store.find(artifact.ref).attributes]
    if missing:
        raise Unmet(f"the attributes {', '.join(missing)} are lost")


@SUITE.check("it_is_stored_and_verified")
def damage_is_found(subject: TypeSubject) -> None:
    """A file of a committed artifact that is changed, removed or added is found by `steps artifacts verify`."""
    for kind in ("changed", "removed", "added"):
        store = ArtifactStore(subject.folder / f"home-{kind}")
        artifact = store.commit(subject.written(kind), subject.name, name="kit", supertypes=subject.ancestors)
        file = max(files_of(artifact.path), key=lambda path: (path.name != "artifact.json", path.stat().st_size))
        if kind == "removed":
            file.unlink()
        else:
            file = file if kind == "changed" else file.with_name("kit.added")
            data = bytearray(file.read_bytes() if kind == "changed" else b"new")
            data[len(data) // 2] ^= 1
            file.unlink(missing_ok=True)
            file.write_bytes(data)
        if not store.verify(artifact):
            raise Unmet(f"a file that was {kind} is not found")


@SUITE.check("its_example_is_accepted")
def links_out_of_it_are_refused(subject: TypeSubject) -> None:
    """A link to a file elsewhere is not committed: that file would change, or come from where it should not."""
    folder = subject.written("linked")
    elsewhere = subject.folder / "elsewhere"
    elsewhere.mkdir()
    for file in list(files_of(folder)):
        target = elsewhere / file.name
        shutil.move(file, target)
        file.symlink_to(target)
    try:
        _committed(subject, folder, "home-linked")
    except (ArtifactError, DataError):
        return
    raise Unmet("a link out of the folder is committed")


@SUITE.check("it_is_stored_and_verified")
def commands_show_it(subject: TypeSubject) -> None:
    """`steps types`, `steps artifacts add`, `show` and `verify` work, and show its attributes."""
    if not subject.declared.description.isprintable():
        raise Unmet("the description is more than a line of text", where=subject.declared.where)
    home = ["--home", str(subject.folder / "home-shown")]
    if subject.name not in json.loads(_said("types", "--json")):
        raise Unmet("`steps types` does not show it")
    folder = subject.written("shown")
    _said("artifacts", "add", str(folder), "--type", subject.name, "--name", "kit", *home)
    shown = _said("artifacts", "show", "kit", *home)
    missing = [key for key in subject.accepted if key not in shown]
    if missing:
        raise Unmet(f"`steps artifacts show` does not show {', '.join(missing)}")
    _said("artifacts", "verify", "kit", *home)


def _same(subject: TypeSubject, folder: Path, kind: str) -> None:
    try:
        found = subject.validated(folder)
    except Exception as error:
        raise Unmet(f"{kind}, the example is refused: {type(error).__name__}: {error}") from error
    if found != subject.accepted:
        raise Unmet(f"{kind}, the example has other attributes", found=f"{found}, not {subject.accepted}")


def _copied(source: Path, target: Path) -> Path:
    """A copy whose files are written in the other order, and are old."""
    target.mkdir()
    for file in sorted(files_of(source), reverse=True):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
        os.utime(copy, (1_000_000_000, 1_000_000_000))
    return target


def _said(*words: str) -> str:
    """What a command of `steps` prints. Unmet if it fails."""
    from nemotron_steps.cli.main import steps

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = steps(words)
    if code:
        raise Unmet(f"`steps {' '.join(words[:2])}` fails", found=(err.getvalue() or out.getvalue())[:400])
    return out.getvalue()


@contextmanager
def _no_network() -> Iterator[list[str]]:
    """No machine but this one can be asked meanwhile. Fills a list with those that were."""
    asked: list[str] = []

    def refuse(self: socket.socket, *arguments: Any) -> None:
        asked.append(str(arguments[-1]))
        raise OSError("no machine can be asked here")

    for name in _SENDING:
        setattr(socket.socket, name, refuse)
    try:
        yield asked
    finally:
        for name in _SENDING:  # what the class inherits is seen again
            delattr(socket.socket, name)


def _committed(subject: TypeSubject, folder: Path, home: str) -> str:
    store = ArtifactStore(subject.folder / home)
    return store.commit(folder, subject.name, name="kit", supertypes=subject.ancestors).digest


def tree_of(folder: Path) -> dict[str, Any]:
    return {str(path): (path.stat().st_mtime_ns, path.is_file() and sha256_file(path)) for path in folder.rglob("*")}
