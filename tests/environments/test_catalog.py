"""What is told of an environment's settings is what its class says."""

from __future__ import annotations

import pytest

from nemotron_steps.environments import catalog, registry


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_settings_are_told_with_their_defaults_and_whether_they_are_needed(name: str) -> None:
    fields = registry.environment_class(name).config_class.model_fields
    told = {setting.name: setting for setting in catalog.described(name).settings}
    assert told.keys() == fields.keys()
    for key, field in fields.items():
        assert told[key].required == field.is_required()
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        assert told[key].default == default
        assert told[key].text or not told[key].required


def test_a_needed_setting_and_one_with_a_default() -> None:
    told = {setting.name: setting for setting in catalog.described("reward_function").settings}
    assert told["functions"].required and not told["max_steps"].required
