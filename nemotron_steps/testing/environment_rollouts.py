"""Checks of an environment: state, concurrency, groups, what it leaves behind, and its tools."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from typing import Any, SupportsIndex

from nemotron_steps.environments.base import Environment, Verdict
from nemotron_steps.errors import StepsError
from nemotron_steps.testing.environment_answers import SUITE as ANSWERS
from nemotron_steps.testing.environment_subject import (
    EnvironmentSubject,
    Row,
    as_response,
    judged,
    plain,
)
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

SUITE: Suite[EnvironmentSubject] = Suite(ANSWERS)


@SUITE.check("rows_are_accepted")
def judging_is_deterministic(subject: EnvironmentSubject) -> None:
    """Two fresh environments give the same verdict."""
    for row in subject.rows:
        for answer in (subject.right(row), "fine"):
            one, other = (subject.judge(row, *subject.with_company(answer))[0] for _ in range(2))
            if plain(one) != plain(other):
                raise Unmet("judging an answer twice gives two verdicts", found=f"{plain(one)} and {plain(other)}")


@SUITE.check("judging_is_deterministic")
def it_keeps_no_state(subject: EnvironmentSubject) -> None:
    """One environment gives the same verdicts whatever it judged before."""
    rows = [*subject.rows, *reversed(subject.rows)]

    async def run() -> list[Any]:
        environment = subject.build()
        await environment.start()
        found = [plain((await _of_row(subject, environment, row))[0]) for row in rows]
        await environment.close()
        return found

    found = asyncio.run(run())
    if found != found[::-1]:
        raise Unmet("a verdict depends on what was judged before", hint="what a rollout changes belongs in its Session")


@SUITE.check("it_keeps_no_state")
def concurrent_is_serial(subject: EnvironmentSubject) -> None:
    """Rollouts judged at once get the verdicts that they get one by one."""
    rows = [subject.rows[index % len(subject.rows)] for index in range(16)]

    async def run() -> tuple[list[Any], list[Any]]:
        environment = subject.build()
        await environment.start()
        serial = [await _mixed(subject, environment, index, row) for index, row in enumerate(rows)]
        at_once = await asyncio.gather(*(_mixed(subject, environment, i, row) for i, row in enumerate(rows)))
        await environment.close()
        return serial, list(at_once)

    serial, at_once = asyncio.run(run())
    if serial != at_once:
        raise Unmet(
            "rollouts judged at once get other verdicts than one by one",
            hint="keep nothing on self between two `await`",
        )


async def _of_row(subject: EnvironmentSubject, environment: Environment, row: Row) -> list[Verdict]:
    responses = [as_response(answer) for answer in subject.with_company(subject.right(row))]
    return await judged(environment, copy.deepcopy(row), responses)


async def _mixed(subject: EnvironmentSubject, environment: Environment, index: int, row: Row) -> Any:
    """A right answer, or one that is not, by turns."""
    answer = subject.right(row) if index % 2 else "fine"
    responses = [as_response(each) for each in subject.with_company(answer)]
    return plain((await judged(environment, copy.deepcopy(row), responses))[0])


@SUITE.check("rows_are_accepted")
def rows_stay_as_they_are(subject: EnvironmentSubject) -> None:
    """Judging changes nothing in the row."""
    row = copy.deepcopy(subject.rows[0])

    async def run() -> None:
        environment = subject.build()
        await environment.start()
        await judged(environment, row, [subject.right(row)] * (2 if subject.found.judges_groups else 1))
        await environment.close()

    asyncio.run(run())
    if row != subject.rows[0]:
        raise Unmet("judging changes the row")


@SUITE.check("rows_are_accepted")
def verdicts_can_be_written_down(subject: EnvironmentSubject) -> None:
    """Components and details are JSON, for samples.jsonl and for environments behind HTTP."""
    row = subject.rows[0]
    for answer in (subject.right(row), "fine"):
        verdict = subject.judge(row, *subject.with_company(answer))[0]
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
        raise Unmet(error.what, found=error.found) from error
    if not subject.found.judges_groups:
        alone = [plain(subject.judge(row, answer)[0]) for answer in (right, "")]
        if [plain(verdict) for verdict in verdicts] != [*alone, *alone]:
            raise Unmet("rollouts of a group get other verdicts than alone", hint="judges_groups = True, if that is so")


@SUITE.check("rows_are_accepted")
def it_never_sleeps_in_the_loop(subject: EnvironmentSubject) -> None:
    """verify never calls time.sleep: every rollout waits on the loop that it blocks."""
    slept: list[float] = []
    here, sleep = threading.get_ident(), time.sleep

    def noted(seconds: float | SupportsIndex) -> None:
        if threading.get_ident() == here:
            slept.append(float(seconds))
        sleep(seconds)

    time.sleep = noted
    try:
        subject.judge(subject.rows[0], *subject.with_company(subject.right(subject.rows[0])))
    finally:
        time.sleep = sleep
    if slept:
        raise Unmet(f"judging sleeps {slept[0]} s in the event loop", hint="await asyncio.sleep(…)")


@SUITE.check("rows_are_accepted")
def it_can_be_closed(subject: EnvironmentSubject) -> None:
    """Started, closed, closed again, and started anew."""

    async def run() -> None:
        environment = subject.build()
        await environment.close()
        await environment.start()
        await environment.close()
        await environment.close()

    try:
        asyncio.run(run())
    except Exception as error:
        raise Unmet(f"starting and closing raises {type(error).__name__}: {error}") from error


# -- tools -------------------------------------------------------------------------------------------------------


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
            raise Unmet(
                "a tool has no type, name or description",
                found=tool,
                hint='{"type": "function", "name": …, "description": …, "parameters": a JSON schema}',
            )
        if not isinstance(parameters, dict) or parameters.get("type") != "object" or "properties" not in parameters:
            raise Unmet(f"the tool {tool['name']} has no schema of its arguments", found=parameters)


@SUITE.check("tools_are_described")
def tool_mistakes_are_told_to_the_policy(subject: EnvironmentSubject) -> None:
    """A tool that is not there, arguments missing or of another type: an output that says so, never an exception."""
    names = [tool["name"] for tool in _tools(subject)]
    keys = {key for tool in _tools(subject) for key in tool["parameters"]["properties"]}
    strange: tuple[Any, ...] = (None, 3, [], {"a": 1}, "\ud800", "x" * 100_000)
    calls: list[tuple[str, dict[str, Any]]] = [("no_such_tool", {})]
    for name in names:
        calls += [(name, {}), (name, {"no_such_argument": 1})]
        calls += [(name, dict.fromkeys(keys, value)) for value in strange]

    async def run() -> None:
        environment = subject.build()
        await environment.start()
        for name, arguments in calls:
            session = await environment.seed(copy.deepcopy(subject.rows[0]))
            try:
                output = await environment.call_tool(session, name, arguments)
            except Exception as error:
                raise Unmet(
                    f"calling {name}({repr(arguments)[:80]}) raises {type(error).__name__}: {error}",
                    hint='return "error: …": the policy reads it and tries again',
                ) from error
            if not isinstance(output, str):
                raise Unmet(f"calling {name} gives no text", found=type(output).__name__)
            await environment.release(session)
        await environment.close()

    asyncio.run(run())


@SUITE.check("tools_are_described")
def sessions_are_separate(subject: EnvironmentSubject) -> None:
    """What one rollout's tool calls change is not seen in another's."""
    calls = [(tool["name"], _some_arguments(tool)) for tool in _tools(subject)]

    async def outputs(environment: Environment, session: Any) -> list[str]:
        return [await environment.call_tool(session, name, dict(arguments)) for name, arguments in calls]

    async def run() -> tuple[list[str], list[str]]:
        environment = subject.build()
        await environment.start()
        first, second = [await environment.seed(copy.deepcopy(subject.rows[0])) for _ in range(2)]
        found = await outputs(environment, first), await outputs(environment, second)
        for session in (first, second):
            await environment.release(session)
        await environment.close()
        return found

    one, other = asyncio.run(run())
    if one != other:
        raise Unmet(
            "a rollout's tools answer otherwise after another rollout's calls", hint="keep state in Session.state"
        )


def _some_arguments(tool: dict[str, Any]) -> dict[str, Any]:
    values = {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    properties = tool["parameters"]["properties"]
    return {name: values.get(str(schema.get("type")), "a") for name, schema in properties.items()}
