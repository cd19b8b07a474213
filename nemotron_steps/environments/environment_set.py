"""The environments of one run: created once each, rows routed to them and checked before the first rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nemotron_steps.environments.registry import create, environment_class, route

if TYPE_CHECKING:
    from nemotron_steps.environments.base import Environment, Row
    from nemotron_steps.environments.judged.judges import Judge


POLICY_NAME = "policy"
"""What the policy's endpoint calls the model in training."""


class EnvironmentSet:
    """Environments by name, created on first use.

    Args:
        options: settings of each environment, by name.
        judges: judges by role, handed to every environment.
        only: the one environment every row goes to; None routes each row by its agent_ref.
    """

    def __init__(
        self, options: Mapping[str, Mapping[str, Any]], judges: Mapping[str, Judge], *, only: str | None = None
    ) -> None:
        self._options = options
        self._judges = judges
        self._only = only
        self._environments: dict[str, Environment] = {}
        self._policy: dict[str, Any] = {}

    def offer_policy(self, base_url: str, model_name: str) -> None:
        """Tell environments that can use it where the policy is served; called before any is created."""
        self._policy = {"policy_base_url": base_url, "policy_model_name": model_name}

    def get(self, name: str) -> Environment:
        """The environment of that name.

        Raises:
            UnknownNameError: there is none. ConfigError: its options are wrong or a judge is missing.
        """
        if name not in self._environments:
            fields = environment_class(name).config_class.model_fields
            told = {key: value for key, value in self._policy.items() if key in fields}
            self._environments[name] = create(name, {**told, **self._options.get(name, {})}, self._judges)
        return self._environments[name]

    def route(self, row: Row, where: str) -> Environment:
        """The environment that judges a row. DataError when the row names none that exists."""
        return self.get(self._only or route(row, where))

    def check_rows(self, rows: Iterable[tuple[Row, str]]) -> set[str]:
        """Check every (row, file:line) against its environment, before anything is sampled.

        Returns:
            Names of the environments the rows need.

        Raises:
            DataError: the first row that its environment could not score.
        """
        needed: set[str] = set()
        for row, where in rows:
            environment = self.route(row, where)
            environment.check_row(row, where)
            needed.add(environment.name)
        return needed

    async def start(self) -> None:
        """Start every environment created so far."""
        for environment in self._environments.values():
            await environment.start()

    async def close(self) -> None:
        """Close every environment created so far."""
        for environment in self._environments.values():
            await environment.close()
