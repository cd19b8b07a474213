"""An artifact type under test, and checks of its declaration, of its validator and of what the store keeps of it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.artifacts.validators import declare, validate
from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.errors.plugins import load_object
from nemotron_steps.manifest.registry import Registry, load_registry
from nemotron_steps.manifest.typegraph import ArtifactType
from nemotron_steps.testing.step_subject import PICTURE, cut, files_of, tree_of
from nemotron_steps.testing.suite import Suite, Unmet, told


@dataclass
class TypeSubject:
    """What the checks of a type ask. Its arguments are those of `type_conformance`; `folder` is for examples."""

    name: str
    folder: Path
    example: Callable[[Path], object]

    @cached_property
    def registry(self) -> Registry:
        """Every manifest that is found here."""
        registry = load_registry()
        declare(registry.types.validators)
        return registry

    @property
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

    def validated(self, folder: Path) -> dict[str, Any]:
        """What its own validator says, or raises; of a type without one, the nearest parent's."""
        if self.declared.validator is None:
            return validate(self.name, folder, self.ancestors)
        found: dict[str, Any] = load_object(self.declared.validator)(folder)
        return found


SUITE: Suite[TypeSubject] = Suite()


@SUITE.check()
def is_declared(subject: TypeSubject) -> None:
    """A types.toml declares it without a mistake, described in a line."""
    try:
        where = subject.declared.where
    except StepsError as error:
        raise Unmet(error.what, hint=f"[{subject.name}] in a types.toml of the pack") from error
    for problem in (*subject.registry.problems, *subject.registry.warnings):
        if (problem.where or "").startswith(f"{where.rpartition(':')[0]}:"):
            raise told(problem)
    if not subject.declared.description or not subject.declared.description.isprintable():
        raise Unmet("its description is not a line of text", where=where, found=repr(subject.declared.description))


@SUITE.check("is_declared")
def its_example_is_accepted(subject: TypeSubject) -> None:
    """The validator accepts the example, and leaves it as it is."""
    folder = subject.written("example")
    before = tree_of(folder)
    if not before:
        raise Unmet("the example writes nothing")
    try:
        subject.validated(folder)
    except StepsError as error:
        raise Unmet(f"the example is refused: {error.what}", where=error.where, found=error.found) from error
    if tree_of(folder) != before:
        raise Unmet("the validator changes the folder")


@SUITE.check("its_example_is_accepted")
def it_comes_back_from_a_home(subject: TypeSubject) -> None:
    """Committed and opened again it is whole, and has the attributes that its validator gives an equal folder."""
    store = ArtifactStore(subject.folder / "home")
    committed = subject.written("whole")
    try:
        artifact = store.commit(committed, subject.name, name=f"kit/{subject.name}", supertypes=subject.ancestors)
    except (TypeError, ValueError) as error:
        raise Unmet(f"the attributes are not JSON: {error}") from error
    for finding in store.verify(artifact):
        raise Unmet("an artifact is corrupt as it was committed", found=finding.what)
    found = store.find(artifact.ref).attributes
    for key, value in subject.validated(subject.written("again")).items():
        if found.get(key) != value:
            both, hint = (
                f"{found.get(key)!r} in place of {value!r}",
                "return JSON, the same for the same files",
            )
            where = subject.declared.where
            raise Unmet(f"the attribute '{key}' is lost, or another", where=where, found=both, hint=hint)


@SUITE.check("its_example_is_accepted")
def it_is_what_its_parents_are(subject: TypeSubject) -> None:
    """Its parents' validators accept it, and the attributes that they read are among its own."""
    folder = subject.written("parents")
    own = subject.validated(folder)
    for parent in subject.ancestors:
        try:
            wanted = validate(parent, folder, subject.registry.types.ancestors(parent))
        except StepsError as error:
            raise Unmet(f"the example is refused as a {parent}: {error.what}", where=error.where) from error
        if lost := sorted(key for key, value in wanted.items() if own.get(key) != value):
            what = f"attributes of every {parent} are missing or different: {', '.join(lost)}"
            raise Unmet(what, where=subject.declared.where, hint="return what the parents' validators return as well")


@SUITE.check("its_example_is_accepted")
def what_it_is_not_is_refused(subject: TypeSubject) -> None:
    """A folder without files, or with another one; files cut short, as a full disk leaves them, and pictures."""
    folders = {kind: subject.folder / kind for kind in ("an empty folder", "a folder with another file")}
    for folder in folders.values():
        folder.mkdir()
    (folder / "kit.unknown").write_text("another file\n")
    for kind, change in (("truncated files", cut), ("files that are pictures", lambda data: PICTURE)):
        folders[kind] = subject.written(kind)
        for file in files_of(folders[kind]):
            file.write_bytes(change(file.read_bytes()))
    for kind, folder in folders.items():
        try:
            subject.validated(folder)
        except (ArtifactError, DataError) as error:
            if not (error.where or "").startswith(str(folder)):
                found = f"{error.what}: {error.where}"
                raise Unmet(f"{kind}: the error does not say where", found=found, hint="where=str(file)") from error
        except Exception as error:
            hint = "raise ArtifactError or DataError(what, where=…, expected=…, found=…)"
            raise Unmet(f"{kind}: the validator raises {type(error).__name__}: {error}", hint=hint) from error
        else:
            hint = "look for what every such artifact has: a field, a count of rows, an end mark"
            raise Unmet(f"{kind}: the validator accepts it", hint=hint)
