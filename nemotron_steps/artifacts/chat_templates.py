"""What a chat template writes of messages and tools, told by writing some, without transformers.

A template that refuses a role, breaks over it or leaves its text out does not write it. Templates run in Jinja's
sandbox, with what transformers gives them.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from nemotron_steps.config.turn_ends import TOOL, Render
from nemotron_steps.errors import ArtifactError

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT = "marked words"
_CALL = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"at": "x"}}}
_ASK = {"role": "user", "content": "ask"}
_CHATS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": _TEXT}, _ASK],
    "developer": [{"role": "developer", "content": _TEXT}, _ASK],
    "user": [{"role": "user", "content": _TEXT}],
    "assistant": [_ASK, {"role": "assistant", "content": _TEXT}, _ASK],
    "tool": [
        _ASK,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _TEXT, "name": "look", "tool_call_id": _CALL["id"]},
    ],
}


def chat_template(folder: Path) -> str | None:
    """The template of a model's folder: chat_template.jinja, or that of tokenizer_config.json; None without one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8") or None
        except UnicodeDecodeError as error:
            raise ArtifactError(
                "the chat template is not text",
                where=str(path),
                expected="UTF-8",
                found=f"byte 0x{error.object[error.start]:02x} at {error.start}",
                hints=(f"iconv -f ISO-8859-1 -t UTF-8 {shlex.quote(str(path))}",),
            ) from error
    try:
        found = json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) and found else None


@lru_cache(maxsize=16)
def renderer(template: str, eos_token: str = "") -> Render | None:
    """What a template writes; None where it cannot be read."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`: marks what the assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: form}
    words = {**dict.fromkeys(("bos_token", "pad_token", "unk_token"), ""), "eos_token": eos_token}
    try:
        compiled = environment.from_string(template)
    except TemplateError:
        return None
    return lambda messages, tools, generation_prompt: compiled.render(
        messages=messages, tools=list(tools) or None, add_generation_prompt=generation_prompt, **words
    )


@lru_cache(maxsize=16)
def roles_written(template: str) -> tuple[str, ...]:
    """Those of ROLES whose messages a template writes; none where it cannot be read."""
    return tuple(role for role, messages in _CHATS.items() if _shows(template, _TEXT, messages))


@lru_cache(maxsize=16)
def writes_tools(template: str) -> bool:
    """Whether a template writes the tools that a question comes with."""
    return _shows(template, str(TOOL["name"]), [_ASK], [{"type": "function", "function": TOOL}])


def _shows(template: str, text: str, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> bool:
    render = renderer(template)
    try:
        return render is not None and text in render(messages, tools, True)
    except Exception:  # a template may break in any way; with this role it cannot be used
        return False
