"""Whether the name of a key, variable, header or flag says that its value is a secret.

Names are cut into words (`accessToken`, `X-Api-Key`, `GITLAB_TOKEN_1`), and the words decide. In this project most keys
with `token` or `key` in them are about text and data (`max_new_tokens`, `pad_token`, `cache_key`): what comes before
the word says which kind it is.
"""

from __future__ import annotations

import re
from enum import IntEnum
from itertools import pairwise

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALWAYS = _words(
    "password passwords passwd passphrase passcode pwd secret secrets credential credentials creds apikey apikeys "
    "authorization bearer"
)
_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "credentials", "accesskey", "privatekey")
"""Ends of words that are written together: `PGPASSWORD`, `clientsecret`."""

_KEYS = _words(
    "api access private secret auth signing encryption service account client ssh deploy master subscription license "
    "storage session shared webhook"
)
"""What `key` comes after where it opens something."""
_DATA_KEYS = _words("cache public sort primary foreign group partition hash dedup lookup index row")

_TEXT_TOKENS = _words(
    "pad padding eos bos unk sep cls mask special stop end start begin first last next new prev previous per by each "
    "every single max min num total mean image img video audio speech vision think thinking reasoning tool prompt "
    "response answer sample sampled system user assistant separator delimiter decoder encoder added extra vocab boi "
    "eoi eom eot eod sot im fim prefix suffix middle patch class text word language lang target source draft output "
    "input generated placeholder call line newline space byte char time to of yes no positive negative good bad turn "
    "role chat a the one this that"
)
"""What `token` comes after where it is a piece of text."""
_TOKENS = _words("api access auth refresh hf hub github gitlab")
"""What `tokens`, of which there are several, comes after where they open something."""

_PASSES = _words("forward backward two one first second third num by per single multi full all final did must")

_ABOUT = _words(
    "file path dir folder env var variable name names field column type length policy provider backend manager enabled "
    "required format count expiry"
)
"""Last words of names that are about a secret and not the secret itself: `api_key_env`, `password_file`."""


class Strength(IntEnum):
    """How much a name says."""

    NONE = 0
    MAYBE = 1
    """The value is a secret if it looks like one: `openai_key`, where `answer_key` is a column's name."""
    TEXT = 2
    """A text is a secret; a number or a flag is none: `token`, `pass`."""
    ANY = 3
    """Whatever the value, it is a secret."""


def is_secret_key(key: str) -> bool:
    """Whether the last part of a dotted key, or a variable's name, names a secret."""
    return strength(key) >= Strength.TEXT


def strength(key: str) -> Strength:
    """What the last part of a dotted key, or a variable's, header's or flag's name, says of its value."""
    name = key.rpartition(".")[2]
    words = [part.lower() for part in _PART.findall(name) if not part.isdigit()]
    if not words or words[-1] in _ABOUT:
        return Strength.NONE
    pairs = set(pairwise(words))
    opens = any(second in ("key", "keys") and first in _KEYS for first, second in pairs)
    if opens or not _ALWAYS.isdisjoint(words) or any(word.endswith(_ENDINGS) for word in words):
        return Strength.ANY
    before = words[-2] if len(words) > 1 else ""
    return _by_last(words[-1], before, is_variable=name.isupper())


def _by_last(last: str, before: str, *, is_variable: bool) -> Strength:
    if last.endswith("token"):
        before = last.removesuffix("token") or before
        return Strength.NONE if before in _TEXT_TOKENS else Strength.TEXT
    if last == "tokens":
        return Strength.TEXT if before in _TOKENS else Strength.NONE
    if last in ("auth", "cookie", "cookies", "dsn", "webhook") or (before, last) in (
        ("connection", "string"),
        ("webhook", "url"),
        ("auth", "header"),
    ):
        return Strength.TEXT
    if last == "pass":
        return Strength.NONE if before in _PASSES else Strength.TEXT
    if last.endswith("pass") and is_variable:
        return Strength.NONE if last in ("bypass", "compass") else Strength.TEXT
    if last in ("key", "keys") and before and before not in _DATA_KEYS:
        return Strength.TEXT if is_variable else Strength.MAYBE
    return Strength.TEXT if last == "pat" and before and is_variable else Strength.NONE
