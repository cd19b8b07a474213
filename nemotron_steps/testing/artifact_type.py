"""Checks of an artifact type: its declaration, its validator, and the digests of its folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import sha256_file
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.artifacts.validators import declare, validate
from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.manifest.packs import find_packs
from nemotron_steps.manifest.registry import Registry, load_registry
from nemotron_steps.manifest.typegraph import ArtifactType
from nemotron_steps.testing.samples import write_sample
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

_OTHERS = ("training_jsonl", "rl_prompts", "eval_report")


@dataclass
class TypeSubject:
    """What the checks of a type ask.

    Args:
        name: of the type.
        folder: for copies of the example.
        example: writes a valid artifact into an empty folder.
    """

    name: str
    folder: Path
    example: Callable[[Path], object]

    @cached_property
    def registry(self) -> Registry:
        """Every manifest that is found here."""
        registry = load_registry(find_packs())
        declare(registry.types.validators)
        return registry

    @cached_property
    def declared(self) -> ArtifactType:
        """The type. UnknownNameError if there is none."""
        return self.registry.type(self.name)

    @property
    def ancestors(self) -> tuple[str, ...]:
        """What it can be used as, nearest first."""
        return self.registry.types.ancestors(self.name)[1:]

    def written(self, name: str) -> Path:
        """A fresh example."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.example(folder)
        return folder

    def validated(self, folder: Path) -> dict[str, Any]:
        """What the validator says: the declared function itself, or the nearest parent's."""
        for name in (self.name, *self.ancestors):
            reference = self.registry.types.types[name].validator
            if reference is not None:
                module, _, function = reference.partition(":")
                found: dict[str, Any] = getattr(import_module(module), function)(folder)
                return found
        return validate(self.name, folder, self.ancestors)


SUITE: Suite[TypeSubject] = Suite()


@SUITE.check()
def is_declared(subject: TypeSubject) -> None:
    """A types.toml declares it, without a mistake."""
    try:
        file = subject.declared.where.rpartition(":")[0]
    except StepsError as error:
        raise Unmet(error.what, hint=f"[{subject.name}] in a types.toml of the pack") from error
    for problem in (*subject.registry.problems, *subject.registry.warnings):
        if (problem.where or "").startswith(f"{file}:"):
            raise Unmet(problem.what, where=problem.where, hint="; ".join(problem.hints) or None)


@SUITE.check("is_declared")
def is_described(subject: TypeSubject) -> None:
    """It and its attributes say what they are."""
    if not subject.declared.description:
        raise Unmet("the type has no description", where=subject.declared.where)
    for name, text in subject.declared.attributes.items():
        if not text:
            raise Unmet(f"the attribute '{name}' is not described", where=subject.declared.where)


@SUITE.check("is_declared")
def has_a_validator(subject: TypeSubject) -> None:
    """It, or what it is, has a function that looks at a folder."""
    from nemotron_steps.artifacts.validators import has_validator

    names = (subject.name, *subject.ancestors)
    if not any(has_validator(name) or name in subject.registry.types.validators for name in names):
        raise Unmet(
            "nothing looks at artifacts of the type",
            where=subject.declared.where,
            hint='validator = "PACKAGE:validate"',
        )
    reference = subject.declared.validator
    if reference is not None:
        module, _, name = reference.partition(":")
        try:
            getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise Unmet(f"'{reference}' cannot be imported: {error}", where=subject.declared.where) from error


@SUITE.check("has_a_validator")
def importing_it_is_light(subject: TypeSubject) -> None:
    """The validator's module imports no framework, prints nothing and starts nothing."""
    if subject.declared.validator is None:
        raise NotApplicable("the type's validator is a parent's")
    check_import([subject.declared.validator.partition(":")[0]])


@SUITE.check("has_a_validator")
def its_example_is_accepted(subject: TypeSubject) -> None:
    """The validator accepts the example, and so do those of everything that the type is."""
    folder = subject.written("example")
    if not any(folder.iterdir()):
        raise Unmet("the example writes nothing")
    try:
        subject.validated(folder)
        for parent in subject.ancestors:
            validate(parent, folder, subject.registry.types.ancestors(parent))
    except StepsError as error:
        raise Unmet(f"the example is refused: {error.what}", where=error.where, found=error.found) from error


@SUITE.check("its_example_is_accepted")
def attributes_are_plain(subject: TypeSubject) -> None:
    """What the validator returns is JSON, the same each time, and declared in types.toml."""
    folder = subject.written("attributes")
    first, second = subject.validated(folder), subject.validated(subject.written("attributes-again"))
    try:
        same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise Unmet(f"the attributes are not JSON: {error}", found=first) from error
    if not same:
        raise Unmet("the attributes of two equal folders differ", found=f"{first} and {second}")
    known = {
        key for name in (subject.name, *subject.ancestors) for key in subject.registry.types.types[name].attributes
    }
    unknown = sorted(set(first) - known)
    if unknown and subject.declared.validator is not None:
        raise Unmet(f"the attributes {', '.join(unknown)} are not declared", where=subject.declared.where)


@SUITE.check("its_example_is_accepted")
def validating_changes_nothing(subject: TypeSubject) -> None:
    """The validator leaves the folder as it is."""
    folder = subject.written("unchanged")
    before = _tree(folder)
    subject.validated(folder)
    if _tree(folder) != before:
        raise Unmet("the validator changes the folder")


@SUITE.check("its_example_is_accepted")
def an_empty_folder_is_refused(subject: TypeSubject) -> None:
    """A folder without files."""
    empty = subject.folder / "empty"
    empty.mkdir()
    _refused(subject, empty, "an empty folder")


@SUITE.check("its_example_is_accepted")
def a_missing_file_is_refused(subject: TypeSubject) -> None:
    """A folder with none of its own files, but another one."""
    folder = subject.folder / "stranger"
    folder.mkdir()
    (folder / "kit.unknown").write_text("another file\n")
    _refused(subject, folder, "a folder without its files")


@SUITE.check("its_example_is_accepted")
def empty_files_are_refused(subject: TypeSubject) -> None:
    """Files of no bytes: what a full disk leaves."""
    _refused(subject, _changed(subject, "no-bytes", lambda data: b""), "files of no bytes")


@SUITE.check("its_example_is_accepted")
def truncated_files_are_refused(subject: TypeSubject) -> None:
    """Files that end in the middle."""
    folder = _changed(subject, "cut", lambda data: data[: max(1, len(data) * 2 // 3 - 3)])
    _refused(subject, folder, "truncated files")


@SUITE.check("its_example_is_accepted")
def other_bytes_are_refused(subject: TypeSubject) -> None:
    """Files of its names that are pictures."""
    picture = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\xff\xfe" * 8
    _refused(subject, _changed(subject, "pictures", lambda data: picture), "files that are pictures")


@SUITE.check("its_example_is_accepted")
def other_types_are_refused(subject: TypeSubject) -> None:
    """Artifacts of the built-in types that it is not."""
    for name in _OTHERS:
        if subject.registry.types.is_a(name, subject.name) or name in (subject.name, *subject.ancestors):
            continue
        sample = write_sample(name, subject.folder / f"other-{name}")
        assert sample is not None
        _refused(subject, sample, f"a {name}")


@SUITE.check("its_example_is_accepted")
def digests_are_stable(subject: TypeSubject) -> None:
    """Two copies, written in another order at another time, are one artifact in two homes."""
    first, second = subject.written("digest-1"), subject.folder / "digest-2"
    second.mkdir()
    for file in sorted(_files(first), reverse=True):
        target = second / file.relative_to(first)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    if _contents(subject.written("digest-3")) != _contents(first):
        raise Unmet("the example is not the same twice", hint="write no times, no paths and nothing random")
    digests = {_committed(subject, folder, f"home-{index}") for index, folder in enumerate((first, second))}
    if len(digests) > 1:
        raise Unmet("two copies have two digests")


@SUITE.check("its_example_is_accepted")
def it_is_stored_and_verified(subject: TypeSubject) -> None:
    """Committed and opened again it is whole; with a byte changed it is not."""
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


def _refused(subject: TypeSubject, folder: Path, kind: str) -> None:
    try:
        subject.validated(folder)
    except (ArtifactError, DataError) as error:
        if not error.where:
            raise Unmet(f"{kind}: the error does not say where", found=error.what, hint="where=str(file)") from error
    except Exception as error:
        raise Unmet(
            f"{kind}: the validator raises {type(error).__name__}: {error}",
            hint="raise ArtifactError or DataError(what, where=…, expected=…, found=…)",
        ) from error
    else:
        raise Unmet(f"{kind}: the validator accepts it")


def _changed(subject: TypeSubject, name: str, change: Callable[[bytes], bytes]) -> Path:
    folder = subject.written(name)
    for file in _files(folder):
        file.write_bytes(change(file.read_bytes()))
    return folder


def _committed(subject: TypeSubject, folder: Path, home: str) -> str:
    store = ArtifactStore(subject.folder / home)
    return store.commit(folder, subject.name, name="kit", supertypes=subject.ancestors).digest


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): sha256_file(file) for file in _files(folder)}


def _tree(folder: Path) -> dict[str, Any]:
    return {str(path): (path.stat().st_mtime_ns, path.is_file() and sha256_file(path)) for path in folder.rglob("*")}
