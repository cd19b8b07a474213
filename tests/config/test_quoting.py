"""Any text is itself as the value of an override."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.session.pipelines import quoted


def read(text: str) -> object:
    return OverridesParser.create().parse_override(f"key={quoted(text)}").value()


@settings(max_examples=100, deadline=None)
@given(st.text("a\\'\" ,", max_size=8))
def test_any_mixture_of_them_is_kept(text: str) -> None:
    assert read(text) == text
