"""The environments of one run: created once for each settings, rows routed to them and checked before the first
rollout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nemotron_steps.environments.registry import Options, agent_of, create, environment_class, resolve, unknown_agent

if TYPE_CHECKING:
    from nemotron_steps.environments.base import Environment, Row
    from nemotron_steps.environments.judged.judges import Judge


POLICY_NAME = "policy"


class EnvironmentSet:
    """Environments by the name of an agent or of an environment, created on first use: one for each environment and
    settings (agents.py), however many agents use it. Without `only`, each row goes where its agent_ref says."""

    def __init__(self, options: Options, judges: Mapping[str, Judge], *, only: str | None = None) -> None:
        self._options = options
        self._judges = judges
        self._only = only
        self._environments: dict[str, Environment] = {}
        self._named: dict[str, Environment] = {}
        self._policy: dict[str, Any] = {}
        self.needs: set[str] = set()
        """What grading the rows that were checked needs of the machine, see Environment.needs."""
        self.first_offer: tuple[Row, str, Environment] | None = None
        """The first of the rows that were checked to offer the policy tools."""

    def offer_policy(self, base_url: str, model_name: str) -> None:
        """Tell environments that can use it where the policy is served; called before any is created."""
        self._policy = {"policy_base_url": base_url, "policy_model_name": model_name}

    def get(self, name: str) -> Environment:
        """The environment that an agent's or an environment's name stands for."""
        if name not in self._named:
            environment, settings = resolve(name, self._options) or (name, {})
            fields = environment_class(environment).config_class.model_fields
            told = {key: value for key, value in self._policy.items() if key in fields}
            settings = {**told, **settings}
            key = f"{environment} {json.dumps(settings, sort_keys=True, default=str)}"
            if key not in self._environments:
                self._environments[key] = create(environment, settings, self._judges)
            self._named[name] = self._environments[key]
        return self._named[name]

    def route(self, row: Row, where: str) -> Environment:
        """The environment that judges a row. DataError when the row names none that exists."""
        if self._only is not None:
            return self.get(self._only)
        agent = agent_of(row, where)
        if agent not in self._named and resolve(agent, self._options) is None:
            raise unknown_agent(agent, where)
        return self.get(agent)

    @property
    def names(self) -> tuple[str, ...]:
        """What was asked of `get` so far, in the order of the first times."""
        return tuple(self._named)

    def needed_judges(self) -> frozenset[str]:
        return frozenset(role for environment in self._environments.values() for role in environment.needed_judges())

    def check_rows(self, rows: Iterable[tuple[Row, str]], *, environment: str | None = None) -> set[str]:
        """Check every (row, file:line) against its environment, or the one named, before anything is sampled; returns
        the names of the environments that the rows need."""
        needed: set[str] = set()
        for row, where in rows:
            graded_by = self.route(row, where) if environment is None else self.get(environment)
            graded_by.check_row_with_resources(row, where)
            needed.add(graded_by.name)
            self.needs.update(graded_by.needs(graded_by.config, row))
            if self.first_offer is None and graded_by.tools_of(row):
                self.first_offer = (row, where, graded_by)
        return needed

    async def start(self) -> None:
        for environment in self._environments.values():
            await environment.start()

    async def close(self) -> None:
        for environment in self._environments.values():
            await environment.close()
