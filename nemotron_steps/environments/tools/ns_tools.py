"""ns_tools: mathematics with a Python tool. The tool runs in the sandbox; the final answer is graded as
math_with_judge.

The tool is stateful like a notebook: a call's program is the cells so far, replayed without output, then the new cell,
whose last expression is shown. A cell that failed is not replayed.
"""

import json
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from nemotron_steps.environments.base import GradeResult, Response, Row, Session
from nemotron_steps.environments.code.sandboxed import SandboxedConfig, SandboxedEnvironment
from nemotron_steps.environments.text.math_with_judge import MathWithJudge, MathWithJudgeConfig
from nemotron_steps.sandbox import Limits, Outcome
from nemotron_steps.sandbox.base import MIB

TOOL = "stateful_python_code_exec"
TOOL_SPEC: dict[str, Any] = {
    "type": "function",
    "name": TOOL,
    "description": "Run Python code in a stateful notebook and return its output.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Code to run"}},
        "required": ["code"],
    },
    "strict": True,
}
SHOWN = 10_000

NOTEBOOK = r"""
import ast, contextlib, io, json, sys, traceback
job = json.loads(open("cells.json").read())
space = {"__name__": "__main__"}

def run(cell):
    tree = ast.parse(cell)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), space)
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), "<cell>", "eval"), space)
        if value is not None:
            print(repr(value))

for cell in job["before"]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            run(cell)
        except BaseException:
            pass
try:
    run(job["cell"])
except BaseException:
    print("".join(traceback.format_exc(limit=-1)), end="")
    sys.stdout.flush()
    sys.exit(1)
"""


class NsToolsConfig(MathWithJudgeConfig, SandboxedConfig):
    """Settings."""

    max_tool_calls: int = Field(64, ge=1)
    """Of one rollout; further ones are answered with an error."""
    tool_timeout_s: float = Field(120.0, gt=0.0)
    """Of one call."""
    tool_memory_mib: int = Field(2048, gt=0)
    """Of one call."""


class NsTools(MathWithJudge, SandboxedEnvironment):
    """See the module docstring. A row has `question` and `expected_answer`, texts."""

    name: ClassVar[str] = "ns_tools"
    config_class = NsToolsConfig
    config: NsToolsConfig

    async def seed(self, row: Row) -> Session:
        return Session(tools=self.tools_of(row), state={"cells": [], "calls": 0})

    def tools_of(self, row: Row) -> list[dict[str, Any]]:
        return super().tools_of(row) or [TOOL_SPEC]

    async def seed_recorded(self, row: Row) -> Session:
        return await super().seed(row)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        state = session.state
        if name != TOOL:
            return f"error: no tool is named {name!r}; there is {TOOL}"
        code = arguments.get("code")
        if not isinstance(code, str):
            return "error: the argument `code` must be a string"
        if state["calls"] >= self.config.max_tool_calls:
            return f"error: the limit of {self.config.max_tool_calls} tool calls is used up"
        state["calls"] += 1
        seconds, memory = self.config.tool_timeout_s, self.config.tool_memory_mib * MIB
        limits = Limits(wall_s=seconds, cpu_s=int(seconds) + 1, memory_bytes=memory)
        files = {"cells.json": json.dumps({"before": state["cells"], "cell": code})}
        result = await self.sandbox.run(code=NOTEBOOK, files=files, limits=limits)
        if result.outcome is Outcome.EXITED and result.exit_code == 0:
            state["cells"].append(code)
        shown = result.stdout[:SHOWN] + ("\n[output cut]" if len(result.stdout) > SHOWN else "")
        if result.outcome is not Outcome.EXITED:
            return f"{shown}\nerror: stopped by {result.outcome.value.replace('_', ' ')}".strip()
        return shown or result.stderr[-SHOWN:]

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        verdict = await super().verify(row, response, session)
        calls = float(session.state["calls"]) if session.state else float(len(response.tool_calls))
        return replace(verdict, components={**verdict.components, "tool_calls": calls})
