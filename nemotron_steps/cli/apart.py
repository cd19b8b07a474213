"""Overrides without a `=` where it belongs: `key VALUE`, `key: VALUE`, `key:VALUE`, `key= VALUE`, `key =VALUE`.

Their parts would be taken for steps, and an error about a step says its name: where the key is a secret's, that would
be the secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nemotron_steps.cli.parser import UsageError
from nemotron_steps.config.names import ALIKE
from nemotron_steps.config.redaction import may_be_secret
from nemotron_steps.config.secret_names import Strength, strength
from nemotron_steps.config.secret_shapes import is_number

if TYPE_CHECKING:
    from nemotron_steps.cli.request import Workbench

_NAME = r"(?P<prefix>[+~-]*)(?P<name>[A-Za-z_][\w-]*(?:[./]+[\w-]+)*)"
_SIGNS = ("=", ":", "==")
_KEY = re.compile(rf"{_NAME}(?P<sign>[:=]?)")
_PAIR = re.compile(rf"{_NAME}(?:\s*:|\s)\s*(?P<value>[^:=\s].*)", re.DOTALL)
"""`key:VALUE`, which may be `PACK:ID` as well, and in quotes `key VALUE` and `key: VALUE`."""
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w./-]*=[^=]|\+*[A-Za-z_][\w/-]*(?:\.[\w/-]+)+=\Z|~[A-Za-z_][\w./-]*\Z")
"""How a word begins that is an override of its own, and not the value of the key before it: that may end with `==`, or,
if it has no dots, with `=`."""
_EMPTY = re.compile(r"\+*[A-Za-z_][\w./-]*=\Z")
_FLAG = re.compile(r"-[A-Za-z]|--[a-z]+(?:-[a-z]+)*(?:=.*)?", re.DOTALL)


def require_together(words: Sequence[str], bench: Workbench) -> None:
    """Refuse words that are parts of one override, or one without its `=`.

    Raises UsageError, without the value.
    """
    for at, word in enumerate(words):
        found = _written_apart(word, words[at + 1 :], bench)
        if found is None:
            continue
        name, meant = found
        raise UsageError(
            f"'{name}' and its value are no override",
            expected="KEY=VALUE in one word, in quotes if it has spaces",
            hints=("steps run --help",),
            meant=meant,
        )


def _written_apart(word: str, after: Sequence[str], bench: Workbench) -> tuple[str, tuple[str, str]] | None:
    """The key that a word begins an override with, whose value is not where it belongs, and what was meant."""
    pair = _PAIR.fullmatch(word)
    if pair is not None and (_may_be_secret(pair["name"]) or ("." in pair["name"] and "/" not in pair["value"])):
        return None if _is_step(word, bench) else (pair["name"], (word, f"{pair['name']}={pair['value']}"))
    key = _KEY.fullmatch(word)
    if key is None or not after or _OVERRIDE.match(after[0]):
        return None
    name, sign = key["name"], key["sign"]
    secret = _may_be_secret(name)
    if sign == "=" and not secret and _EMPTY.fullmatch(after[0]):
        return None
    if not (secret or "." in name or sign) or (key["prefix"] == "~" and not secret):
        return None
    signed = after[0].startswith("=") or after[0] == ":"
    if not signed and (_is_step(word, bench) or _is_step(after[0], bench)):
        return None
    if not (signed or secret or sign) and _nearly_a_step(name, bench):
        return None
    return name, (f"{word} ", f"{key['prefix'].strip('~-')}{name}=")


def _may_be_secret(name: str) -> bool:
    return may_be_secret(name.replace("/", "."))


def _is_step(word: str, bench: Workbench) -> bool:
    """Whether a word names a step or a pipeline, be it one that does not load."""
    registry = bench.registry
    if word.endswith(".toml") or word in registry.broken:
        return True
    return registry.find_step(word) is not None or registry.find_pipeline(word) is not None


def _nearly_a_step(word: str, bench: Workbench) -> bool:
    """Whether a word is a slip of a step's name: `toy.train`."""
    from difflib import get_close_matches

    names = (*bench.registry.steps, *bench.registry.pipelines)
    return bool(
        get_close_matches(word.replace("/", "."), [name.replace("/", ".") for name in names], n=1, cutoff=ALIKE)
    )


def key_meant(flag: str) -> str | None:
    """The key of a config that was written as a flag: `--a.b`, or any whose name may be a secret's."""
    name = flag.partition("=")[0].lstrip("-")
    found = _KEY.fullmatch(name)
    return name.replace("-", "_") if found is not None and ("." in name or may_be_secret(name)) else None


def secrets_apart(words: Sequence[str]) -> Iterator[str]:
    """The words, or parts of words, of a command line that are values of secret keys before them, as far as they are no
    overrides. They belong into no error."""
    for at, word in enumerate(words):
        pair, key = _PAIR.fullmatch(word), _KEY.fullmatch(word)
        if pair is not None and _may_be_secret(pair["name"]):
            yield pair["value"]
        if key is None or not _may_be_secret(key["name"]):
            continue
        of_flag = False
        for after in words[at + 1 :]:
            if _OVERRIDE.match(after):
                break
            if _FLAG.fullmatch(after):
                of_flag = "=" not in after  # the next word is its value, or, if it takes none, the secret
            elif after not in _SIGNS:
                value = after.removeprefix("=")
                if value and (strength(key["name"]) is Strength.ANY or not is_number(value)):
                    yield value
                if not of_flag:
                    break
                of_flag = False
