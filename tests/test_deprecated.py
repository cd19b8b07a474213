"""Modules and names that have moved are found under their old names, with a warning."""

from importlib import import_module
from types import ModuleType

import pytest

from nemotron_steps import deprecated


@pytest.mark.parametrize("old", sorted(deprecated.MOVED))
def test_a_moved_module_is_found_under_its_old_name(old: str):
    with pytest.warns(DeprecationWarning, match=old):
        module = import_module(f"nemotron_steps.{old}")
    assert module is import_module(f"nemotron_steps.{deprecated.MOVED[old]}")


def test_a_renamed_name_gives_the_new_one(monkeypatch):
    module = ModuleType("renaming")
    module.New = object()
    monkeypatch.setitem(deprecated.sys.modules, "renaming", module)
    get = deprecated.renamed("renaming", {"Old": "New"})
    with pytest.warns(DeprecationWarning, match=r"renaming\.Old is now renaming\.New"):
        assert get("Old") is module.New
    with pytest.raises(AttributeError, match="other"):
        get("other")
