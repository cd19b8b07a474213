"""An artifact type under test: its declaration, its validator, and examples to change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import sha256_file
from nemotron_steps.artifacts.validators import declare, validate
from nemotron_steps.manifest.packs import find_packs
from nemotron_steps.manifest.registry import Registry, load_registry
from nemotron_steps.manifest.typegraph import ArtifactType


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

    @cached_property
    def accepted(self) -> dict[str, Any]:
        """The attributes of an example."""
        return self.validated(self.written("accepted"))

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
        """What the validator says: the declared function itself, or the nearest parent's."""
        reference = self.reference
        if reference is None:
            return validate(self.name, folder, self.ancestors)
        module, _, function = reference.partition(":")
        found: dict[str, Any] = getattr(import_module(module), function)(folder)
        return found

    @property
    def reference(self) -> str | None:
        """`module:function` of the validator that a types.toml names for it, or for the nearest parent with one."""
        declared = (self.registry.types.types[name].validator for name in (self.name, *self.ancestors))
        return next((each for each in declared if each is not None), None)


def changed(subject: TypeSubject, name: str, change: Callable[[bytes], bytes]) -> Path:
    """An example whose files hold something else."""
    folder = subject.written(name)
    for file in files_of(folder):
        file.write_bytes(change(file.read_bytes()))
    return folder


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a folder, sorted."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def contents_of(folder: Path) -> dict[str, str]:
    """File → digest of its bytes."""
    return {str(file.relative_to(folder)): sha256_file(file) for file in files_of(folder)}
