"""What secrets look like inside text: tokens of known services, URLs, headers, assignments.

Each rule is linear in the text: model output goes through it. Patterns are compiled when first used, for commands that
print no text of others should not wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from nemotron_steps.config.secret_names import Strength, strength

MASK = "***"

_TOKENS = (
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
    r"gsk_[A-Za-z0-9]{20,255}",
    r"xai-[A-Za-z0-9]{20,255}",
    r"r8_[A-Za-z0-9]{20,255}",
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
_QUERY_NAMES = ("key", "k", "sig", "signature", "sas", "code", "jwt", "pw", "credential")
"""Names of URL parameters that are secrets there, and may be anything elsewhere."""


def mask_shapes(text: str) -> str:
    """Text without what looks like a secret in it."""
    if "://" in text:
        text = _url().sub(_without_url_secrets, text)
    if "PRIVATE KEY" in text:
        text = _private_key().sub(MASK, text)
    text = _token().sub(MASK, text)
    if "earer " in text or "EARER " in text:
        text = _bearer().sub(rf"\1{MASK}", text)
    if "-" in text:
        text = _flag().sub(_without_flag_secret, text)
    return _without_assigned_secrets(text)


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


def is_special_token(text: str) -> bool:
    """Whether a text is a tokenizer's special token: `<|end|>`, `</s>`, `[PAD]`."""
    return bool(re.fullmatch(r"<.{1,40}>|\[[A-Z_]{1,20}\]", text))


def is_number(text: str) -> bool:
    """Whether a text is a number, a flag or nothing, as configs and logs write them."""
    return bool(re.fullmatch(r"(?i)[-+]?[\d_.,]*(?:e[-+]?\d+)?%?|true|false|null|none|nan|[-+]?inf", text))


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
    shown = re.sub(r"([^?#&;=]+)=([^&#;]*)", _without_parameter, parameters)
    return f"{scheme}://{authority}{slash}{path}{mark}{shown}"


def _without_parameter(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    plain = name.lower()
    secret = (
        strength(name) >= Strength.TEXT
        or plain in _QUERY_NAMES
        or plain.startswith(("x-amz-cred", "x-amz-sig", "x-amz-security", "x-goog-cred", "x-goog-sig"))
        or looks_random(value)
    )
    return f"{name}={MASK}" if secret and value else match[0]


def _without_flag_secret(match: re.Match[str]) -> str:
    return f"{match[1]}{MASK}" if strength(match[2]) >= Strength.TEXT else match[0]


def _without_assigned_secrets(text: str) -> str:
    """`name = value`, `"name": "value"`, `Name: value`, with the values of secret names masked."""
    if "=" not in text and ":" not in text:
        return text
    parts: list[str] = []
    at = 0
    for match in _assignment().finditer(text):
        if match.start() < at:
            continue
        says = strength(match["name"])
        if says is Strength.NONE:
            continue
        end, shown = _value_at(text, match.end(), match)
        value = text[match.end() : end]
        if not _is_secret(says, value, match):
            continue
        parts += [text[at : match.end()], shown]
        at = end
    return "".join(parts) + text[at:] if parts else text


def _is_secret(says: Strength, value: str, match: re.Match[str]) -> bool:
    bare = value.strip("\\\"'`")
    if not bare or bare in (MASK, "None", "null", "true", "false", "True", "False"):
        return False
    if says is Strength.ANY:
        return True
    if is_number(bare) or is_special_token(bare):
        return False
    if says is Strength.MAYBE:
        return looks_random(bare)
    # `token: the` in a sentence, `token = tokens[i]` in a program.
    spaced = ":" in match["sign"] or match[0].endswith(" ")
    in_sentence = spaced and value == bare and not re.search(r"[_\-.]|[a-z][A-Z]", match["name"])
    return not in_sentence or looks_random(bare) or bool(re.search(r"\d", bare) and len(bare) >= 8)


def _value_at(text: str, start: int, match: re.Match[str]) -> tuple[int, str]:
    """Where the value that begins at `start` ends, and what stands in its place."""
    quoted = _quote().match(text, start)
    if quoted is not None:
        closing = text.find(quoted[0], quoted.end())
        line = text.find("\n", start)
        stop = len(text) if line < 0 else line
        if closing < 0 or closing > stop:
            return stop, MASK
        keep = quoted[0] if ":" in match["sign"] else ""
        # What follows the closing quote without a space belongs to the same word of a command.
        end = closing + len(quoted[0])
        return end, f"{keep}{MASK}{keep}"
    bracketed = _bracketed().match(text, start)
    if bracketed is not None:
        return bracketed.end(), MASK
    scheme = _scheme().match(text, start) if strength(match["name"]) is Strength.ANY else None
    begin = scheme.end() if scheme is not None else start
    plain = _plain().match(text, begin)
    end = plain.end() if plain is not None else begin
    return end, f"{scheme[0] if scheme is not None else ''}{MASK}"


def _compiled(build: Callable[[], str]) -> Callable[[], re.Pattern[str]]:
    return cache(lambda: re.compile(build()))


_token = _compiled(lambda: r"(?<![A-Za-z0-9_])(?:" + "|".join(_TOKENS) + ")")
_private_key = _compiled(
    lambda: (
        r"(?s)-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:.{0,20000}?-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|.{0,20000})"
    )
)
_url = _compiled(
    lambda: r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s\"'<>`\\?#]+)(?:([?#])([^\s\"'<>`\\]*))?"
)
_bearer = _compiled(lambda: r"(?i)\b(bearer[ \t]+)(?=[\w.~+/=-]{0,40}\d|[\w.~+/=-]{20})[\w.~+/=-]{8,}")
_flag = _compiled(lambda: r"(?<![\w-])(--?([A-Za-z][\w-]{1,60})(?:[ \t]+|[\"'],[ \t]*[\"']))(?!-)[^\s\"',]+")
_assignment = _compiled(
    lambda: (
        r"(?<![\w.])(?P<name>[A-Za-z_][\w.-]{0,127})(?:\\*[\"'`])?\]?[ \t]{0,8}"
        r"(?P<sign>:=|=>|=(?!=)|:(?!//))[ \t]{0,8}"
    )
)
_quote = _compiled(lambda: r"\\*[\"'`]")
_bracketed = _compiled(lambda: r"\[[^\]\n]*\]|\{[^}\n]*\}")
_scheme = _compiled(lambda: r"(?i:bearer|basic|token|digest|negotiate|apikey)[ \t]+")
_plain = _compiled(lambda: r"[^\s'\",;)}\]&]+")
