"""Secrets never reach a screen, a log or a run folder.

A value is masked when the name of its key says that it is secret; when it is the content of an environment variable
whose name says so, wherever it turns up; or when it looks like a secret: a token of a known service, a URL's password.
What a config read from any other variable (`${oc.env:NAME}`) is shown as that, unless it is plainly harmless.

Names are cut into words, and what comes before `token` or `key` says whether it opens something (`max_new_tokens`,
`cache_key` do not). Every pattern takes time linear in the text, for model output goes through it; `re` compiles them
when first used, for commands that print no text of others.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from itertools import pairwise
from typing import Any

MASK = "***"

_SHORTEST = 6
"""Values shorter than this are not masked by value: they would hit ordinary words and numbers."""
_NAME_KEYS = ("name", "key", "variable")
"""Keys beside a `value` that say what it is: `{"name": "HF_TOKEN", "value": "x"}`."""
_USUAL = ("api_key", "apikey", "token", "hf_token", "auth_token", "access_token", "password", "passwd", "secret")
"""What a misspelled key may have been meant for."""

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


_WORDS = {
    # Words that are always of a secret, and ends of words that are written together: `PGPASSWORD`, `clientsecret`.
    "always": "password passwords passwd passphrase passcode pwd secret secrets credential credentials creds apikey "
    "apikeys authorization bearer",
    "endings": "password passwd passphrase secret apikey credentials accesskey privatekey",
    # What `key` comes after where it opens something, and where it is of data.
    "keys": "api access private secret auth signing encryption service account client ssh deploy master subscription "
    "license storage session shared webhook",
    "data keys": "cache public sort primary foreign group partition hash dedup lookup index row",
    # What `token` comes after where it is a piece of text; what `tokens` comes after where they open something.
    "text": "pad padding eos bos unk sep cls mask special stop end start begin first last next new prev previous per "
    "by each every single max min num total mean image img video audio speech vision think thinking reasoning tool "
    "prompt response answer sample sampled system user assistant separator delimiter decoder encoder added extra vocab "
    "boi eoi eom eot eod sot im fim prefix suffix middle patch class text word language lang target source draft "
    "output input generated placeholder call line newline space byte char time to of yes no positive negative good bad "
    "turn role chat a the one this that",
    "tokens": "api access auth refresh hf hub github gitlab",
    "passes": "forward backward two one first second third num by per single multi full all final did must",
    # Last words of names that are about a secret and not the secret itself: `api_key_env`, `password_file`.
    "about": "file path dir folder env var variable name names field column type length policy provider backend "
    "manager enabled required format count expiry",
}
_OF = {name: frozenset(words.split()) for name, words in _WORDS.items()}
_OPENING = ("auth", "cookie", "cookies", "dsn", "webhook", "connection string", "webhook url", "auth header")


class Strength(IntEnum):
    """How much a name says: nothing; that the value is a secret if it looks like one (`openai_key`, where `answer_key`
    is a column's name); that a text is one, and a number or a flag is not (`token`, `pass`); that any value is."""

    NONE = 0
    MAYBE = 1
    TEXT = 2
    ANY = 3


def is_secret_key(key: str) -> bool:
    """Whether the last part of a dotted key, or a variable's name, names a secret."""
    return strength(key) >= Strength.TEXT


def strength(key: str) -> Strength:
    """What the last part of a dotted key, or a variable's, header's or flag's name, says of its value."""
    name = key.rpartition(".")[2]
    words = [part.lower() for part in _PART.findall(name) if not part.isdigit()]
    if not words or words[-1] in _OF["about"]:
        return Strength.NONE
    opens = any(second in ("key", "keys") and first in _OF["keys"] for first, second in pairwise(words))
    if opens or not _OF["always"].isdisjoint(words) or any(word.endswith(tuple(_OF["endings"])) for word in words):
        return Strength.ANY
    before, last, is_variable = words[-2] if len(words) > 1 else "", words[-1], name.isupper()
    if last.endswith("token"):
        text = (last.removesuffix("token") or before) in _OF["text"]
    elif last == "tokens":
        text = before not in _OF["tokens"]
    elif last == "pass":
        text = before in _OF["passes"]
    elif last.endswith("pass") and is_variable:
        text = last in ("bypass", "compass")
    elif last in ("key", "keys") and before and before not in _OF["data keys"]:
        return Strength.TEXT if is_variable else Strength.MAYBE
    else:
        opens = (last == "pat" and before and is_variable) or last in _OPENING or f"{before} {last}" in _OPENING
        text = not opens
    return Strength.NONE if text else Strength.TEXT


_SERVICE_TOKENS = (
    # AWS access keys
    r"(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}",
    # GitHub, GitLab, Docker Hub
    r"gh[pousr]_\w{30,255}",
    r"github_pat_\w{22,255}",
    r"gl(?:pat|dt|ft|soat|rt|cbt|ptt|agent|oas|imt|ffct)-[\w-]{20,255}",
    r"dckr_[op]at_[\w-]{20,255}",
    # Hugging Face, NVIDIA, OpenAI and those that write keys as it does, Groq, xAI, Replicate, Google, LangSmith, Tavily
    r"hf_[A-Za-z0-9]{30,255}",
    r"nvapi-[\w-]{20,255}",
    r"sk-(?=[\w-]{0,60}\d)[\w-]{16,255}",
    r"(?:gsk_|xai-|r8_)[A-Za-z0-9]{20,255}",
    r"AIza[\w-]{35}",
    r"ya29\.[\w-]{20,512}",
    r"lsv2_(?:pt|sk)_\w{20,255}",
    r"tvly-[\w-]{16,255}",
    # Slack, Stripe, SendGrid, npm, PyPI
    r"xox[abeoprs]-[\w-]{10,255}",
    r"[rs]k_(?:live|test)_\w{16,255}",
    r"SG\.[\w-]{16,64}\.[\w-]{16,64}",
    r"npm_[A-Za-z0-9]{36}",
    r"pypi-AgE[\w-]{50,512}",
    # JSON Web Tokens
    r"eyJ[\w-]{10,512}\.[\w-]{10,4096}\.[\w-]{0,4096}",
)
_SECRET_PARAMETER = (
    r"key|k|sig|signature|sas|code|jwt|pw|credential|x-amz-(?:cred|sig|security).*|x-goog-(?:cred|sig).*"
)
"""Parameters of URLs that are secrets there, and may be anything elsewhere."""
_A_FLAG = r"--?[A-Za-z][\w-]*"
_TOKEN = r"(?<![A-Za-z0-9_])(?:" + "|".join(_SERVICE_TOKENS) + ")"
_PRIVATE_KEY = (
    r"(?s)-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:.{0,20000}?-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|.{0,20000})"
)
_URL = r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s\"'<>`\\?#]+)(?:([?#])([^\s\"'<>`\\]*))?"
_BEARER = r"(?i)\b(bearer[ \t]+)(?=[\w.~+/=-]{0,40}\d|[\w.~+/=-]{20})[\w.~+/=-]{8,}"
_FLAG = r"(?<![\w-])(--?([A-Za-z][\w-]{1,60})(?:[ \t]+|[\"'],[ \t]*[\"']))(?!-)[^\s\"',]+"
_ASSIGNMENT = (
    r"(?<![\w.])(?P<name>[A-Za-z_][\w.-]{0,127})(?:\\*[\"'`])?\]?[ \t]{0,8}(?P<sign>:=|=>|=(?!=)|:(?!//))[ \t]{0,8}"
)
_QUOTED = r"(\\*[\"'`])(?:[^\n]*?(\1)|[^\n]*)"
_BRACKETED = r"\[[^\]\n]*\]|\{[^}\n]*\}"
_SCHEME = r"(?i:bearer|basic|token|digest|negotiate|apikey)[ \t]+"
_PLAIN = r"[^\s'\",;)}\]&]+"
_NUMBER = r"(?i)[-+]?[\d_.,]*(?:e[-+]?\d+)?%?|true|false|null|none|nan|[-+]?inf"
"""Also flags and nothing, as configs and logs write them."""
_SPECIAL_TOKEN = r"<.{1,40}>|\[[A-Z_]{1,20}\]"
"""Of a tokenizer: `<|end|>`, `</s>`, `[PAD]`."""


def looks_random(text: str) -> bool:
    """Whether a text is more likely generated than written: long runs of letters with digits, or of hex digits."""
    if len(text) < 16 or re.search(r"\s", text):
        return False
    if re.fullmatch(r"[0-9a-fA-F]{32,}", text.replace("-", "")):
        return True
    return any(
        len(piece) >= 16 and re.search(r"\d", piece) and re.search(r"[A-Za-z]", piece)
        for piece in re.split(r"[-_./:@,=+]", text)
    )


def _mask_shapes(text: str) -> str:
    """Text without what looks like a secret in it."""
    if "://" in text:
        text = re.sub(_URL, _without_url_secrets, text)
    if "PRIVATE KEY" in text:
        text = re.sub(_PRIVATE_KEY, MASK, text)
    text = re.sub(_TOKEN, MASK, text)
    if "earer " in text or "EARER " in text:
        text = re.sub(_BEARER, rf"\1{MASK}", text)
    if "-" in text:
        text = re.sub(_FLAG, lambda flag: f"{flag[1]}{MASK}" if is_secret_key(flag[2]) else flag[0], text)
    if "=" not in text and ":" not in text:
        return text
    # `name = value`, `"name": "value"`, `Name: value`
    parts, at = [], 0
    for match in re.finditer(_ASSIGNMENT, text):
        if match.start() < at or (says := strength(match["name"])) is Strength.NONE:
            continue
        end, shown = _value_at(text, match.end(), match["sign"], says)
        if _is_assigned_secret(says, text[match.end() : end], match):
            parts += [text[at : match.end()], shown]
            at = end
    return "".join(parts) + text[at:]


def _without_url_secrets(match: re.Match[str]) -> str:
    address, mark, parameters = match[1], match[2] or "", match[3] or ""
    scheme, _, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        authority = f"{MASK}@{authority.rpartition('@')[2]}"
    elif "@" in path and re.search(r":.*\D", authority):
        # A slash in a password: `user:pa/ss@host`.
        authority, slash, path = f"{MASK}@{rest.rpartition('@')[2]}", "", ""
    if authority == "hooks.slack.com":
        path = MASK

    def without_value(parameter: re.Match[str]) -> str:
        name, value = parameter[1], parameter[2]
        secret = is_secret_key(name) or re.fullmatch(_SECRET_PARAMETER, name.lower()) or looks_random(value)
        return f"{name}={MASK}" if secret and value else parameter[0]

    return f"{scheme}://{authority}{slash}{path}{mark}{re.sub(r'([^?#&;=]+)=([^&#;]*)', without_value, parameters)}"


def _value_at(text: str, start: int, sign: str, says: Strength) -> tuple[int, str]:
    """Where the value that begins at `start` ends, and what stands in its place."""
    if quoted := re.compile(_QUOTED).match(text, start):
        # Without a colon it is a word of a command, and what follows the closing quote without a space belongs to it.
        quote = quoted[1] if ":" in sign and quoted[2] else ""
        return quoted.end(), f"{quote}{MASK}{quote}"
    if bracketed := re.compile(_BRACKETED).match(text, start):
        return bracketed.end(), MASK
    scheme = re.compile(_SCHEME).match(text, start) if says is Strength.ANY else None
    begin = scheme.end() if scheme is not None else start
    plain = re.compile(_PLAIN).match(text, begin)
    return plain.end() if plain is not None else begin, f"{scheme[0] if scheme is not None else ''}{MASK}"


def _is_assigned_secret(says: Strength, value: str, match: re.Match[str]) -> bool:
    bare = value.strip("\\\"'`")
    if bare.lower() in ("", MASK, "none", "null", "true", "false") or not _is_secret(match["name"], bare):
        return False
    # `token: the` in a sentence, `token = tokens[i]` in a program.
    spaced = ":" in match["sign"] or match[0].endswith(" ")
    in_sentence = spaced and value == bare and not re.search(r"[_\-.]|[a-z][A-Z]", match["name"])
    if says is not Strength.TEXT or not in_sentence:
        return True
    return looks_random(bare) or bool(re.search(r"\d", bare) and len(bare) >= 8)


def _is_secret(key: str, value: Any) -> bool:
    """Whether a value under a key is masked as a whole."""
    says = strength(key)
    if says is Strength.NONE or value is None or value == "" or isinstance(value, bool):
        return False
    if says is Strength.ANY:
        return True
    if not isinstance(value, str):
        return says is Strength.TEXT and not isinstance(value, int | float)
    plain = re.fullmatch(_NUMBER, value) or re.fullmatch(_SPECIAL_TOKEN, value)
    return not plain and (says is Strength.TEXT or looks_random(value))


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


class Redactor:
    """What to replace, found once for many texts: values of variables whose names are secret, what configs read from
    others, and further `secrets`. `environment`: these variables; None: those of this process."""

    def __init__(self, environment: Mapping[str, str] | None, secrets: Iterable[str] = ()) -> None:
        found = dict.fromkeys(secrets, MASK)
        for name, value in (os.environ if environment is None else environment).items():
            if is_secret_key(name):
                found[value] = MASK
            elif name in _interpolated and not _is_harmless(value):
                found.setdefault(value, f"${{oc.env:{name}}}")
        for value in [*found]:
            path = value.startswith(("/", "~/", "./", "../")) and os.path.exists(os.path.expanduser(value))
            if len(value) < _SHORTEST or path:
                del found[value]
        self._replaced = sorted(found.items(), key=lambda item: len(item[0]), reverse=True)
        words = "|".join(re.escape(word) for word in sorted(_masked_words, key=len, reverse=True))
        self._words = re.compile(rf"(?<!\w)(?:{words})(?!\w)") if words else None

    def mask(self, values: Any) -> Any:
        """A copy of plain values with every secret masked."""
        return _changed(values, lambda secret: MASK, self._mask_inside)

    def mask_text(self, text: str) -> str:
        """Text with every secret masked; see redact_text."""
        key, equals, value = text.partition("=")
        if equals and not re.search(r"\s", key) and _is_secret(key.lstrip("+~"), value):
            return f"{self._mask_inside(key)}={MASK}"  # a URL's parameter, and what is secret before it
        return self._mask_inside(text)

    def _mask_inside(self, text: str) -> str:
        for secret, shown in self._replaced:
            text = text.replace(secret, shown)
        if self._words is not None:
            text = self._words.sub(MASK, text)
        return _mask_shapes(text)


def mask(key: str, value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """One value as it may be shown under `key`."""
    return redact({key: value}, environment)[key]


def redact(values: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A copy of plain values with every secret masked; those of secret variables of `environment`, default: ours."""
    return Redactor(environment).mask(values)


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Text (a log line, an override, a command) with every secret masked. When the text as a whole is `key=value`,
    everything after the sign is the value, spaces included."""
    return Redactor(environment).mask_text(text)


def shown_override(text: str, *meant: str) -> str:
    """A refused override as it may be shown: without its value if its key, or one that was `meant`, may be secret."""
    key, equals, value = text.partition("=")
    if not equals:
        apart = re.match(r"[+~-]*([\w.-]+)(?:\s*:|\s)\s*(?=\S)", text)
        return f"{apart[0]}{MASK}" if apart is not None and may_be_secret(apart[1]) else redact_text(text)
    if may_be_secret(key.lstrip("+~")) or any(map(is_secret_key, meant)) or looks_random(value):
        return f"{redact_text(key)}={MASK}"
    return redact_text(text)


def may_be_secret(key: str) -> bool:
    """Whether a key that someone typed names a secret, or was probably meant to."""
    from difflib import get_close_matches

    name = key.rpartition(".")[2].lower().replace("-", "_")
    return is_secret_key(key) or bool(get_close_matches(name, _USUAL, n=1, cutoff=0.8))


def secrets_in(values: Any) -> list[str]:
    """Every text in plain values, and in overrides among them, that is secret by the name it has there."""
    found: list[str] = []

    def note(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list | tuple | Mapping):
            for item in value.values() if isinstance(value, Mapping) else value:
                note(item)

    def note_override(text: str) -> None:
        key, equals, value = text.partition("=")
        if equals and _is_secret(key.lstrip("+~-"), value):
            found.extend((value, value.strip("'\"")))

    _changed(values, note, note_override)
    return found


def _changed(values: Any, of_secret: Callable[[Any], Any], of_text: Callable[[str], Any]) -> Any:
    """A copy of plain values with what is secret by its name, and every other text, changed. The name is a mapping's
    key; the `name` beside a `value`; or, in a command, the flag before it (`--api-key x`)."""
    if isinstance(values, Mapping):
        names = [str(values.get(name)) for name in _NAME_KEYS] if "value" in values else []
        named = any(_is_secret(name, values["value"]) for name in names)
        changed = {}
        for key, item in values.items():
            secret = _is_secret(str(key), item) or (named and key == "value")
            changed[key] = of_secret(item) if secret else _changed(item, of_secret, of_text)
        return changed
    if isinstance(values, list | tuple):
        flags = ("", *(item if isinstance(item, str) and re.fullmatch(_A_FLAG, item) else "" for item in values))
        return [
            of_secret(item) if flag and _is_secret(flag, item) else _changed(item, of_secret, of_text)
            for flag, item in zip(flags, values, strict=False)
        ]
    return of_text(values) if isinstance(values, str) else values


def _is_harmless(value: str) -> bool:
    """Whether a value is plainly no secret: a number, a URL (whose own are masked), a path, a model's name."""
    path = re.match(r"(?:~|\.\.?)?/\w", value) and not any(map(looks_random, value.split("/")))
    if re.fullmatch(_NUMBER, value) or "://" in value or path:
        return True
    hub_name = re.fullmatch(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*", value)
    return hub_name is not None and not re.fullmatch(r"[A-Za-z0-9/]{36,}", value)
