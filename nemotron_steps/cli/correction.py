"""A command with a slip in it, as it was probably meant: the first hint of the error about the slip."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nemotron_steps.config.redaction import MASK, is_secret_key, may_be_secret, redact_text
from nemotron_steps.config.secret_shapes import is_number
from nemotron_steps.errors import StepsError


def add_corrected_command(error: StepsError, prog: str, words: Sequence[str]) -> None:
    """Put the corrected command before the hints of an error, where one of its problems says what was meant.

    Args:
        prog: the program as it was called.
        words: what was typed after it.
    """
    problems: tuple[StepsError, ...] = tuple(getattr(error, "problems", ()))
    corrected = list(words)
    for each in (error, *problems):
        if each.meant is not None:
            corrected = _replaced(corrected, *each.meant)
    if corrected == list(words):
        return
    # The one problem of a request is shown in its place.
    shown = problems[0] if len(problems) == 1 else error
    hint = redact_text(" ".join(_quoted(_shown(word)) for word in [*prog.split(), *corrected]))
    if hint not in shown.hints:
        shown.hints = (hint, *shown.hints)


def _shown(word: str) -> str:
    """A word without its value, if it is an override whose key was probably meant for a secret one."""
    key, equals, _ = word.partition("=")
    return f"{redact_text(key)}={MASK}" if equals and may_be_secret(key.lstrip("+~")) else word


def _quoted(word: str) -> str:
    """A word as the shell wants it; Hydra's single quotes inside of double ones, which are easier to read."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\\\!') else shlex.quote(word)


def _replaced(words: list[str], typed: str, meant: str) -> list[str]:
    """The words with the first occurrence of `typed` replaced: a word, an override by its key, a REF.

    The value of a key that may be a secret's is neither shown nor given to a key that is none.

    What begins with `--input ` is an input that was given as an override, here with the step in front that it had.
    What ends with a space takes the next word with it: `("a.b ", "a.b=")` makes `a.b=4` of `a.b 4`, and of `a.b = 4`.
    """
    for at in range(len(words)):
        if meant.startswith("--input "):
            word = words[at].lstrip("+")
            stage = word.removesuffix(typed.lstrip("+"))
            if word != stage and stage[-1:] in ("", ".") and words[at - 1] != "--input":
                return [*words[:at], "--input", stage + meant.removeprefix("--input "), *words[at + 1 :]]
            continue
        if typed.endswith(" ") and words[at] == typed[:-1] and at + 1 < len(words):
            signed = words[at + 1] in ("=", ":", "==") and len(words) > at + 2
            after = words[at + 2 :] if signed else words[at + 1 :]
            if after[0].startswith("-") and not is_number(after[0]):  # a flag, or what may be none
                return words
            return [*words[:at], meant + after[0].removeprefix("="), *after[1:]]
        if words[at] == typed:
            return [*words[:at], *([meant] if meant else []), *words[at + 1 :]]
        head, equals, value = words[at].partition("=")
        if equals and typed.startswith("-") and head == typed:
            if may_be_secret(typed.lstrip("-")) and not may_be_secret(meant):
                return words
            return [*words[:at], f"{meant}={value}", *words[at + 1 :]]
        sign = head[: len(head) - len(head.lstrip("+~-"))]
        key = head.removeprefix(sign)
        if key == typed or key.endswith("." + typed):
            stage = key.removesuffix(typed)
            if may_be_secret(key) and meant and "=" not in meant:
                if not is_secret_key(meant):  # the value of a secret is not that of another key
                    return words
                value = MASK
            new = f"{sign}{stage}{meant}" if "=" in meant else f"{sign}{stage}{meant}{equals}{value}"
            return [*words[:at], *([new] if meant else []), *words[at + 1 :]]
        if equals and value == typed:
            return [*words[:at], f"{head}={meant}", *words[at + 1 :]]
    return words
