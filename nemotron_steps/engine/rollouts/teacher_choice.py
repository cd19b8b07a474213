"""Which teacher a prompt's row has: by a field of the row, by its agent, or the one that has all others.

Nothing here may import torch: a row without a teacher is refused before anything is loaded.
"""

from collections.abc import Mapping
from typing import Any

from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.opd import OnPolicyDistillationConfig
from nemotron_steps.environments.registry import agent_of
from nemotron_steps.errors import ConfigError, DataError, show_line

_SECTION = "on_policy_distillation"


class TeacherChoice:
    """Rows to names of teachers."""

    def __init__(self, config: OnPolicyDistillationConfig, *, only: str | None) -> None:
        self._config, self._only = config, only
        self._teachers = tuple(config.teachers)
        if not self._teachers:
            raise ConfigError(
                "on-policy distillation needs a teacher",
                where=f"{_SECTION}.teachers",
                expected="at least one",
                hints=("--input teachers.NAME=PATH",),
            )
        for agent, name in config.teacher_model_by_agent_name.items():
            self._known(name, f"{_SECTION}.teacher_model_by_agent_name.{agent}")
        for name in config.non_colocated_teachers.teacher_overrides:
            self._known(name, f"{_SECTION}.non_colocated_teachers.teacher_overrides.{name}")
        self._default = config.default_teacher_alias
        if self._default is not None:
            self._known(self._default, f"{_SECTION}.default_teacher_alias")

    def of(self, row: Mapping[str, Any], where: str) -> str:
        """The teacher of a row."""
        config = self._config
        if config.teacher_field is not None:
            name = row.get(config.teacher_field)
            if name is not None:
                if name not in self._teachers:
                    raise DataError(
                        f"the row's teacher '{name}' is not there",
                        where=f"{where} field {config.teacher_field}",
                        expected=" or ".join(self._teachers),
                        found=str(name),
                        hints=(f"--input teachers.{name}=PATH", *show_line(where)),
                    )
                return str(name)
        agent = self._only if self._only is not None else agent_of(row, where)
        chosen = config.teacher_model_by_agent_name.get(agent, self._default)
        if chosen is None and len(self._teachers) == 1:
            return self._teachers[0]
        if chosen is None:
            raise DataError(
                f"no teacher for rows of '{agent}'",
                where=where,
                expected=f"one of {', '.join(self._teachers)}",
                found=f"teachers for {', '.join(config.teacher_model_by_agent_name) or 'no agent'}",
                hints=(
                    f"+{_SECTION}.teacher_model_by_agent_name.{agent}={self._teachers[0]}",
                    f"{_SECTION}.default_teacher_alias={self._teachers[0]}",
                ),
            )
        return chosen

    def _known(self, name: str, key: str) -> None:
        if name not in self._teachers:
            close = nearest(name, self._teachers) or self._teachers[:1]
            chosen = () if key.endswith(f".{name}") else (f"{key}={close[0]}",)
            raise ConfigError(
                f"unknown teacher '{name}'",
                where=key,
                expected=" or ".join(self._teachers),
                found=name,
                hints=(*chosen, f"--input teachers.{name}=PATH"),
            )
