"""The one place where an error becomes text, JSON and an exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.secrets import MASK, may_be_secret, redact_text
from nemotron_steps.errors import InterruptedRunError, RequestError, StepsError, UnknownNameError
from nemotron_steps.session.jobs import printable

_CHANGE = re.compile(r"-[a-z]|--[a-z]|[+~]*[A-Za-z_][\w./-]*=")
"""How a hint begins that belongs to the command that was typed: with a flag or an override."""
_OF_A_HOME = re.compile(r"steps (?:run|plan|runs|watch|logs|status|cancel|report|index|artifacts|publish)\b")
_ALIKE = {"--config": "-c", "--run": "-r", "--batch": "-r", "-b": "-r"}
"""Flags, and those that they stand in place of."""
SWITCHES = {"-h", "--help", "--version", "--force", "--force-squash", "-d", "--dry-run", "--json", "--why", "--tree"}
SWITCHES |= {"--once", "--samples", "-f", "--follow", "--public", "--rows"}
"""Flags that take no value."""
_REPEATED = ("--input", "--over", "--ignore-checks", "--accept", "--judge", "--tag")


@dataclass(frozen=True)
class Typed:
    """A command line as it was typed."""

    prog: str
    """`steps`, `nemotron` or `nemotron steps`; `bash` where a script was typed."""
    words: tuple[str, ...]

    @staticmethod
    def of(prog: str, args: Sequence[str]) -> Typed:
        """A command line, or the script that made it: STEPS_TYPED_AS says how many of the last words are those typed
        after it, and its name. Not left to a job, whose command is its own."""
        last, _, script = os.environ.pop("STEPS_TYPED_AS", "").partition(" ")
        words = (script, *args[len(args) - int(last) :]) if script else (*args,)
        return Typed("bash" if script else prog, words)

    def hint(self, hint: str) -> str:
        """A hint that is a command of `steps`, as it is called here, with the home and, of a step to be run with a
        config, the profile that were named; in the words of the recipe that was typed."""
        if not hint.startswith("steps "):
            return hint
        command, mark, comment = hint.partition("   #")
        units = _units(self.words[: self.words.index("--")] if "--" in self.words else self.words)
        found = (re.match(r"--home[= ](.*)", " ".join(unit)) for unit in units)
        home = next((match[1] for match in found if match), None)
        if home is not None and "--home" not in command and _OF_A_HOME.match(command):
            command += f" --home {shlex.quote(home)}"
        name = "steps" if self.prog == "steps" else "nemotron steps"
        rest = command.removeprefix("steps")
        step = re.match(r" run (\S+) -c (\S+)", rest)
        if step is not None:
            rest = " ".join((rest, *map(shlex.quote, next((unit for unit in units if _what(unit) == ("-r",)), ()))))
            if self.prog == "nemotron":
                from nemotron_steps.cli.recipes import spelled

                recipe = spelled(self.words[0], step[1], step[2])
                name, rest = (recipe, rest[step.end() :]) if recipe else (name, rest)
        return f"{_uv()}{name}{rest}{mark}{comment}"

    def fields(self, error: StepsError) -> dict[str, Any]:
        """An error as JSON, with hints as `hint` has them."""
        fields = error.to_dict()
        for each in (fields, *fields.get("problems", ())):
            each["hints"] = [self.hint(hint) for hint in each["hints"]]
        return fields

    def with_change(self, hint: str, where: str | None) -> str | None:
        """The whole command as `changed` has it."""
        changed = self.changed(hint, where)
        if changed is None:
            return None
        prog = "python -m nemotron_steps.cli.main" if sys.argv[0].endswith("/cli/main.py") else self.prog
        return f"{_uv()}{prog} {shlex.join(changed.words)}"

    def changed(self, hint: str, where: str | None) -> Typed | None:
        """With the flags or overrides of a hint in the place of what they replace, or of what the error is about
        (`where`); None for a hint that is not of this kind, and where a word may hold a secret."""
        if not self.words or not _CHANGE.match(hint) or any(redact_text(word) != word for word in self.words):
            return None
        try:
            change = shlex.split(hint.partition("   #")[0])
        except ValueError:
            return None
        at = self.words.index("--") if "--" in self.words else len(self.words)
        kept, rest = _units(self.words[:at]), self.words[at:]
        wrong = (where or "").removeprefix("override '").removesuffix("'")
        for unit in kept:
            blamed = unit[0] == wrong or unit[0].endswith(f".{wrong}")
            if " ".join(unit) == where or (wrong not in ("", where) and len(unit) == 1 and blamed):
                kept.remove(unit)
                break
        for unit in _units(change):
            same = [each for each in kept if _what(each) == _what(unit)]
            if len(same) == 1 and len(unit) == len(same[0]) and unit[0].startswith("-"):
                same[0][1:] = unit[1:]
            else:
                kept = [each for each in kept if each not in same] + [unit]
        return replace(self, words=(*(word for unit in kept for word in unit), *rest))


def _units(words: Sequence[str]) -> list[list[str]]:
    """Words of a command line: a flag with its value, or any other word."""
    units: list[list[str]] = []
    for word in words:
        last = units[-1] if units else [""]
        waits = len(last) == 1 and last[0].startswith("-") and last[0] not in SWITCHES and "=" not in last[0]
        if waits and not word.startswith("-"):
            last.append(word)
        else:
            units.append([word])
    return units


def _what(unit: Sequence[str]) -> tuple[str, ...]:
    """What a unit sets: two that set the same cannot stand beside each other."""
    flag, equals, value = unit[0].partition("=")
    if not flag.startswith("-"):
        return (flag.lstrip("+~"),) if equals else tuple(unit)
    value = unit[1] if len(unit) > 1 else value
    flag = _ALIKE.get(flag, flag)
    return (flag, value.partition("=")[0] if flag == "--input" else value) if flag in _REPEATED else (flag,)


def _uv() -> str:
    """How commands begin in a project whose environment `uv run` finds."""
    return "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""


typed = [Typed("steps", ())]
"""The command line of this process."""

_KEY = re.compile(r"[+~-]*(?P<name>[A-Za-z_][\w./-]*)(?:[:=]|\s*:\s*(?P<after>.*)|\s+(?P<apart>.*))?", re.DOTALL)
"""A word that is a key and no override, or one with its value behind a colon or a space."""
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w./-]*=[^=]|\+*[A-Za-z_][\w/-]*(?:\.[\w/-]+)+=\Z|~[A-Za-z_][\w./-]*\Z")
"""How a word begins that is an override of its own, and not the value of the key before it: that may end with `==`, or,
if it has no dots, with `=`."""
_FLAG = re.compile(r"-[A-Za-z]|--[a-z]+(?:-[a-z]+)*")


def secrets_apart(words: Sequence[str]) -> Iterator[str]:
    """What may be values of secret keys of a command line that are not behind a `=`: each word (or part of one)
    up to the next override, but flags. They belong into no error."""
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
    """Print an error and return the exit code it means.

    Anything but a StepsError is a mistake in this program: one line says so, and the traceback goes to the run's log if
    there is one, else to stderr.
    """
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
        fields = typed[0].fields(error)
    else:
        name = type(error).__name__
        fields = {"code": "E999", "class": name, "what": printable(str(error)) or name, "where": location(error)}
        fields |= {"expected": None, "found": None, "hints": []}
    print_json({"error": _redacted(fields)})
    return exit_code(error)


def render(error: StepsError, out: Terminal, *, whole: bool = True, line: Typed | None = None) -> None:
    """An error as coloured text: every problem it carries, then itself.

    `whole`: the command that was typed may be shown, for nothing about it is masked. `line`: that command, where it is
    not as it was typed.
    """
    line = line or typed[0]
    whole = whole and MASK not in _clean(error.render())
    problems: tuple[StepsError, ...] = tuple(getattr(error, "problems", ()))
    if len(problems) == 1:
        render(problems[0], out, whole=whole, line=line)
        return
    for problem in problems:
        render(problem, out, whole=whole, line=line)
        out.print()
        if isinstance(problem, UnknownNameError) and problem.hints and problem.hints[0].startswith("-r "):
            line = line.changed(problem.hints[0], None) or line
    if isinstance(error, InterruptedRunError):
        out.print(out.style(_clean(error.what), "bold", "yellow"))
    else:
        mark = out.style(f"error[{error.code}]", "bold", "red")
        out.print(f"{mark}{out.style(': ' + _clean(error.what), 'bold')}")
    _field(out, "chain", " → ".join(getattr(error, "chain", ())) or None)
    if error.where is not None:
        out.print(f"  {out.style('-->', 'blue')} {_clean(error.where)}")
    _field(out, "expected", error.expected)
    _field(out, "found", error.found)
    for number, hint in enumerate(error.hints):
        shown = typed[0].hint(hint)
        if "UV_RUN_RECURSION_DEPTH" in os.environ:  # an environment that uv made has no pip of its own
            shown = shown.replace("pip install", "uv pip install", 1)
        out.print(f"  {out.style('hint:', 'cyan')} {_clean(shown)}")
        command = line.with_change(hint, error.where) if whole and number == 0 else None
        if command is not None:
            out.print(f"    {out.style('as in:', 'dim')} {_clean(command)}")


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


def _field(out: Terminal, name: str, text: str | None) -> None:
    if text is not None:
        label = out.style(f"{name}:".ljust(9), "dim")
        first, *rest = _clean(text).splitlines() or [""]
        out.print("\n".join([f"  {label} {first}", *(f"  {' ' * 9} {line}" for line in rest)]))


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def _clean(text: str) -> str:
    return printable(redact_text(text))
