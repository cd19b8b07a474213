"""Relative overrides become plain ones that can be pasted."""

from __future__ import annotations

import pytest

from nemotron_steps.manifest.override import is_override, resolve_override

CONFIG = {"a": {"kl": 1e-4, "zero": 0, "batch": 8, "on": True, "none": None}}


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a.kl=5", "a.kl=5"),
        ("a.kl*=10|0.001", "a.kl=0.001"),
        ("a.zero*=10|0.001", "a.zero=0.001"),
        ("a.missing*=10|0.001", "a.missing=0.001"),
        ("a.on*=10|2", "a.on=2"),
        ("a.none/=2|7", "a.none=7"),
        ("a.batch/=2|1", "a.batch=4"),
        ("a.batch/=100|1", "a.batch=1"),
        ("a.batch*=1.5|1", "a.batch=12"),
        ("a.batch/=3|1", "a.batch=3"),
        ("a.batch*=0.3|1", "a.batch=2"),
        ("a.kl/=3|1", "a.kl=3.33333e-05"),
        ("~a.kl", "~a.kl"),
        ("+a.new=1", "+a.new=1"),
    ],
)
def test_resolve(text: str, plain: str) -> None:
    assert is_override(text)
    assert resolve_override(text, CONFIG) == plain


@pytest.mark.parametrize("text", ["a.kl", "raise the KL", "a.kl*=2", "a.kl*=x|1", "", "=1"])
def test_not_an_override(text: str) -> None:
    assert not is_override(text)
