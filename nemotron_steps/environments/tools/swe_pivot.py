"""swe_pivot: the next tool call of a coding agent against a recorded trajectory, tolerant of tool names and paths.

Three gates, cheapest first: the same tool or a tool of the same category; the same target (editor command and file,
shell program and paths); arguments similar by at least `similarity_full_credit`. The stricter reading of the same data
is single_step_tool_use with a threshold of 0.
"""

import json
import re
from difflib import SequenceMatcher
from typing import Any, ClassVar

from pydantic import Field

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response, ToolCall

_CATEGORY_TOOLS: dict[str, str] = {
    "edit": (
        "str_replace_editor text_editor file_editor code_editor edit_file modify_file update_file file_edit edit modify"
        " apply_patch patch_file apply_diff apply_changes write write_file save_file create_file"
    ),
    "bash": (
        "execute_bash run_bash bash_exec shell_run shell bash terminal shell_command shell_cmd run_shell_cmd"
        " exec_command exec_cmd"
    ),
    "search": (
        "grep search_text find_pattern text_search glob find_files file_glob match_files grep_files search_files"
        " find_in_files code_search list_dir ls show_dir ls_dir list_directory"
    ),
    "read": "read read_file view_file cat_file view file_view inspect show_file read_file_content",
    "finish": "finish submit",
    "think": "think",
    "planning": (
        "task_tracker todo_tracker plan_tracker todo_read todo_write update_plan list_tasks update_tasks read_todos"
        " write_todos edit_plan modify_plan"
    ),
}
CATEGORIES = {tool.replace("_", ""): category for category, tools in _CATEGORY_TOOLS.items() for tool in tools.split()}

SHELL_TARGET_FLOOR = 0.3
VIEWED_SHARE = 0.8
COMPARED_CHARACTERS = 2000
"""Similarity is quadratic in the length, so only so much of each text is compared."""

_PATH = re.compile(r"""(?:^|[\s='"(])((?:/[\w.-]+)+|\.{1,2}/[\w./-]+|[\w.-]+/[\w./-]+)""")


class SwePivotConfig(EnvironmentConfig):
    """Settings."""

    similarity_full_credit: float = Field(0.8, ge=0.0, le=1.0)
    """Arguments at least so similar (0 to 1) are the same."""


class SwePivot(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "swe_pivot"
    required_fields: ClassVar[tuple[str, ...]] = ("expected_action.name", "expected_action.arguments")
    config_class = SwePivotConfig
    config: SwePivotConfig

    def check_values(self, row: Row) -> None:
        if _expected(row).parsed_arguments() is None:
            raise RowError("expected_action.arguments", "a JSON object as text", repr(row["expected_action"])[:120])

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """1 if every gate is passed, else 0; `gate` in the details names the one that stopped it."""
        if not response.tool_calls:
            return GradeResult(0.0, details={"gate": "no_call"})
        expected, actual = _expected(row), response.tool_calls[0]
        wanted = expected.parsed_arguments() or {}
        given = actual.parsed_arguments()
        if given is None:
            return GradeResult(0.0, details={"gate": "arguments_not_json"})
        category = category_of(expected.name)
        same_tool = actual.name.lower() == expected.name.lower()
        if not same_tool and (category is None or category_of(actual.name) != category):
            return GradeResult(0.0, details={"gate": "tool"})
        if not same_target(category, wanted, given):
            return GradeResult(0.0, details={"gate": "target"})
        score = similarity(category, wanted, given)
        passed = score >= self.config.similarity_full_credit
        return GradeResult(float(passed), {"similarity": score}, details={"gate": "none" if passed else "similarity"})


def category_of(tool: str) -> str | None:
    """Category of a tool name in snake, camel or lower case; None if unknown."""
    return CATEGORIES.get(tool.lower().replace("_", ""))


def same_target(category: str | None, expected: dict[str, Any], actual: dict[str, Any]) -> bool:
    """Whether two calls of one category act on the same thing; what either side leaves open does not differ."""
    if category == "edit":
        commands = str(expected.get("command", "")), str(actual.get("command", ""))
        if all(commands) and commands[0] != commands[1]:
            return False
        if not _same_file(expected, actual, 2):
            return False
        ranges: list[Any] = [side.get("view_range") for side in (actual, expected)]
        known = all(isinstance(each, list) and [*map(type, each)] == [int, int] for each in ranges)
        if commands != ("view", "view") or not known:
            return True  # no range views the whole file
        (begin, end), (want_begin, want_end) = ranges
        overlap = max(0, min(end, want_end) - max(begin, want_begin))
        return bool(overlap / max(1, want_end - want_begin) >= VIEWED_SHARE)
    if category == "bash":
        first, second = _command(expected), _command(actual)
        if not first or not second:
            return True
        if len({command.split()[0].rsplit("/", 1)[-1] for command in (first, second)}) > 1:
            return False
        paths, others = _path_suffixes(first), _path_suffixes(second)
        if paths and others and not paths & others:
            return False
        return text_similarity(first, second) >= SHELL_TARGET_FLOOR
    return category not in ("search", "read") or _same_file(expected, actual, 3)


def similarity(category: str | None, expected: dict[str, Any], actual: dict[str, Any]) -> float:
    """Similarity in [0, 1] of what two calls would do, the worse of old and new text; 1 without content to compare."""
    if category == "edit":
        keys = ("old_str", "new_str")
        if any(key in side for side in (expected, actual) for key in keys):
            return min(text_similarity(str(expected.get(key) or ""), str(actual.get(key) or "")) for key in keys)
        return text_similarity(*(_first_of(side, _CONTENT) for side in (expected, actual)))
    if category == "bash":
        return text_similarity(_command(expected), _command(actual))
    return 1.0


def text_similarity(first: str, second: str) -> float:
    """Ratio of matching characters over the first COMPARED_CHARACTERS of each; 1 for two empty texts."""
    if first == second:
        return 1.0
    return SequenceMatcher(None, first[:COMPARED_CHARACTERS], second[:COMPARED_CHARACTERS]).ratio()


def _expected(row: Row) -> ToolCall:
    arguments = row["expected_action"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(row["expected_action"]["name"]), text)


_FILE = ("path", "file", "file_path", "filename", "file_name")
_CONTENT = ("patch", "diff", "content", "file_text")


def _first_of(arguments: dict[str, Any], keys: tuple[str, ...]) -> str:
    return next((str(arguments[key]) for key in keys if key in arguments), "")


def _command(arguments: dict[str, Any]) -> str:
    return _first_of(arguments, ("command", "cmd")).strip()


def _path_suffixes(command: str) -> set[str]:
    return {_suffix(path.rstrip("/"), 3) for path in _PATH.findall(command) if len(path) > 2} - {""}


def _suffix(path: str, parts: int) -> str:
    return "/".join(path.strip("/").split("/")[-parts:])


def _same_file(expected: dict[str, Any], actual: dict[str, Any], parts: int) -> bool:
    first, second = (_first_of(side, _FILE).strip() for side in (expected, actual))
    return not first or not second or _suffix(first, parts) == _suffix(second, parts)
