"""Servers of a running NeMo-Gym, by the names that its config has for them.

NeMo-Gym's head server answers GET /global_config_dict_yaml with the whole config, as a JSON string of YAML. A server
stands there as INSTANCE: {KIND: {IMPLEMENTATION: {host, port, ...}}}; an agent names the resources server it uses.
The config is asked for once, when the first address is needed.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nemotron_steps.environments.http_client import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.responses import text_of
from nemotron_steps.errors import ConfigError, WorkerLostError

GLOBAL_CONFIG = "/global_config_dict_yaml"
AGENTS = "responses_api_agents"
RESOURCES = "resources_servers"
_HOST = re.compile(r"[\w.:%-]+")
"""Names and addresses; not `${host}`, which NeMo-Gym has yet to fill in."""
_ANY_ADDRESS = ("0.0.0.0", "::")
"""What a server listens on that is reached at every address of its machine."""


class HeadServerConfig(BaseModel):
    """Where the head server of NeMo-Gym is, as its own config says it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(11000, ge=1, le=65535)

    @property
    def url(self) -> str:
        """Base URL."""
        return _url(self.host, self.port)


class UnknownServerError(Exception):
    """The head server's config has no such server; `known` are those of its kind."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(name)
        self.known = known


class HeadServer:
    """See the module docstring. Blocks while it asks for the config, for which the head server may take
    `ready_timeout_s` to be there."""

    def __init__(self, config: HeadServerConfig, *, ready_timeout_s: float, retries: int = 3) -> None:
        self.config = config
        self._ready_timeout_s = ready_timeout_s
        self._retries = retries

    def agent(self, name: str) -> str:
        """Base URL of an agent server."""
        return self._address(name, AGENTS)

    def resources_server(self, name: str) -> str:
        """Base URL of a resources server, or of the one that the agent of this name uses."""
        if name in self._named(AGENTS):
            used = self._instance(name, AGENTS).get("resources_server")
            if not isinstance(used, Mapping):
                raise self._incomplete(f"which resources server the agent {name} uses", used)
            name = text_of(used.get("name"))
        return self._address(name, RESOURCES)

    @cached_property
    def known(self) -> Mapping[str, Any]:
        """The whole config."""
        import yaml

        client = JsonClient(self.config.url, timeout_s=30.0, retries=self._retries)
        try:
            client.wait_until_ready(self._ready_timeout_s)
            answer = client.read(GLOBAL_CONFIG)
        except (ServerUnreachableError, HttpStatusError) as error:
            raise WorkerLostError(
                "the head server of NeMo-Gym does not answer",
                where=f"{self.config.url}{GLOBAL_CONFIG}",
                found=str(error),
                hints=(f"curl {self.config.url}{GLOBAL_CONFIG}",),
            ) from error
        finally:
            client.close()
        try:
            found = yaml.safe_load(answer) if isinstance(answer, str) else None
        # A date or a number that Python has none for is a ValueError.
        except (yaml.YAMLError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._incomplete("NeMo-Gym's config, a JSON string of YAML", answer)
        return found

    def _named(self, kind: str) -> list[str]:
        return [text_of(name) for name, entry in self.known.items() if isinstance(entry, Mapping) and kind in entry]

    def _instance(self, name: str, kind: str) -> Mapping[str, Any]:
        """The settings of a server: those of the first implementation below its name, as NeMo-Gym itself reads it."""
        entry = self.known.get(name)
        if not isinstance(entry, Mapping) or kind not in entry:
            raise UnknownServerError(name, self._named(kind))
        built = entry[kind]
        first = next(iter(built.values()), None) if isinstance(built, Mapping) else None
        if not isinstance(first, Mapping):
            raise self._incomplete(f"the settings of {name}", built)
        return first

    def _address(self, name: str, kind: str) -> str:
        found = self._instance(name, kind)
        host, port = found.get("host"), found.get("port")
        if not isinstance(host, str) or not _HOST.fullmatch(host) or type(port) is not int or not 0 < port < 65536:
            raise self._incomplete(f"host and port of {name}", {"host": host, "port": port})
        # A server that listens everywhere is reached where the head server is.
        return _url(self.config.host if host in _ANY_ADDRESS else host, port)

    def _incomplete(self, expected: str, found: Any) -> ConfigError:
        return ConfigError(
            "the head server does not say where a server of NeMo-Gym is",
            where=f"{self.config.url}{GLOBAL_CONFIG}",
            expected=expected,
            found=text_of(found, 200, repr),
            hints=(f"curl {self.config.url}{GLOBAL_CONFIG}",),
        )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
