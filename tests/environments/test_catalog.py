"""What is told of an environment's settings is what its class says."""

from __future__ import annotations

import pytest
from pydantic_core import to_jsonable_python

from nemotron_steps.environments import catalog, registry
from nemotron_steps.environments.base import EnvironmentConfig


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_settings_are_told_with_their_defaults_and_whether_they_are_needed(name: str) -> None:
    fields = registry.environment_class(name).config_class.model_fields
    told = {setting.name: setting for setting in catalog.described(name).settings}
    assert told.keys() == fields.keys()
    for key, field in fields.items():
        assert told[key].required == field.is_required()
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        assert told[key].default == to_jsonable_python(default)
        assert told[key].text or not told[key].required


def test_a_needed_setting_and_one_with_a_default() -> None:
    told = {setting.name: setting for setting in catalog.described("reward_function").settings}
    assert told["functions"].required and not told["max_steps"].required


def test_the_agents_of_an_environment_are_those_that_lead_to_it() -> None:
    assert catalog.agents_of("genrm_compare") == ("genrm_simple_agent_reasoning_off", "genrm_simple_agent")
    assert catalog.agents_of("workplace_assistant") == ("workplace_assistant_simple_agent",)
    assert catalog.agents_of("calendar") == ()


def test_an_agent_that_needs_a_server_says_so_and_what_it_would_be() -> None:
    told = catalog.described("swe_agents_train")
    assert told.environment == "remote_agent" and told.needs is not None and "agent server" in told.needs
    assert (told.reward_range, told.judges) == (None, ())  # it is nothing without settings
    assert catalog.described("mcqa").needs is None
    assert catalog.known("swe_agents_train") and catalog.known("mcqa_simple_agent") and not catalog.known("nobody")


def test_the_text_of_a_setting_is_that_of_the_class_that_says_it_last() -> None:
    class Base(EnvironmentConfig):
        size: int = 1
        """Of the base."""

    class More(Base):
        size: int = 2
        """Of this one."""

    assert catalog.field_texts(More)["size"] == "Of this one."
    assert catalog.field_texts(More)["max_steps"].startswith("Assistant turns")
