"""Checks of an environment: its entry point, its documentation, its settings, and the rows it accepts."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
from typing import Any

from pydantic import BaseModel

from nemotron_steps.environments.registry import settings_of
from nemotron_steps.errors import DataError, StepsError
from nemotron_steps.testing.environment_subject import (
    PROMPT_KEYS,
    RAISED,
    EnvironmentSubject,
    Row,
    plain,
)
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.suite import Suite, Unmet

SUITE: Suite[EnvironmentSubject] = Suite()

_WRONG: tuple[Any, ...] = (None, 3, "", [], {"kit": 1})


@SUITE.check()
def is_registered(subject: EnvironmentSubject) -> None:
    """An entry point of its name brings a class of that name."""
    try:
        found = subject.found
    except Exception as error:
        raise Unmet(
            f"environment `{subject.name}` cannot be loaded: {error}",
            hint=f'[project.entry-points."nemotron_steps.environments"] {subject.name} = "PACKAGE.MODULE:CLASS"',
        ) from error
    if getattr(found, "name", None) != subject.name:
        raise Unmet(
            "the class has another name than its entry point",
            found=getattr(found, "name", None),
            hint=f'name: ClassVar[str] = "{subject.name}"',
        )


@SUITE.check("is_registered")
def importing_it_is_light(subject: EnvironmentSubject) -> None:
    """Its module imports no framework, prints nothing and starts nothing."""
    check_import([subject.found.__module__])


@SUITE.check("is_registered")
def settings_are_strict(subject: EnvironmentSubject) -> None:
    """Its settings refuse unknown keys and later changes."""
    config: type[BaseModel] = subject.found.config_class
    if config.model_config.get("extra") != "forbid" or not config.model_config.get("frozen"):
        raise Unmet(
            f"{config.__qualname__} lets unknown keys or later changes through", hint="extend EnvironmentConfig"
        )


@SUITE.check("env_show_renders")
def it_is_documented(subject: EnvironmentSubject) -> None:
    """Its module says what it rewards and names the fields of a row; each setting says what it does."""
    from nemotron_steps.environments.catalog import described

    module = inspect.getmodule(subject.found)
    text = f"{(module and module.__doc__) or ''}\n{subject.found.__doc__ or ''}"
    if not text.strip():
        raise Unmet("the environment has no docstring", where=subject.found.__module__)
    for field in subject.found.required_fields:
        if field.rpartition(".")[2] not in text:
            raise Unmet(
                f"the row's field `{field}` is not described",
                where=f"{subject.found.__module__}, docstring",
                hint="name every field of a row, its type and its meaning",
            )
    for setting in described(subject.name).settings:
        if not setting.text:
            raise Unmet(
                f"the setting `{setting.name}` is not described",
                where=subject.found.config_class.__qualname__,
                hint="put a string below the field",
            )


@SUITE.check("is_registered")
def env_show_renders(subject: EnvironmentSubject) -> None:
    """`steps env show` tells it, as text and as JSON."""
    import os

    path = os.pathsep.join(entry for entry in sys.path if entry)
    for words in (["env", "show", subject.name], ["env", "show", subject.name, "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "nemotron_steps.cli.main", *words],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": path},
        )
        if done.returncode or subject.name not in done.stdout:
            raise Unmet(f"`steps {' '.join(words)}` fails", found=(done.stderr or done.stdout)[-400:])
        if "--json" in words:
            try:
                json.loads(done.stdout)
            except ValueError as error:
                raise Unmet(f"`steps {' '.join(words)}` prints no JSON", found=done.stdout[:200]) from error


@SUITE.check("settings_are_strict")
def settings_mistakes_are_told(subject: EnvironmentSubject) -> None:
    """An unknown setting is an error with a code; the given ones are accepted."""
    settings_of(subject.name, subject.config)
    try:
        settings_of(subject.name, {**subject.config, "no_such_setting": 1})
    except StepsError:
        return
    raise Unmet("an unknown setting is accepted")


@SUITE.check("is_registered")
def rows_are_accepted(subject: EnvironmentSubject) -> None:
    """check_row accepts the rows that the kit was given."""
    if not subject.rows:
        raise Unmet("there are no rows", hint="rows=[{...}] or a JSON Lines file")
    environment = subject.build()
    for number, row in enumerate(subject.rows, start=1):
        try:
            environment.check_row(row, f"rows:{number}")
        except DataError as error:
            raise Unmet(f"row {number}: {error.what}", where=error.where, found=error.found) from error


@SUITE.check("rows_are_accepted")
def a_missing_field_is_told(subject: EnvironmentSubject) -> None:
    """A row that lacks a verifier's field is an error with a code before the run, or can be judged without."""
    for row in subject.rows[:2]:
        for name in sorted(set(row) - PROMPT_KEYS):
            _refused_or_judged(subject, {k: v for k, v in row.items() if k != name}, f"without the field `{name}`", row)
    for field in subject.found.required_fields:
        row = copy.deepcopy(subject.rows[0])
        *parents, last = field.split(".")
        node = row
        for part in parents:
            node = node[part]
        node.pop(last)
        try:
            subject.build().check_row(row, "rows:1")
        except DataError:
            continue
        raise Unmet(f"check_row accepts a row without the required field `{field}`")


@SUITE.check("a_missing_field_is_told")
def a_wrong_field_is_told(subject: EnvironmentSubject) -> None:
    """A verifier's field of another type is an error with a code before the run, or can be judged."""
    row = subject.rows[0]
    for name in sorted(set(row) - PROMPT_KEYS):
        for value in _WRONG:
            if type(value) is not type(row[name]) or value != row[name]:
                _refused_or_judged(subject, {**row, name: value}, f"with {value!r} as `{name}`", row)


def _refused_or_judged(subject: EnvironmentSubject, row: Row, kind: str, whole: Row) -> None:
    try:
        subject.build().check_row(row, "rows:1")
    except DataError:
        return
    except Exception as error:
        raise Unmet(
            f"a row {kind}: check_row raises {type(error).__name__}: {error}",
            hint="required_fields names what has to be there; check_values raises RowError",
        ) from error
    try:
        verdicts = subject.judge(row, *subject.with_company(subject.right(whole)))
    except Exception as error:
        raise Unmet(f"a row {kind} is accepted, and judging raises {type(error).__name__}: {error}") from error
    if verdicts[0].failure in RAISED:
        raise Unmet(
            f"a row {kind} is accepted, and cannot be judged: {verdicts[0].details.get('message')}",
            hint="required_fields names what has to be there; check_values raises RowError",
        )


@SUITE.check("rows_are_accepted", "rewards_are_in_range", "judging_is_deterministic")
def unknown_fields_change_nothing(subject: EnvironmentSubject) -> None:
    """A field that it does not know is left alone."""
    row = subject.rows[0]
    more = {**row, "kit_unknown": {"a": [1]}, "": "x"}
    try:
        subject.build().check_row(more, "rows:1")
    except DataError as error:
        raise Unmet(f"a row with a field more is refused: {error.what}") from error
    one = subject.verdict(row, subject.right(row), "a right answer")
    other = subject.verdict(more, subject.right(row), "a row with a field more")
    if plain(one) != plain(other):
        raise Unmet("a field that it does not know changes the verdict", found=f"{plain(one)} and {plain(other)}")
