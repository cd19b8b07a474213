import asyncio
from typing import Any

import pytest

from nemotron_steps.environments.base import Response
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.tools.ns_tools import TOOL

MATH = {"responses_create_params": {"input": "How many?"}, "question": "How many?", "expected_answer": "70"}


def cells(*codes: Any, **config: Any) -> list[str]:
    environment = create("ns_tools", {"should_use_judge": False, **config})

    async def run() -> list[str]:
        await environment.start()
        session = await environment.seed(MATH)
        outputs = [await environment.call_tool(session, TOOL, {"code": code}) for code in codes]
        await environment.close()
        return outputs

    return asyncio.run(run())


@pytest.mark.sandbox
class TestPythonTool:
    def test_state_lasts_and_the_last_expression_is_shown(self) -> None:
        assert cells("x = 3\nprint('once')", "x += 1\nx", "x * 10", "print(x)") == ["once\n", "4\n", "40\n", "4\n"]

    def test_a_failed_cell_shows_its_error_and_leaves_no_state(self) -> None:
        outputs = cells("x = 1", "x = 2\n1/0", "x", "this is not python!")
        assert "ZeroDivisionError" in outputs[1]
        assert outputs[2] == "1\n"
        assert "SyntaxError" in outputs[3]

    def test_loops_output_and_calls_are_bounded(self) -> None:
        outputs = cells("while True: pass", "print('x' * 50_000)", "1", tool_timeout_s=2.0, max_tool_calls=2)
        assert "stopped by timeout" in outputs[0]
        assert outputs[1].endswith("[output cut]") and len(outputs[1]) < 11_000
        assert "limit of 2" in outputs[2]

    def test_bad_calls_are_answered_not_raised(self) -> None:
        environment = create("ns_tools", {"should_use_judge": False})

        async def run() -> list[str]:
            session = await environment.seed(MATH)
            return [
                await environment.call_tool(session, "shell", {}),
                await environment.call_tool(session, TOOL, {"code": 3}),
            ]

        assert all(output.startswith("error:") for output in asyncio.run(run()))

    def test_the_final_box_is_the_grade(self) -> None:
        environment = create("ns_tools", {"should_use_judge": False})

        async def run() -> list[float | None]:
            session = await environment.seed(MATH)
            assert session.tools[0]["name"] == TOOL
            await environment.call_tool(session, TOOL, {"code": "21 + 49"})
            right = await environment.verify(MATH, Response(r"\boxed{70}"), session)
            wrong = await environment.verify(MATH, Response("71"), session)
            await environment.close()
            assert right.components["tool_calls"] == 1.0
            return [right.reward, wrong.reward]

        assert asyncio.run(run()) == [1.0, 0.0]
