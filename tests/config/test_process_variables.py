"""Variables that are set for a while."""

from __future__ import annotations

import os

import pytest

from nemotron_steps.config.process_variables import variables_set


def test_variables_are_as_before_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(KeyError), variables_set({"KEPT": "within", "NEW": "within"}):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("within", "within")
        del os.environ["NEW"]
        raise KeyError
    assert os.environ["KEPT"] == "before" and "NEW" not in os.environ
