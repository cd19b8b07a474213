"""Checks of what a types.toml says of an artifact type, and that its validator takes the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

from nemotron_steps.artifacts.validators import has_validator, validate
from nemotron_steps.errors import StepsError
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet
from nemotron_steps.testing.type_subject import TypeSubject

_ATTRIBUTES = """
import json, sys
from importlib import import_module
from pathlib import Path
module, _, function = sys.argv[1].partition(":")
print(json.dumps(getattr(import_module(module), function)(Path(sys.argv[2])), sort_keys=True))
"""

DECLARED_SUITE: Suite[TypeSubject] = Suite()


@DECLARED_SUITE.check()
def is_declared(subject: TypeSubject) -> None:
    """A types.toml declares it, without a mistake."""
    try:
        file = subject.declared.where.rpartition(":")[0]
    except StepsError as error:
        raise Unmet(error.what, hint=f"[{subject.name}] in a types.toml of the pack") from error
    for problem in (*subject.registry.problems, *subject.registry.warnings):
        if (problem.where or "").startswith(f"{file}:"):
            raise Unmet(problem.what, where=problem.where, hint="; ".join(problem.hints) or None)


@DECLARED_SUITE.check("is_declared")
def is_described(subject: TypeSubject) -> None:
    """It and its attributes say what they are."""
    if not subject.declared.description:
        raise Unmet("the type has no description", where=subject.declared.where)
    for name, text in subject.declared.attributes.items():
        if not text:
            raise Unmet(f"the attribute '{name}' is not described", where=subject.declared.where)


@DECLARED_SUITE.check("is_declared")
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


@DECLARED_SUITE.check("has_a_validator")
def importing_it_is_light(subject: TypeSubject) -> None:
    """The validator's module imports no framework, prints nothing and starts nothing."""
    if subject.declared.validator is None:
        raise NotApplicable("the type's validator is a parent's")
    check_import([subject.declared.validator.partition(":")[0]])


@DECLARED_SUITE.check("has_a_validator")
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


@DECLARED_SUITE.check("its_example_is_accepted")
def attributes_are_plain(subject: TypeSubject) -> None:
    """What the validator returns is JSON without NaN, the same each time, and declared in types.toml."""
    first, second = subject.validated(subject.written("plain")), subject.validated(subject.written("plain-again"))
    try:
        same = json.dumps(first, sort_keys=True, allow_nan=False) == json.dumps(second, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise Unmet(f"the attributes are not JSON: {error}", found=first) from error
    if not same:
        raise Unmet("the attributes of two equal folders differ", found=f"{first} and {second}")
    known = {
        key for name in (subject.name, *subject.ancestors) for key in subject.registry.types.types[name].attributes
    }
    unknown = sorted(set(first) - known)
    if unknown and subject.declared.validator is not None:
        raise Unmet(
            f"the attributes {', '.join(unknown)} are not declared",
            where=subject.declared.where,
            hint="attributes = { " + ", ".join(f'{name} = "what it is"' for name in unknown) + " }",
        )


@DECLARED_SUITE.check("attributes_are_plain")
def attributes_know_no_hash_seed(subject: TypeSubject) -> None:
    """They are the same in another process: none is a set's order, which each process has of its own."""
    if subject.reference is None:
        raise NotApplicable("a types.toml names no validator for it")
    folder = subject.written("seeds")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ATTRIBUTES, subject.reference, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)},
        )
        for seed in range(3)
    ]
    ended = [process.communicate(timeout=60) for process in processes]
    for process, (_, complained) in zip(processes, ended, strict=True):
        if process.returncode:
            raise Unmet("the validator cannot be used in another process", found=complained[-400:])
    said = [printed.strip().rpartition("\n")[2] for printed, _ in ended]
    if len(set(said)) > 1:
        raise Unmet("the attributes depend on PYTHONHASHSEED", found=" and ".join(sorted(set(said))), hint="sorted(…)")


@DECLARED_SUITE.check("its_example_is_accepted")
def it_has_what_its_parents_have(subject: TypeSubject) -> None:
    """Attributes that a parent's validator reads are there too, and the same: constraints between steps need them."""
    folder = subject.written("parents")
    for parent in subject.ancestors:
        for key, value in validate(parent, folder, subject.registry.types.ancestors(parent)).items():
            if subject.accepted.get(key) != value:
                raise Unmet(
                    f"the attribute '{key}' that every {parent} has is lost",
                    where=subject.declared.where,
                    found=subject.accepted.get(key),
                    hint=f"return what the validator of {parent} returns as well",
                )
