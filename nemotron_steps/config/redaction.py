"""Secrets never reach a screen, a log or a run folder.

A value is masked when the name of its key says that it is secret (`secret_names`); when it is the content of an
environment variable whose name says so, wherever it turns up; or when it looks like a secret (`secret_shapes`). What a
config read from any other variable (`${oc.env:NAME}`) is shown as that, unless it is plainly harmless.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nemotron_steps.config.secret_names import Strength, is_secret_key, strength
from nemotron_steps.config.secret_shapes import MASK, is_number, is_special_token, looks_random, mask_shapes

__all__ = [
    "MASK",
    "Redactor",
    "is_secret_key",
    "mask",
    "masking",
    "may_be_secret",
    "note_variables",
    "redact",
    "redact_text",
    "secrets_in",
    "shown_override",
]

_SHORTEST = 6
"""Values shorter than this are not masked by value: they would hit ordinary words and numbers."""
_NAME_KEYS = ("name", "key", "variable")
"""Keys beside a `value` that say what it is: `{"name": "HF_TOKEN", "value": "x"}`."""

_USUAL = ("api_key", "apikey", "token", "hf_token", "auth_token", "access_token", "password", "passwd", "secret")
"""What a misspelled key may have been meant for."""

_interpolated: set[str] = set()
_masked_words: frozenset[str] = frozenset()


def note_variables(names: Iterable[str]) -> None:
    """Remember that a config of this process reads these environment variables."""
    _interpolated.update(names)


@contextmanager
def masking(words: Iterable[str]) -> Iterator[None]:
    """While it lasts these are masked too, however short, wherever they are no part of a longer word."""
    global _masked_words
    before = _masked_words
    _masked_words = before | {word for word in words if word}
    try:
        yield
    finally:
        _masked_words = before


def mask(key: str, value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """One value as it may be shown under `key`."""
    return Redactor.of(environment).mask({key: value})[key]


def redact(values: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A copy of plain values (mappings, lists, scalars) with every secret masked.

    Args:
        environment: where values of secret variables are looked up; default: this process's.
    """
    return Redactor.of(environment).mask(values)


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Text (a log line, an override, a command) with every secret masked.

    When the text as a whole is `key=value`, everything after the sign is the value, spaces included.
    """
    return Redactor.of(environment).mask_text(text)


def shown_override(text: str, *meant: str) -> str:
    """A refused override as it may be shown: without its value if that may be a secret.

    Args:
        meant: other keys that it may have been meant for.
    """
    key, equals, value = text.partition("=")
    if not equals:
        apart = re.match(r"[+~-]*([\w.-]+)(?:\s*:|\s)\s*(?=\S)", text)
        return f"{apart[0]}{MASK}" if apart is not None and may_be_secret(apart[1]) else redact_text(text)
    names = (key.lstrip("+~"), *meant)
    if may_be_secret(names[0]) or any(map(is_secret_key, meant)) or looks_random(value):
        return f"{redact_text(key)}={MASK}"
    return redact_text(text)


def may_be_secret(key: str) -> bool:
    """Whether a key that someone typed names a secret, or was probably meant to."""
    from difflib import get_close_matches

    name = key.rpartition(".")[2].lower().replace("-", "_")
    return is_secret_key(key) or bool(get_close_matches(name, _USUAL, n=1, cutoff=0.8))


class Redactor:
    """What to replace, found once for many texts.

    Args:
        environment: variables; those whose names are secret, and what configs read from them, are masked by value.
        secrets: further values to mask wherever they turn up.
    """

    def __init__(self, environment: Mapping[str, str], secrets: Iterable[str] = ()) -> None:
        found = dict.fromkeys(secrets, MASK)
        for name, value in environment.items():
            if strength(name) >= Strength.TEXT:
                found[value] = MASK
            elif name in _interpolated and not _is_harmless(value):
                found.setdefault(value, f"${{oc.env:{name}}}")
        kept = [value for value in found if len(value) >= _SHORTEST and not _is_path(value)]
        self._replaced = [(value, found[value]) for value in sorted(kept, key=len, reverse=True)]
        words = "|".join(re.escape(word) for word in sorted(_masked_words, key=len, reverse=True))
        self._words = re.compile(rf"(?<!\w)(?:{words})(?!\w)") if words else None

    @classmethod
    def of(cls, environment: Mapping[str, str] | None) -> Redactor:
        """That of an environment; None for this process's."""
        return cls(os.environ if environment is None else environment)

    def mask(self, value: Any) -> Any:
        """A copy of plain values with every secret masked."""
        if isinstance(value, Mapping):
            return self._mask_mapping(value)
        if isinstance(value, list | tuple):
            return self._mask_list(value)
        return self._mask_inside(value) if isinstance(value, str) else value

    def mask_text(self, text: str) -> str:
        """Text with every secret masked; see redact_text."""
        key, equals, value = text.partition("=")
        if equals and not re.search(r"\s", key) and _is_secret(key.lstrip("+~"), value):
            return f"{self._mask_inside(key)}={MASK}"  # a URL's parameter, and what is secret before it
        return self._mask_inside(text)

    def _mask_mapping(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        shown = {key: MASK if _is_secret(str(key), item) else self.mask(item) for key, item in values.items()}
        if "value" in values and any(_is_secret(str(values.get(name)), values["value"]) for name in _NAME_KEYS):
            shown["value"] = MASK
        return shown

    def _mask_list(self, values: Sequence[Any]) -> list[Any]:
        shown: list[Any] = []
        flag = ""
        for item in values:
            shown.append(MASK if flag and _is_secret(flag, item) else self.mask(item))
            flag = _flag(item)
        return shown

    def _mask_inside(self, text: str) -> str:
        for secret, shown in self._replaced:
            text = text.replace(secret, shown)
        if self._words is not None:
            text = self._words.sub(MASK, text)
        return mask_shapes(text)


def secrets_in(values: Any) -> Iterator[str]:
    """Every text in plain values, and in overrides among them, that is secret by the name it has there."""
    if isinstance(values, Mapping):
        named = any(_is_secret(str(values.get(name)), values.get("value")) for name in _NAME_KEYS)
        for key, item in values.items():
            secret = _is_secret(str(key), item) or (named and key == "value")
            yield from _texts(item) if secret else secrets_in(item)
    elif isinstance(values, list | tuple):
        flag = ""
        for item in values:
            yield from _texts(item) if flag and _is_secret(flag, item) else secrets_in(item)
            flag = _flag(item)
    elif isinstance(values, str):
        key, equals, value = values.partition("=")
        if equals and _is_secret(key.lstrip("+~-"), value):
            yield from (value, value.strip("'\""))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _flag(word: Any) -> str:
    """A word of a command if it is a flag whose value may be the next word (`--api-key x`), else nothing."""
    return word if isinstance(word, str) and re.fullmatch(r"--?[A-Za-z][\w-]*", word) else ""


def _is_secret(key: str, value: Any) -> bool:
    """Whether a value under a key is masked as a whole."""
    says = strength(key)
    if says is Strength.NONE or value is None or value == "" or isinstance(value, bool):
        return False
    if says is Strength.ANY:
        return True
    if isinstance(value, str):
        if is_special_token(value) or is_number(value):
            return False
        return says is Strength.TEXT or looks_random(value)
    return says is Strength.TEXT and not isinstance(value, int | float)


def _is_harmless(value: str) -> bool:
    """Whether what a config read from a variable that is not called secret is plainly none: a number, a URL (whose own
    secrets are masked), a path, a model's name."""
    path = re.match(r"(?:~|\.\.?)?/\w", value) and not any(map(looks_random, value.split("/")))
    if is_number(value) or "://" in value or path:
        return True
    hub_name = re.fullmatch(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*", value)
    return hub_name is not None and not re.fullmatch(r"[A-Za-z0-9/]{36,}", value)


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~/", "./", "../")) and os.path.exists(os.path.expanduser(value))
