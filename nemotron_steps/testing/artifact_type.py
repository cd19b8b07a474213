"""An artifact type under test, and checks of its declaration, of its validator and of what the store keeps of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.artifacts.validators import declare, has_validator, validate
from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.manifest.packs import find_packs
from nemotron_steps.manifest.registry import Registry, load_registry
from nemotron_steps.manifest.typegraph import ArtifactType
from nemotron_steps.testing.samples import PICTURE, cut, write_sample
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.step_subject import files_of, tree_of
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet, told
from nemotron_steps.testing.watching import stdout_seen

_OTHERS = ("training_jsonl", "rl_prompts", "eval_report")


@dataclass
class TypeSubject:
    """What the checks of a type ask. Its arguments are those of `type_conformance`; `folder` is for examples."""

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
        """A fresh example, in a folder of that name."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.example(folder)
        return folder

    def changed(self, name: str, change: Callable[[bytes], bytes]) -> Path:
        """An example whose files hold something else."""
        folder = self.written(name)
        for file in files_of(folder):
            file.write_bytes(change(file.read_bytes()))
        return folder

    def validated(self, folder: Path) -> dict[str, Any]:
        """What the validator says: the declared function itself, or the nearest parent's."""
        declared = (self.registry.types.types[name].validator for name in (self.name, *self.ancestors))
        reference = next((each for each in declared if each is not None), None)
        if reference is None:
            return validate(self.name, folder, self.ancestors)
        module, _, function = reference.partition(":")
        found: dict[str, Any] = getattr(import_module(module), function)(folder)
        return found


SUITE: Suite[TypeSubject] = Suite()


@SUITE.check()
def is_declared(subject: TypeSubject) -> None:
    """A types.toml declares it without a mistake, described in a line, and its attributes too."""
    try:
        where = subject.declared.where
    except StepsError as error:
        raise Unmet(error.what, hint=f"[{subject.name}] in a types.toml of the pack") from error
    for problem in (*subject.registry.problems, *subject.registry.warnings):
        if (problem.where or "").startswith(f"{where.rpartition(':')[0]}:"):
            raise told(problem)
    for name, text in {"it": subject.declared.description, **subject.declared.attributes}.items():
        if not text or not text.isprintable():
            raise Unmet(f"the description of {name} is not a line of text", where=where, found=repr(text))


@SUITE.check("is_declared")
def has_a_validator(subject: TypeSubject) -> None:
    """It, or what it is, has a function that looks at a folder."""
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
    """The validator accepts the example, and leaves it and stdout (which belongs to `--json`) as they are."""
    folder = subject.written("example")
    before = tree_of(folder)
    if not before:
        raise Unmet("the example writes nothing")
    try:
        with stdout_seen() as printed:
            subject.validated(folder)
    except StepsError as error:
        raise Unmet(f"the example is refused: {error.what}", where=error.where, found=error.found) from error
    if tree_of(folder) != before:
        raise Unmet("the validator changes the folder")
    if any(printed):
        raise Unmet("the validator prints to stdout", found=repr(printed[0][:200]), hint="logging")


@SUITE.check("its_example_is_accepted")
def attributes_are_plain(subject: TypeSubject) -> None:
    """What the validator returns is JSON without NaN, the same each time, and declared in types.toml."""
    first, second = subject.validated(subject.written("plain")), subject.validated(subject.written("plain-again"))
    try:
        same = json.dumps(first, sort_keys=True, allow_nan=False) == json.dumps(second, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise Unmet(f"the attributes are not JSON: {error}", found=first) from error
    if not same:
        raise Unmet("the attributes of two equal folders differ", found=f"{first} and {second}")
    types = subject.registry.types.types
    known = {key for name in (subject.name, *subject.ancestors) for key in types[name].attributes}
    unknown = sorted(set(first) - known)
    if unknown and subject.declared.validator is not None:
        raise Unmet(
            f"the attributes {', '.join(unknown)} are not declared",
            where=subject.declared.where,
            hint="attributes = { " + ", ".join(f'{name} = "what it is"' for name in unknown) + " }",
        )


@SUITE.check("its_example_is_accepted")
def it_is_what_its_parents_are(subject: TypeSubject) -> None:
    """Its parents' validators accept it; the attributes that they read are there too, for constraints need them."""
    folder = subject.written("parents")
    accepted = subject.validated(folder)
    for parent in subject.ancestors:
        try:
            attributes = validate(parent, folder, subject.registry.types.ancestors(parent))
        except StepsError as error:
            raise Unmet(f"the example is refused as a {parent}: {error.what}", where=error.where) from error
        for key, value in attributes.items():
            if accepted.get(key) != value:
                raise Unmet(
                    f"the attribute '{key}' that every {parent} has is lost",
                    where=subject.declared.where,
                    found=accepted.get(key),
                    hint=f"return what the validator of {parent} returns as well",
                )


@SUITE.check("its_example_is_accepted")
def missing_files_are_refused(subject: TypeSubject) -> None:
    """A folder without files, or with another one."""
    for name in ("empty", "stranger"):
        folder = subject.folder / name
        folder.mkdir()
        if name == "stranger":
            (folder / "kit.unknown").write_text("another file\n")
        _refused(subject, folder, "a folder without its files")


@SUITE.check("its_example_is_accepted")
def truncated_files_are_refused(subject: TypeSubject) -> None:
    """Files that end in the middle, or of no bytes: what a full disk leaves."""
    _refused(subject, subject.changed("no-bytes", lambda data: b""), "files of no bytes")
    _refused(subject, subject.changed("cut", cut), "truncated files")


@SUITE.check("its_example_is_accepted")
def other_bytes_are_refused(subject: TypeSubject) -> None:
    """Files of its names that are pictures; those of brackets, on which parsers run out of stack, may be text."""
    _refused(subject, subject.changed("pictures", lambda data: PICTURE), "files that are pictures")
    _refused(subject, subject.changed("nested", lambda data: b"[" * 100_000), "files of brackets", always=False)


@SUITE.check("its_example_is_accepted")
def other_types_are_refused(subject: TypeSubject) -> None:
    """Artifacts of the built-in types that it is not."""
    for name in _OTHERS:
        if subject.registry.types.is_a(name, subject.name) or name in (subject.name, *subject.ancestors):
            continue
        sample = write_sample(name, subject.folder / f"other-{name}")
        assert sample is not None
        _refused(subject, sample, f"a {name}")


@SUITE.check("missing_files_are_refused", "other_bytes_are_refused")
def errors_say_what_is_right(subject: TypeSubject) -> None:
    """An error says in which folder (`where`), and what was expected, or has a hint."""
    empty = subject.folder / "right-empty"
    empty.mkdir()
    for folder in (empty, subject.changed("right-pictures", lambda data: PICTURE)):
        try:
            subject.validated(folder)
        except StepsError as error:
            if not (error.where or "").startswith(str(folder)):
                found = f"{error.what}: {error.where}"
                raise Unmet("an error does not say in which folder", found=found, hint="where=str(file)") from error
            if not error.expected and not error.hints:
                hint = "expected='…', or hints=('…',)"
                raise Unmet("an error says only what is wrong", found=error.what, hint=hint) from error


@SUITE.check("attributes_are_plain")
def it_is_stored_and_verified(subject: TypeSubject) -> None:
    """Committed and opened again it is whole, with all of its attributes."""
    store = ArtifactStore(subject.folder / "home")
    name = f"kit/{subject.name}"
    artifact = store.commit(subject.written("whole"), subject.name, name=name, supertypes=subject.ancestors)
    if store.verify(artifact):
        raise Unmet("an artifact is corrupt as it was committed", found=store.verify(artifact)[0].what)
    if store.open(artifact.ref).type != subject.name:
        raise Unmet("an artifact comes back as another type")
    missing = [key for key in subject.validated(artifact.path) if key not in store.find(artifact.ref).attributes]
    if missing:
        raise Unmet(f"the attributes {', '.join(missing)} are lost")


def _refused(subject: TypeSubject, folder: Path, kind: str, *, always: bool = True) -> None:
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
        if always:
            raise Unmet(
                f"{kind}: the validator accepts it",
                hint="look for what every such artifact has: a field, a count of rows, an end mark",
            )
