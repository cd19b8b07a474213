"""Tokens of known services inside text: told by their beginning and their length."""

from __future__ import annotations

import pytest

from nemotron_steps.config.secrets import redact_text

BEGINNINGS = {
    "AKIA ASIA ABIA ACCA A3TX": 16,
    "ghp_ gho_ ghu_ ghs_ ghr_": 30,
    "github_pat_": 22,
    "glpat- gldt- glft- glsoat- glrt- glcbt- glptt- glagent- gloas- glimt- glffct-": 20,
    "dckr_pat_ dckr_oat_": 20,
    "hf_": 30,
    "nvapi- gsk_ xai- r8_ ya29. lsv2_pt_ lsv2_sk_": 20,
    "sk- tvly-": 16,
    "AIza": 35,
    "xoxb- xoxa- xoxe- xoxo- xoxp- xoxr- xoxs-": 10,
    "sk_live_ sk_test_ rk_live_ rk_test_": 16,
    "SG.ABCDEFGHIJKLMNOP.": 16,
    "npm_": 36,
    "pypi-AgE": 50,
    "eyJABCDEFGHIJ.": 10,
}
"""Beginnings of tokens → what follows at least."""


@pytest.mark.parametrize(("begins", "length"), [(each, n) for words, n in BEGINNINGS.items() for each in words.split()])
def test_a_token_of_a_service_is_masked_from_its_shortest_length_on(begins: str, length: int) -> None:
    rest = ("0" + "ABCDEFGHIJ" * 5)[:length] + ("." if begins.startswith("eyJ") else "")
    assert redact_text(f"sent {begins}{rest} there", {}) == "sent *** there"
    short = f"sent {begins}{rest[1:]} there"
    assert redact_text(short, {}) == short
    inside = f"sent x{begins}{rest} there"
    assert redact_text(inside, {}) == inside


def test_a_word_that_begins_as_a_token_and_has_no_digit_is_none() -> None:
    text = "the sk-learn-estimator-of-everything"
    assert redact_text(text, {}) == text
