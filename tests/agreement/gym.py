"""NeMo-Gym's own graders out of a checkout of github.com/NVIDIA-NeMo/Gym, called without its servers.

Their `verify` runs as it is. Only what is plumbing there (ray, uvicorn, profilers, loggers) is replaced by a name that
does nothing, and only where it is not installed. What their graders import (xmltodict, nltk, ...) must be installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from nemotron_steps.environments.responses import Response, response_object

PLUMBING = ("ray", "uvicorn", "yappi", "pydot", "orjson", "wandb", "mlflow", "gprof2dot")
ERROR = "error"
"""Stands for the reward where their verify raised, which their HTTP server answers with status 500."""

Items = list[dict[str, Any]]
"""OpenAI Responses output items of one answer."""


class _Plumbing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __spec__=spec, __path__=[], __version__="0")

    def exec_module(self, module: Any) -> None:
        pass


class Gym:
    """A checkout of NeMo-Gym.

    Args:
        path: the folder that has `nemo_gym` and `resources_servers`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if not (self.path / "resources_servers").is_dir():
            raise SystemExit(f"{path}: expected a checkout of github.com/NVIDIA-NeMo/Gym, found no resources_servers")
        missing = {name for name in PLUMBING if importlib.util.find_spec(name) is None}
        sys.meta_path.append(_Plumbing(missing))
        sys.path.insert(0, str(self.path))
        if missing:
            print(f"not installed, and replaced by nothing: {', '.join(sorted(missing))}")

    def module(self, server: str, name: str = "app") -> Any:
        """A module of a resources server. Its folder is importable meanwhile, as where it runs as a server."""
        folder = str(self.path / "resources_servers" / server)
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(f"resources_servers.{server}.{name}")
        finally:
            sys.path.remove(folder)

    def data(self, server: str, name: str = "example.jsonl") -> Path:
        """A file of a resources server's data."""
        return self.path / "resources_servers" / server / "data" / name

    def grader(self, server: str, prefix: str, **config: Any) -> Grader:
        """The `verify` of a resources server.

        Args:
            prefix: of its classes' names, like MCQA of MCQAResourcesServer.
            config: settings other than the defaults.
        """
        app = self.module(server)
        settings = getattr(app, f"{prefix}ResourcesServerConfig")(host="", port=0, entrypoint="", name="", **config)
        client = MagicMock(spec=importlib.import_module("nemo_gym.server_utils").ServerClient)
        made = getattr(app, f"{prefix}ResourcesServer")(config=settings, server_client=client)
        return Grader(made, getattr(app, f"{prefix}VerifyRequest"))


class Grader:
    """One resources server of theirs."""

    def __init__(self, server: Any, request: Any) -> None:
        self.server = server
        self._request = request

    async def __call__(self, row: dict[str, Any], items: Items) -> float | str:
        """The reward, or ERROR."""
        try:
            body = self._request.model_validate({**row, "response": response_object(Response("", output=items))})
            return float((await self.server.verify(body)).reward)
        except Exception:
            return ERROR
