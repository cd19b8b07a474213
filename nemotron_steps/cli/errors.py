"""The one place where an error becomes text, JSON and an exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.secrets import may_be_secret, redact, redact_text
from nemotron_steps.errors import InterruptedRunError, RequestError, StepsError
from nemotron_steps.session.jobs import printable

_OF_A_HOME = re.compile(r"steps (?:run|plan|runs|watch|logs|status|cancel|report|index|artifacts|publish|home|gc)\b")
_PROFILE = ("-r", "--run", "-b", "--batch")
_typed = ["steps"]
"""The program of this process (`steps`, `nemotron` or `nemotron steps`), and the words behind it."""


def typed_as(prog: str, words: Sequence[str]) -> None:
    """Remember the command line of this process."""
    _typed[:] = [prog, *words]


def called(hint: str) -> str:
    """A hint that is a command of `steps` as it is called here, with the home and the profile that were named."""
    if not hint.startswith("steps "):
        return hint
    command, mark, comment = hint.partition("   #")
    prog, *words = _typed
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        given = [word] if equals else words[at : at + 2]
        if flag == "--home" and flag not in command and _OF_A_HOME.match(command):
            command += f" --home {shlex.quote(value or given[-1])}"
        elif flag in _PROFILE and re.match(r"steps run \S+ -c \S+", command):
            command += f" {shlex.join(given)}"
    uv = "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""
    name = "steps" if prog == "steps" else "nemotron steps"
    return f"{uv}{name}{command.removeprefix('steps')}{mark}{comment}"


def error_fields(error: StepsError) -> dict[str, Any]:
    """An error as JSON, with hints as `called` has them."""
    fields = error.to_dict()
    for each in (fields, *fields.get("problems", ())):
        each["hints"] = [called(hint) for hint in each["hints"]]
    return fields


_KEY = re.compile(r"[+~-]*(?P<name>[A-Za-z_][\w./-]*)(?:[:=]|\s*:\s*(?P<after>.*)|\s+(?P<apart>.*))?", re.DOTALL)
"""A word that is a key and no override, or one with its value behind a colon or a space."""
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w./-]*=[^=]|\+*[A-Za-z_][\w/-]*(?:\.[\w/-]+)+=\Z|~[A-Za-z_][\w./-]*\Z")
"""How a word begins that is an override of its own, and not the value of the key before it: that may end with `==`, or,
if it has no dots, with `=`."""
_FLAG = re.compile(r"-[A-Za-z]|--[a-z]+(?:-[a-z]+)*")


def secrets_apart(words: Sequence[str]) -> Iterator[str]:
    """What of a command line may be values of secret keys, not behind a `=`: they belong into no error."""
    after_secret = False
    for word in words:
        key = _KEY.fullmatch(word)
        if key is not None and may_be_secret(key["name"].replace("/", ".")):
            after_secret = True
            yield (key["after"] or key["apart"] or "")
        elif _OVERRIDE.match(word):
            after_secret = False
        elif after_secret and not _FLAG.fullmatch(word):
            yield word.strip("=")


def exit_code(error: BaseException) -> int:
    """The exit code an error means."""
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRunError.exit_code
    return error.exit_code if isinstance(error, StepsError) else 1


def report(error: BaseException, *, as_json: bool) -> int:
    """Print an error and return its exit code. Anything but a StepsError is a mistake in this program."""
    if isinstance(error, KeyboardInterrupt):
        error = InterruptedRunError("interrupted", hints=("run the same command again to go on",))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        # Whatever it was meant to be, only what the user typed is that long.
        name = str(error.filename or "")
        error = RequestError(
            "a name is longer than a file's can be",
            expected="at most 255 bytes between two slashes",
            found=name if len(name) <= 80 else name[:77] + "...",
        )
    if not as_json:
        show = render if isinstance(error, StepsError) else _render_unexpected
        show(error, Terminal.of(sys.stderr))  # type: ignore[arg-type]
        return exit_code(error)
    if isinstance(error, StepsError):
        fields = error_fields(error)
    else:
        name = type(error).__name__
        fields = {"code": "E999", "class": name, "what": printable(str(error)) or name, "where": location(error)}
        fields |= {"expected": None, "found": None, "hints": []}
    print_json({"error": redact(fields)})
    return exit_code(error)


def render(error: StepsError, out: Terminal) -> None:
    """An error as coloured text: every problem it carries, then itself."""
    problems: tuple[StepsError, ...] = tuple(getattr(error, "problems", ()))
    if len(problems) == 1:
        render(problems[0], out)
        return
    for problem in problems:
        render(problem, out)
        out.print()
    if isinstance(error, InterruptedRunError):
        out.print(out.style(_clean(error.what), "bold", "yellow"))
    else:
        mark = out.style(f"error[{error.code}]", "bold", "red")
        out.print(f"{mark}{out.style(': ' + _clean(error.what), 'bold')}")
    if error.where is not None:
        out.print(f"  {out.style('-->', 'blue')} {_clean(error.where)}")
    chain = " → ".join(getattr(error, "chain", ()))
    for name, text in (("chain", chain or None), ("expected", error.expected), ("found", error.found)):
        if text is not None:
            label = out.style(f"{name}:".ljust(9), "dim")
            first, *rest = _clean(text).splitlines() or [""]
            out.print("\n".join([f"  {label} {first}", *(f"  {' ' * 9} {line}" for line in rest)]))
    for hint in error.hints:
        shown = called(hint)
        if "UV_RUN_RECURSION_DEPTH" in os.environ:  # an environment that uv made has no pip of its own
            shown = shown.replace("pip install", "uv pip install", 1)
        out.print(f"  {out.style('hint:', 'cyan')} {_clean(shown)}")


def location(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of an exception."""
    trace = error.__traceback__
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def print_json(value: Any) -> int:
    """The only thing `--json` writes to stdout. The exit code, 0."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2, default=str) + "\n")
    return 0


def _render_unexpected(error: BaseException, out: Terminal) -> None:
    import traceback

    head = out.style("internal error", "bold", "red")
    out.print(f"{head}: {type(error).__name__}: {_clean(str(error))}")
    where = location(error)
    if where is not None:
        out.print(f"  {out.style('-->', 'blue')} {where}")
    log = getattr(error, "log_path", None)
    if log is not None:
        out.print(f"  {out.style('hint:', 'cyan')} the traceback is in {log}")
        return
    for line in "".join(traceback.format_exception(error)).splitlines():
        out.print(out.style(_clean(line), "dim"))
    out.print(f"  {out.style('hint:', 'cyan')} steps doctor")


def _clean(text: str) -> str:
    return printable(redact_text(text))
