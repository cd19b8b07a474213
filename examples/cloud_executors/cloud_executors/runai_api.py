"""NVIDIA Run:ai's REST API, as far as jobs need it: a token, the project, workloads.

The account is the environment's: RUNAI_BASE_URL, and the two halves of an access key. A profile or a run's folder may
be somebody else's, and must not say where the key is sent.
"""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from nemotron_steps.errors import RequestError, RetryableError, first_line

ADDRESS = "RUNAI_BASE_URL"
KEYS = ("RUNAI_CLIENT_ID", "RUNAI_CLIENT_SECRET")
_OLD_KEYS = ("RUNAI_APP_ID", "RUNAI_APP_SECRET")
"""Of an application, as access keys were called before."""
_API = "/api/v1"
_ANSWER_SECONDS = 60
_LONGEST = 1 << 24
"""Bytes of an answer that are read; a project's list has some kilobytes."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Account:
    """Where Run:ai is, with the API's path, and what a token is asked for with."""

    base: str
    grant: tuple[tuple[str, str], ...] = field(repr=False)

    @classmethod
    def of_environment(cls) -> Account:
        """RequestError naming the variable that is missing or wrong."""
        base = _variable(ADDRESS, "https://ORGANISATION.run.ai").rstrip("/").removesuffix(_API)
        parts = urllib.parse.urlsplit(base)
        if not parts.hostname or not (
            parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        ):
            raise RequestError(f"{ADDRESS} is no https address", expected="https://HOST", found=base)
        if all(os.environ.get(name) for name in _OLD_KEYS) and not os.environ.get(KEYS[0]):
            names, kind = dict(zip(("appId", "appSecret"), _OLD_KEYS, strict=True)), "app_token"
        else:
            names, kind = dict(zip(("clientId", "clientSecret"), KEYS, strict=True)), "client_credentials"
        fields = {field: _variable(name, "...") for field, name in names.items()}
        return cls(base + _API, (("grantType", kind), *fields.items()))

    def ask(self, method: str, path: str, body: Any = None, *, missing: Any = None) -> Any:
        """What Run:ai answers to a request, decoded.

        Args:
            path: after the API's own, with what is asked for after `?`.
            missing: what to return where Run:ai knows nothing there; None: RequestError.

        Raises RequestError for a refusal; RetryableError where nobody answers or Run:ai is at fault.
        """
        try:
            return _call(method, self.base + path, body, _token(self))
        except HTTPError as error:
            if error.code != 401:
                return _refused(error, missing)
        # Tokens last some hours, and who follows a run asks for days.
        _token.cache_clear()
        try:
            return _call(method, self.base + path, body, _token(self))
        except HTTPError as error:
            return _refused(error, missing)

    def read(self, path: str, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object at an address; `path`, `missing` and errors as `ask`."""
        found = self.ask("GET", path, missing=missing)
        if not isinstance(found, dict):
            raise RequestError(
                "what answers is not Run:ai's API",
                where=_host(self.base),
                expected="a JSON object",
                found=repr(found)[:60],
            )
        return found


@functools.lru_cache(maxsize=4)
def _token(account: Account) -> str:
    try:
        answer = _call("POST", f"{account.base}/token", dict(account.grant))
    except HTTPError as error:
        if error.code not in (400, 401, 403):
            return str(_refused(error, None))
        raise RequestError(
            "Run:ai does not take the access key",
            where=", ".join(KEYS if dict(account.grant).get("clientId") else _OLD_KEYS),
            found=_said(error),
            hints=(f"export {KEYS[0]}=... {KEYS[1]}=...   # of an access key made under User settings",),
        ) from error
    token = answer.get("accessToken") if isinstance(answer, dict) else None
    if not token:
        raise RequestError("Run:ai gave no token", where=ADDRESS, expected="accessToken in the answer")
    return str(token)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: followed, it would carry the token to another machine."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """See HTTPRedirectHandler."""
        return None


def _call(method: str, url: str, body: Any = None, token: str | None = None) -> Any:
    """One request. HTTPError as it comes; RetryableError where nobody answers."""
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_ANSWER_SECONDS) as answer:
            text = answer.read(_LONGEST)
    except HTTPError:
        raise
    except (OSError, HTTPException) as error:
        raise RetryableError(
            "Run:ai does not answer", where=_host(url), found=first_line(error), hints=(f"echo ${ADDRESS}",)
        ) from error
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(
            "what answers is not Run:ai's API", where=_host(url), expected="JSON", found=repr(text[:60])
        ) from error


def _refused(error: HTTPError, missing: Any) -> Any:
    if error.code == 404 and missing is not None:
        return missing
    where = f"{_host(error.url or '')}{urllib.parse.urlsplit(error.url or '').path}"
    if error.code >= 500 or error.code == 429:
        raise RetryableError("Run:ai does not answer", where=where, found=_said(error)) from error
    if 300 <= error.code < 400:
        raise RequestError(
            "what answers sends elsewhere, where the key is not sent",
            where=where,
            expected=f"in {ADDRESS} the address of Run:ai's API itself",
            found=error.headers.get("Location") or _said(error),
        ) from error
    hints = (f"echo ${ADDRESS}   # the address of Run:ai's API",) if error.code == 404 else ()
    raise RequestError(f"Run:ai refused: {_said(error)}", where=where, hints=hints) from error


def _said(error: HTTPError) -> str:
    """What Run:ai says of a refusal, in one line."""
    text = error.read(4096).decode(errors="replace")
    found = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', text)
    words = " ".join((found[1] if found else text).split())[:300]
    return f"{words} (HTTP {error.code})" if words else f"HTTP {error.code}"


def _host(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _variable(name: str, example: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise RequestError(
            f"environment variable {name} is not set",
            where="executor dgxcloud",
            hints=(f"export {name}={example}",),
        )
    return value
