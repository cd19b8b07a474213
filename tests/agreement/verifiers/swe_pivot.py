"""swe_pivot."""

from __future__ import annotations

import json
import random
from typing import Any

from nemotron_steps.environments.responses import message_item, reasoning_item
from nemotron_steps.environments.tools.swe_pivot import CATEGORIES, category_of
from tests.agreement.answers import THOUGHTS, Items, call_item, mutated_text, mutated_value, pick
from tests.agreement.compare import Rule
from tests.agreement.gym import Gym
from tests.agreement.rows import asking, read

MADE = (
    ("think", {"thought": "The bug is in the parser."}),
    ("finish", {"message": "Done: the parser handles empty lines."}),
    ("read_file", {"path": "/workspace/proj/src/core/models.py"}),
    ("grep", {"pattern": "def total", "path": "/workspace/proj/src"}),
    ("apply_patch", {"patch": "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"}),
    ("update_plan", {"plan": ["look", "mend", "test"]}),
    ("write_file", {"path": "src/a/b.py", "content": "import os\n\n\ndef main():\n    return os.getcwd()\n"}),
    ("execute_bash", {"command": "cd /workspace/proj && python -m pytest tests/test_a.py tests/test_b.py -x -q"}),
    ("str_replace_editor", {"command": "insert", "path": "/w/p/a.py", "insert_line": 4, "new_str": "    return 1\n"}),
    ("str_replace_editor", {"command": "undo_edit", "path": "/w/p/a.py"}),
)


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    actions = [{"type": "function_call", "name": name, "arguments": json.dumps(given)} for name, given in MADE]
    return [*read(gym.data("swe_pivot")), *(asking("Mend it.", expected_action=action) for action in actions)]


def _file(arguments: dict[str, Any], rng: random.Random) -> None:
    key = next((key for key in ("path", "file_path") if key in arguments), None)
    if key is not None:
        path = str(arguments[key])
        last = path.rsplit("/", 1)[-1]
        arguments[key] = rng.choice((f"/testbed{path}", path.lstrip("/"), f"/other/{last}", last, f"{path}x"))


def _shell(arguments: dict[str, Any], rng: random.Random) -> None:
    if "command" in arguments and " " in arguments["command"]:
        command = arguments["command"]
        changed = (f"{command} | head -50", f"cd /workspace && {command}", command.replace("/workspace", "/repo"), "ls -la")
        arguments["command"] = rng.choice((*changed, mutated_text(command, rng), command.split()[0], ""))


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    name, arguments = row["expected_action"]["name"], json.loads(row["expected_action"]["arguments"])
    kinds = {"right": 25, "mutated": 25, "another file": 10, "another command": 10, "text changed": 10, "no arguments": 3}
    kinds |= {"another tool": 6, "tool of its category": 6, "broken JSON": 2, "a message": 4, "other lines": 4, "two calls": 4}
    kind = pick(rng, kinds)
    if kind == "mutated":
        arguments = mutated_value(arguments, rng)
    elif kind == "another file":
        _file(arguments, rng)
    elif kind == "another command":
        _shell(arguments, rng)
    elif kind == "text changed":
        key = rng.choice(list(arguments))
        arguments[key] = mutated_text(arguments[key], rng) if isinstance(arguments[key], str) else arguments[key]
    elif kind == "no arguments":
        arguments = {}
    elif kind == "another tool":
        name = rng.choice(("execute_bash", "think", "str_replace_editor", "unknown_tool", "read_file"))
    elif kind == "tool of its category":
        name = rng.choice([tool for tool, category in CATEGORIES.items() if category == category_of(name)])
    elif kind == "other lines":
        arguments["view_range"] = rng.choice(([1, 100], [41, 80], [60, 90], "[40, 80]", [40, 80], None, ["40", "80"]))
    text = json.dumps(arguments)
    if kind == "broken JSON":
        text = rng.choice((text[:-1], text.replace('"', "'"), ""))
    if kind == "a message":
        return kind, [message_item(f"I would call {name} with {text}.")]
    items = [call_item(name, text)]
    if kind == "two calls":
        items.insert(rng.randrange(2), call_item("think", '{"thought": "hm"}', 1))
    before = pick(rng, {"bare": 5, "reasoning item": 4, "message before": 3})
    if before == "reasoning item":
        items.insert(0, reasoning_item(rng.choice(THOUGHTS)))
    elif before == "message before":
        items.insert(0, message_item("I look at the file first."))
    return f"{kind}, {before}", items


def theirs(gym: Gym) -> Any:
    return gym.grader("swe_pivot", "SwePivot")


RULES = ()
