"""The harness of `swe_agent`: what the agent is told, its three tools, and what they answer. No processes here.

    bash(command)                       a shell command in the repository's folder; nothing it starts outlives it
    view(path, view_range?)             a file with line numbers, or what a folder holds
    edit(path, old_str, new_str)        replaces the one place where old_str occurs; an empty old_str makes a new file

A turn without a tool call ends the rollout. The texts are functions of files' contents, so that demonstrations can be
written without running anything (steps/data_prep/swe/demonstrations.py).
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from nemotron_steps.sandbox.base import Outcome, SandboxResult

_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*?)(?: - .*)?$", re.MULTILINE)
# A test with a docstring has its first line before the dots.
_UNITTEST = re.compile(
    r"^(\w+ \([\w.]+\))(?:\n[^\n]*?)? \.\.\. (ok|FAIL|ERROR|skipped|expected failure|unexpected success)", re.MULTILINE
)
_GOOD = frozenset({"PASSED", "XFAIL", "ok", "expected failure"})
_NEUTRAL = frozenset({"SKIPPED", "skipped"})


def test_run(output: str) -> tuple[frozenset[str], frozenset[str]]:
    """Tests that `pytest -rA` or `unittest -v` says have passed and nothing else, and those of which it says (also)
    something else. The code under test may print what it likes: this is only a claim (blinding.py has the proof)."""
    found = [(name, status) for status, name in _PYTEST.findall(output)]
    found += [(dotted(name), status) for name, status in _UNITTEST.findall(output)]
    good = {name for name, status in found if status in _GOOD}
    bad = {name for name, status in found if status not in _GOOD | _NEUTRAL}
    return frozenset(good - bad), frozenset({name for name, status in found if status not in _GOOD})


def dotted(name: str) -> str:
    """`test_a (m.C)`, as unittest before Python 3.11 and SWE-bench write it, or `test_a (m.C.test_a)`: `m.C.test_a`."""
    found = re.fullmatch(r"(\w+) \(([\w.]+)\)", name)
    return f"{found[2].removesuffix(f'.{found[1]}')}.{found[1]}" if found else name


def tests_of(row: Any, key: str) -> frozenset[str]:
    """FAIL_TO_PASS or PASS_TO_PASS of a row: a list, or one as JSON text."""
    value = row.get(key) or []
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} must be a list of names")
    return frozenset(map(dotted, value))


def _tool(name: str, description: str, required: dict[str, str], optional: dict[str, Any] | None = None) -> Any:
    texts = {key: {"type": "string", "description": said} for key, said in required.items()}
    parameters = {"type": "object", "properties": {**texts, **(optional or {})}, "required": list(required)}
    tool = {"type": "function", "name": name, "description": description}
    return {**tool, "parameters": parameters, "strict": False}


_PATH, _RANGE = "relative to the repository", "first and last line; -1 for the end of the file"
TOOLS: tuple[dict[str, Any], ...] = (
    _tool("bash", "Run a shell command in the repository.", {"command": "the command"}),
    _tool(
        "view",
        "Show a file with line numbers, or what a folder holds.",
        {"path": _PATH},
        {"view_range": {"type": "array", "items": {"type": "integer"}, "description": _RANGE}},
    ),
    _tool(
        "edit",
        "Replace text in a file. An empty old_str makes a new file.",
        {"path": _PATH, "old_str": "text that occurs exactly once", "new_str": "what replaces it"},
    ),
)

PROMPT = """\
Fix this issue in the repository of the current folder. Hidden tests check its files once you are done. \
Answer without a tool call when you are done.

{issue}"""

GONE = "error: the working copy is gone: a command has ended it"


def task_prompt(issue: str) -> str:
    """The user message that sets an agent to work."""
    return PROMPT.format(issue=issue.strip())


def view_text(path: str, content: str, view_range: Any = None) -> str:
    """A file as `view` shows it."""
    lines = content.split("\n")
    if lines[-1] == "":
        lines.pop()
    first, last = 1, len(lines)
    if view_range is not None:
        if not isinstance(view_range, Sequence) or [*map(type, view_range)] != [int, int]:
            return "error: view_range must be two integers, the first and the last line"
        first, last = view_range[0], len(lines) if view_range[1] == -1 else min(view_range[1], len(lines))
        if not 1 <= first <= last:
            return f"error: {path} has lines 1 to {len(lines)}"
    return "".join(f"{number}\t{lines[number - 1]}\n" for number in range(first, last + 1)) or f"{path} is empty"


def replaced(path: str, content: str, old: str, new: str) -> tuple[str | None, str]:
    """What `edit` does to a file: (new content or None, what it answers)."""
    count = content.count(old)
    if count != 1:
        return None, f"error: old_str occurs {count} times in {path}, not once"
    line = content[: content.index(old)].count("\n") + 1
    return content.replace(old, new), f"edited {path} at line {line}"


def command_text(result: SandboxResult, limit: int) -> str:
    """What `bash` answers: output, how it ended where that was not with 0."""
    shown = shortened(result.stdout + result.stderr, limit)
    if result.outcome is Outcome.TIMEOUT:
        shown += f"\n[stopped after {result.wall_s:.0f} s]"
    elif result.outcome is not Outcome.EXITED:
        shown += f"\n[stopped by {result.outcome.value.replace('_', ' ')}]"
    elif result.exit_code:
        shown += f"\n[exit code {result.exit_code}]"
    return shown.strip("\n") or "[no output]"


def shortened(text: str, limit: int) -> str:
    """The begin and the end of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
