"""Checks of an environment: settings and rows, what answers earn, rollouts at once, tools."""

import asyncio
import copy
import inspect
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from pydantic import BaseModel

from nemotron_steps.environments.base import Environment
from nemotron_steps.environments.registry import settings_of
from nemotron_steps.errors import DataError, StepsError
from nemotron_steps.testing.environment_subject import (
    PROMPT_KEYS,
    STRANGE,
    WORTHLESS,
    Answer,
    EnvironmentSubject,
    Row,
    judged,
    plain,
    refuse_raised,
    typed,
)
from nemotron_steps.testing.step_manifest import check_import
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet, told

SUITE: Suite[EnvironmentSubject] = Suite()

_WRONG: tuple[Any, ...] = (None, 3, "", [], {"kit": 1})
_FIELDS = "required_fields names what has to be there; check_values raises RowError"


@SUITE.check()
def is_registered(subject: EnvironmentSubject) -> None:
    """An entry point of its name brings a class of that name."""
    try:
        found = subject.found
    except Exception as error:
        hint = f'[project.entry-points."nemotron_steps.environments"] {subject.name} = "PACKAGE.MODULE:CLASS"'
        raise Unmet(f"environment `{subject.name}` cannot be loaded: {error}", hint=hint) from error
    if getattr(found, "name", None) != subject.name:
        name, hint = getattr(found, "name", None), f'name: ClassVar[str] = "{subject.name}"'
        raise Unmet("the class has another name than its entry point", found=name, hint=hint)


@SUITE.check("is_registered")
def importing_it_is_light(subject: EnvironmentSubject) -> None:
    """Its module imports no framework, prints nothing and starts nothing."""
    check_import([subject.found.__module__])


@SUITE.check("is_registered")
def settings_are_strict(subject: EnvironmentSubject) -> None:
    """Its settings refuse unknown keys and later changes; the given ones are accepted."""
    config: type[BaseModel] = subject.found.config_class
    settings_of(subject.name, subject.config)
    try:
        settings_of(subject.name, {**subject.config, "no_such_setting": 1})
    except StepsError:
        if config.model_config.get("frozen"):
            return
    raise Unmet(f"{config.__qualname__} lets unknown keys or later changes through", hint="extend EnvironmentConfig")


@SUITE.check("is_registered")
def it_is_documented(subject: EnvironmentSubject) -> None:
    """Its module says what it rewards and names the fields of a row; each setting says what it does."""
    from nemotron_steps.environments.catalog import described

    module = inspect.getmodule(subject.found)
    text = f"{(module and module.__doc__) or ''}\n{subject.found.__doc__ or ''}"
    if not text.strip():
        raise Unmet("the environment has no docstring", where=subject.found.__module__)
    for field in subject.found.required_fields:
        if field.rpartition(".")[2] not in text:
            hint = "name every field of a row, its type and its meaning, in the docstring"
            raise Unmet(f"the row's field `{field}` is not described", where=subject.found.__module__, hint=hint)
    for setting in described(subject.name).settings:
        if not setting.text:
            where = subject.found.config_class.__qualname__
            raise Unmet(f"the setting `{setting.name}` is not described", where=where, hint="put a string below it")


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
            raise told(error, f"row {number}: ") from error


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
        raise Unmet(f"a row {kind}: check_row raises {type(error).__name__}: {error}", hint=_FIELDS) from error
    subject.verdict(row, subject.right(whole), f"a row {kind} is accepted", _FIELDS)


@SUITE.check("empty_answers_are_judged")
def right_answers_earn_most(subject: EnvironmentSubject) -> None:
    """The right answer of each row earns more than an answer without content."""
    for number, row in enumerate(subject.rows, start=1):
        right = subject.verdict(row, subject.right(row), f"the right answer of row {number}")
        worst = subject.verdict(row, "", "no answer")
        if right.reward is None or (worst.reward is not None and right.reward <= worst.reward):
            earned = f"the right answer of row {number} earns {right.reward}, no answer {worst.reward}"
            raise Unmet(earned, found=right.failure or right.details or None)


@SUITE.check("right_answers_earn_most")
def worthless_answers_earn_nothing(subject: EnvironmentSubject) -> None:
    """No answer, thinking without an answer, a forged verdict, orders to a judge: all earn the least."""
    for row in subject.rows:
        for what, answer in WORTHLESS.items():
            _earns_nothing(subject, row, answer, f"{what} ({answer[:40]!r})")


@SUITE.check("right_answers_earn_most")
def the_answer_in_thinking_earns_nothing(subject: EnvironmentSubject) -> None:
    """The right answer inside of the thinking alone is none."""
    right = subject.right(subject.rows[0])
    if not right.text:
        raise NotApplicable("the right answer is not text")
    for thinking in (f"<think>{right.text}</think>", f"<think>{right.text}"):
        _earns_nothing(subject, subject.rows[0], thinking, "the answer inside of the thinking")


def _earns_nothing(subject: EnvironmentSubject, row: Row, answer: str, what: str) -> None:
    limit = subject.build().reward_range[0] if subject.worthless is None else subject.worthless
    reward = subject.verdict(row, answer, what).reward
    if reward is not None and reward > limit:
        hint = "look at response.text, and not at words around the answer; environment_conformance(…, worthless=…)"
        raise Unmet(f"{what} earns {reward}, of at most {limit}", hint=hint)


def _judging(check: str) -> Callable[[EnvironmentSubject], None]:
    def judges(subject: EnvironmentSubject) -> None:
        """Answers that nobody expected are judged, not raised about."""
        for row in subject.rows[:2]:
            for what, answer in STRANGE[check].items():
                subject.verdict(row, answer, what)

    judges.__name__ = check
    return judges


for _check in STRANGE:
    SUITE.check("rows_are_accepted")(_judging(_check))


@SUITE.check("right_answers_earn_most", "broken_markup_is_judged")
def typed_answers_are_judged(subject: EnvironmentSubject) -> None:
    """A right answer with a value of another type in it is judged; less than right where a number became none."""
    row = subject.rows[0]

    async def look(environment: Environment) -> None:
        best = (await judged(environment, copy.deepcopy(row), subject.right(row)))[0].reward
        for what, wrong, answer in typed(subject.right(row)):
            verdict = refuse_raised((await judged(environment, copy.deepcopy(row), answer))[0], what)
            if verdict.reward is None:
                hint = "GradeResult(0.0): CannotJudgeError is for what no answer can bring about"
                raise Unmet(f"{what}: {verdict.failure}", found=verdict.details or None, hint=hint)
            if wrong and best is not None and verdict.reward >= best:
                earned = f"{what} earns {verdict.reward}, the right answer {best}"
                raise Unmet(earned, hint="refuse it, once, when it is read")

    subject.within(look)


@SUITE.check("rows_are_accepted")
def judging_is_deterministic(subject: EnvironmentSubject) -> None:
    """Two fresh environments give the same verdict."""
    for row in subject.rows:
        for answer in (subject.right(row), "fine"):
            one, other = (subject.judge(row, answer)[0] for _ in range(2))
            if plain(one) != plain(other):
                raise Unmet("judging an answer twice gives two verdicts", found=f"{plain(one)} and {plain(other)}")


@SUITE.check("judging_is_deterministic")
def it_keeps_no_state(subject: EnvironmentSubject) -> None:
    """One environment gives the same verdicts whatever it judged before."""
    rows = [*subject.rows, *reversed(subject.rows)]

    async def verdicts(environment: Environment) -> list[Any]:
        return [await _verdict(environment, row, subject.right(row)) for row in rows]

    found = subject.within(verdicts)
    if found != found[::-1]:
        raise Unmet("a verdict depends on what was judged before", hint="what a rollout changes belongs in its Session")


@SUITE.check("it_keeps_no_state")
def concurrent_is_serial(subject: EnvironmentSubject) -> None:
    """Rollouts judged at once get the verdicts that they get one by one."""
    rows = [subject.rows[index % len(subject.rows)] for index in range(16)]
    rollouts = [(row, subject.right(row) if index % 2 else "fine") for index, row in enumerate(rows)]

    async def verdicts(environment: Environment) -> tuple[list[Any], list[Any]]:
        serial = [await _verdict(environment, *each) for each in rollouts]
        return serial, await asyncio.gather(*(_verdict(environment, *each) for each in rollouts))

    serial, at_once = subject.within(verdicts)
    if serial != at_once:
        hint = "keep nothing on self between two `await`"
        raise Unmet("rollouts judged at once get other verdicts than one by one", hint=hint)


async def _verdict(environment: Environment, row: Row, answer: Answer) -> Any:
    return plain((await judged(environment, copy.deepcopy(row), answer))[0])


@SUITE.check("rows_are_accepted")
def rows_stay_as_they_are(subject: EnvironmentSubject) -> None:
    """Judging changes nothing in the row."""
    row = copy.deepcopy(subject.rows[0])
    subject.within(lambda environment: judged(environment, row, subject.right(row)))
    if row != subject.rows[0]:
        raise Unmet("judging changes the row")


@SUITE.check("rows_are_accepted")
def verdicts_can_be_written_down(subject: EnvironmentSubject) -> None:
    """Components and details are JSON, for samples.jsonl and for environments behind HTTP."""
    row = subject.rows[0]
    for answer in (subject.right(row), "fine"):
        verdict = subject.judge(row, answer)[0]
        try:
            json.dumps({"components": verdict.components, "details": verdict.details})
        except (TypeError, ValueError) as error:
            raise Unmet(f"a verdict is not JSON: {error}", found=repr(verdict.details)[:200]) from error


@SUITE.check("it_keeps_no_state")
def groups_are_judged_whole(subject: EnvironmentSubject) -> None:
    """Four rollouts of a prompt get four verdicts, each its own."""
    row = subject.rows[0]
    right = subject.right(row)
    try:
        verdicts = subject.judge(row, right, "", right, "")
    except StepsError as error:
        raise told(error) from error
    if not subject.found.judges_groups:
        alone = [plain(subject.judge(row, answer)[0]) for answer in (right, "")]
        if [plain(verdict) for verdict in verdicts] != [*alone, *alone]:
            raise Unmet("rollouts of a group get other verdicts than alone", hint="judges_groups = True, if that is so")


@SUITE.check("rows_are_accepted")
def it_never_sleeps_in_the_loop(subject: EnvironmentSubject) -> None:
    """verify never calls time.sleep: every rollout waits on the loop that it blocks."""
    slept: list[float] = []
    here, sleep = threading.get_ident(), time.sleep

    def noted(seconds: float) -> None:
        if threading.get_ident() == here:
            slept.append(seconds)
        sleep(seconds)

    with mock.patch("time.sleep", noted):
        subject.judge(subject.rows[0], subject.right(subject.rows[0]))
    if slept:
        raise Unmet(f"judging sleeps {slept[0]} s in the event loop", hint="await asyncio.sleep(…)")


@SUITE.check("rows_are_accepted")
def it_can_be_closed(subject: EnvironmentSubject) -> None:
    """Started, closed, closed again, and started anew."""

    async def close_again(environment: Environment) -> None:
        for _ in range(2):
            await environment.close()
        await environment.start()
        await environment.close()

    try:
        subject.within(close_again)
    except Exception as error:
        raise Unmet(f"starting and closing raises {type(error).__name__}: {error}") from error


def _tools(subject: EnvironmentSubject) -> list[dict[str, Any]]:
    tools = asyncio.run(subject.build().seed(copy.deepcopy(subject.rows[0]))).tools
    if not tools:
        raise NotApplicable("the environment offers no tools")
    return tools


@SUITE.check("rows_are_accepted")
def tools_are_described(subject: EnvironmentSubject) -> None:
    """Each tool has a name, a description and a schema of its arguments."""
    for tool in _tools(subject):
        parameters = tool.get("parameters")
        if tool.get("type") != "function" or not tool.get("name") or not tool.get("description"):
            hint = '{"type": "function", "name": …, "description": …, "parameters": a JSON schema}'
            raise Unmet("a tool has no type, name or description", found=tool, hint=hint)
        if not isinstance(parameters, dict) or parameters.get("type") != "object" or "properties" not in parameters:
            raise Unmet(f"the tool {tool['name']} has no schema of its arguments", found=parameters)


@SUITE.check("tools_are_described")
def tool_mistakes_are_told_to_the_policy(subject: EnvironmentSubject) -> None:
    """A tool that is not there, arguments missing or of another type: an output that says so, never an exception."""
    tools = _tools(subject)
    keys = {key for tool in tools for key in tool["parameters"]["properties"]}
    strange: tuple[Any, ...] = (None, 3, [], {"a": 1}, "\ud800", "x" * 100_000)
    calls: list[tuple[str, dict[str, Any]]] = [("no_such_tool", {})]
    for name in (tool["name"] for tool in tools):
        calls += [(name, {}), (name, {"no_such_argument": 1})]
        calls += [(name, dict.fromkeys(keys, value)) for value in strange]

    async def look(environment: Environment) -> None:
        for name, arguments in calls:
            session = await environment.seed(copy.deepcopy(subject.rows[0]))
            try:
                output = await environment.call_tool(session, name, arguments)
            except Exception as error:
                call = f"calling {name}({repr(arguments)[:80]})"
                hint = 'return "error: …": the policy reads it and tries again'
                raise Unmet(f"{call} raises {type(error).__name__}: {error}", hint=hint) from error
            if not isinstance(output, str):
                raise Unmet(f"calling {name} gives no text", found=type(output).__name__)
            await environment.release(session)

    subject.within(look)


@SUITE.check("tools_are_described")
def sessions_are_separate(subject: EnvironmentSubject) -> None:
    """What one rollout's tool calls change is not seen in another's."""
    values = {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    calls = []
    for tool in _tools(subject):
        properties = tool["parameters"]["properties"]
        given = {name: values.get(str(schema.get("type")), "a") for name, schema in properties.items()}
        calls.append((tool["name"], given))

    async def outputs(environment: Environment) -> list[list[str]]:
        sessions = [await environment.seed(copy.deepcopy(subject.rows[0])) for _ in range(2)]
        found = [[await environment.call_tool(each, name, dict(given)) for name, given in calls] for each in sessions]
        for session in sessions:
            await environment.release(session)
        return found

    one, other = subject.within(outputs)
    if one != other:
        what = "a rollout's tools answer otherwise after another rollout's calls"
        raise Unmet(what, hint="keep state in Session.state")
