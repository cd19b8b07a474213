"""Servers of a running NeMo-Gym, by the names that its config has for them.

NeMo-Gym's head server answers GET /global_config_dict_yaml with the whole config, as a JSON string of YAML. A server
stands there as INSTANCE: {KIND: {IMPLEMENTATION: {host, port, ...}}}; an agent names the resources server it uses.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nemotron_steps.environments.http_client import HttpStatusError, JsonClient, ServerUnreachableError, run
from nemotron_steps.environments.responses import text_of
from nemotron_steps.errors import ConfigError, WorkerLostError

GLOBAL_CONFIG = "/global_config_dict_yaml"
AGENTS = "responses_api_agents"
RESOURCES = "resources_servers"
_HOST = re.compile(r"[\w.:%-]+")
"""Names and addresses; not `${host}`, which NeMo-Gym has yet to fill in."""


class HeadServerConfig(BaseModel):
    """Where the head server of NeMo-Gym is, as its own config says it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(11000, ge=1, le=65535)


class UnknownServerError(Exception):
    """The head server's config has no such server; `known` are those of its kind."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(name)
        self.known = known


class HeadServer:
    """See the module docstring. Its config is asked for once: by `load`, or when the first address is needed."""

    def __init__(self, config: HeadServerConfig, *, ready_timeout_s: float, retries: int = 3) -> None:
        self.host, self.url = config.host, _url(config.host, config.port)
        self._ready_timeout_s = ready_timeout_s
        self._retries = retries
        self._known: dict[str, Any] | None = None

    async def load(self) -> dict[str, Any]:
        """The whole config, for which the head server may take `ready_timeout_s` to be there."""
        import yaml

        if self._known is not None:
            return self._known
        client = JsonClient(self.url, timeout_s=30.0, retries=self._retries)
        try:
            await client.wait_ready(self._ready_timeout_s)
            answer = await client.get(GLOBAL_CONFIG)
        except (ServerUnreachableError, HttpStatusError) as error:
            raise WorkerLostError(
                "the head server of NeMo-Gym does not answer",
                where=f"{self.url}{GLOBAL_CONFIG}",
                found=str(error),
                hints=(f"curl {self.url}{GLOBAL_CONFIG}",),
            ) from error
        try:
            found = yaml.safe_load(answer) if isinstance(answer, str) else None
        except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: no date, or a number of too many digits
            found = None
        if not isinstance(found, dict):
            raise self._incomplete("NeMo-Gym's config, a JSON string of YAML", answer)
        self._known = found
        return found

    def address(self, name: str, kind: str) -> str:
        """Base URL of an agent, or of a resources server, which the name of an agent that uses it stands for, too."""
        known = run(self.load()) if self._known is None else self._known
        if kind == RESOURCES and name in _named(known, AGENTS):
            used = self._settings(known, name, AGENTS).get("resources_server")
            name = text_of(used.get("name")) if isinstance(used, Mapping) else ""
        found = self._settings(known, name, kind)
        host, port = found.get("host"), found.get("port")
        if not isinstance(host, str) or not _HOST.fullmatch(host) or type(port) is not int or not 0 < port < 65536:
            raise self._incomplete(f"host and port of {name}", {"host": host, "port": port})
        # A server that listens everywhere is reached where the head server is.
        return _url(self.host if host in ("0.0.0.0", "::") else host, port)

    def _settings(self, known: Mapping[str, Any], name: str, kind: str) -> Mapping[str, Any]:
        """The settings of a server: those of the first implementation below its name, as NeMo-Gym itself reads it."""
        entry = known.get(name)
        if not isinstance(entry, Mapping) or kind not in entry:
            raise UnknownServerError(name, _named(known, kind))
        built = entry[kind]
        first = next(iter(built.values()), None) if isinstance(built, Mapping) else None
        if not isinstance(first, Mapping):
            raise self._incomplete(f"the settings of {name}", built)
        return first

    def _incomplete(self, expected: str, found: Any) -> ConfigError:
        return ConfigError(
            "the head server does not say where a server of NeMo-Gym is",
            where=f"{self.url}{GLOBAL_CONFIG}",
            expected=expected,
            found=text_of(found, 200, repr),
            hints=(f"curl {self.url}{GLOBAL_CONFIG}",),
        )


def _named(known: Mapping[str, Any], kind: str) -> list[str]:
    return [text_of(name) for name, entry in known.items() if isinstance(entry, Mapping) and kind in entry]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
