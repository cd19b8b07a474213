"""Checks of what an executor is before a job: its class, and the keys of its profiles in env.toml."""

from __future__ import annotations

import inspect
import json

from pydantic import ValidationError

from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import StepsError
from nemotron_steps.testing.executor_subject import ExecutorSubject
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

PROFILE_SUITE: Suite[ExecutorSubject] = Suite()


@PROFILE_SUITE.check()
def is_registered(subject: ExecutorSubject) -> None:
    """An entry point of its name brings something that has submit, status and cancel."""
    try:
        assert subject.executor
    except StepsError as error:
        raise Unmet(error.what, where=error.where, hint="; ".join(error.hints) or None) from error


@PROFILE_SUITE.check("is_registered")
def importing_it_is_light(subject: ExecutorSubject) -> None:
    """Its module imports no framework, prints nothing and starts nothing."""
    check_import([type(subject.executor).__module__])


@PROFILE_SUITE.check("is_registered")
def its_profile_is_strict(subject: ExecutorSubject) -> None:
    """It names the keys of its profiles, refuses others, and accepts those that the kit was given."""
    try:
        subject.profile()
    except ValidationError as error:
        raise Unmet(f"the keys that the kit was given are refused: {error}") from error
    try:
        subject.profile(no_such_key=1)
    except ValidationError:
        return
    raise Unmet(
        "a key that means nothing is accepted in a profile",
        where=_name(subject),
        hint="profile_model = a subclass of nemotron_steps.config.profiles.Profile",
    )


@PROFILE_SUITE.check("is_registered")
def keys_are_described(subject: ExecutorSubject) -> None:
    """Each key of its profiles says what it does."""
    source = inspect.getsource(subject.model)
    for name in _own_keys(subject):
        described = subject.model.model_fields[name].description
        _, found, below = source.partition(f"\n    {name}:")
        if not described and (not found or '"""' not in below.partition("\n    ")[2].lstrip()[:3]):
            raise Unmet(f"the key '{name}' is not described", where=_name(subject))


@PROFILE_SUITE.check("its_profile_is_strict")
def values_of_keys_are_checked(subject: ExecutorSubject) -> None:
    """A value of the wrong kind is refused when the profile is read, not when the job is there."""
    for name in _own_keys(subject):
        try:
            subject.profile(**{name: {"kit": [None]}})
        except ValidationError:
            continue
        raise Unmet(
            f"the key '{name}' takes any value", where=_name(subject), found={name: {"kit": [None]}},
            hint=f"{name}: StrictStr, or whatever it is",
        )  # fmt: skip


@PROFILE_SUITE.check("its_profile_is_strict")
def its_profile_can_be_written_down(subject: ExecutorSubject) -> None:
    """A profile is JSON, as plans and `--json` show it, and read again it is the same."""
    profile = subject.profile()
    try:
        json.dumps([profile.model_dump(), profile.shown()])
        again = subject.model.model_validate(json.loads(json.dumps(profile.model_dump(exclude_unset=True))))
    except (TypeError, ValueError) as error:
        raise Unmet(
            f"a profile cannot be written down as JSON: {error}",
            where=_name(subject),
            hint="texts, numbers, tuples and dicts of them",
        ) from error
    if again != profile:
        raise Unmet("a profile is another one when it is read again", found=f"{profile!r} and {again!r}")


def _own_keys(subject: ExecutorSubject) -> list[str]:
    own = sorted(set(subject.model.model_fields) - set(Profile.model_fields))
    if not own:
        raise NotApplicable("its profiles have no keys of their own")
    return own


def _name(subject: ExecutorSubject) -> str:
    return f"{subject.model.__module__}:{subject.model.__qualname__}"
