"""Environments that run programs in the sandbox that their settings name."""

from typing import Any

from nemotron_steps.environments.base import Environment, EnvironmentConfig, Row
from nemotron_steps.sandbox import create_sandbox


class SandboxedConfig(EnvironmentConfig):
    """Settings of such an environment."""

    sandbox: str = "bubblewrap"
    """Where programs run: a name of the sandbox registry, such as bubblewrap or docker."""
    sandbox_image: str | None = None
    """Container image, for a sandbox that has images."""


class SandboxedEnvironment(Environment):
    """An environment with a sandbox."""

    config: SandboxedConfig

    @classmethod
    def needs(cls, config: Any, row: Row | None = None) -> tuple[str, ...]:
        return (config.sandbox,)

    def _setup(self) -> None:
        self._make_sandbox()

    def _make_sandbox(self, **options: Any) -> None:
        if self.config.sandbox_image:
            options["image"] = self.config.sandbox_image
        self.sandbox = create_sandbox(self.config.sandbox, **options)

    async def start(self) -> None:
        await self.sandbox.start()

    async def close(self) -> None:
        await self.sandbox.close()
        await super().close()
