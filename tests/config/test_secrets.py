"""What is masked: by the name of a key, by a variable, by the shape of a token; and what is not."""

import time

import pytest

from nemotron_steps.config import secrets
from nemotron_steps.config.hydra_loader import parse_overrides
from nemotron_steps.config.secrets import (
    MASK,
    is_secret_key,
    note_variables,
    redact,
    redact_text,
    secrets_in,
    shown_override,
)
from nemotron_steps.config.validation import known_keys, load_schema
from nemotron_steps.manifest.registry import load_registry

SECRET_NAMES = """
hf_token env.WANDB_API_KEY api_key apikey password db_password AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID PGPASSWORD
SSHPASS MY_PASS OPENAI_KEY WANDB_KEY accessToken clientSecret GITLAB_TOKEN_1 token TOKEN2 hfToken auth Authorization
X-Api-Key x-auth-token APIKey privateKey refresh_token id_token bot_token credentials dbPassword passphrase GITHUB_PAT
SENTRY_DSN secret_key_base connection_string Set-Cookie api_tokens service_account_key webhook_url
judge.client.secretKey
"""
ORDINARY_NAMES = """
max_new_tokens stop_token_ids tokenizer train_mb_tokens api_key_env author key pad_token eos_token bos_token mask_token
image_token per_token loss_per_token kl_per_token token_level_loss num_key_value_heads cache_key public_key sort_key
keys monkey password_file secret_name token_count pass_at_k bypass forward_pass tokens stop_token thinking_start_token
upper_bound_tokens compass authors passthrough TOKENIZERS_PARALLELISM XDG_SESSION_ID SSH_AUTH_SOCK
"""


def test_names_of_secrets_are_told_from_all_keys_of_the_built_in_configs():
    assert [key for key in SECRET_NAMES.split() if not is_secret_key(key)] == []
    schemas = {step.step.config_schema for step in load_registry().steps.values()} - {None}
    keys = {key for schema in schemas for key in known_keys(load_schema(schema))}
    assert len(keys) > 300
    assert [key for key in sorted(keys) if is_secret_key(key)] == []


@pytest.mark.parametrize("key", ORDINARY_NAMES.split())
def test_ordinary_keys(key):
    assert not is_secret_key(key)
    for value in ("text", 3, 0.5, True, "<|end|>", None):
        assert redact({key: value}, {}) == {key: value}
        assert redact_text(f"with {key}={value} and", {}) == f"with {key}={value} and"
    if key.isupper():
        assert redact_text("a-long-value-here", {key: "a-long-value-here"}) == "a-long-value-here"


def test_a_name_that_may_be_a_column_is_judged_by_its_value():
    values = {"openai_key": "Zx81kQ0pLmN2vB7c", "answer_key": "final_answer", "group_key": "Zx81kQ0pLmN2vB7c"}
    assert redact(values, {}) == {**values, "openai_key": MASK}
    assert redact_text("openai_key: Zx81kQ0pLmN2vB7c, answer_key: final_answer", {}) == (
        "openai_key: ***, answer_key: final_answer"
    )


def test_what_a_config_read_from_the_environment_is_shown_as_that_unless_it_is_harmless(monkeypatch, tmp_path):
    monkeypatch.setattr(secrets, "_interpolated", set())
    environment = {
        "THING": "opensesame",
        "PLACE": str(tmp_path),
        "ABSENT": "/none/of-it",
        "MODEL": "org/model-7b",
        "N": "1234567",
        "OTHER": "unread!",
        "KEYLIKE": "wJalrXUtnFEMIK7MDENGbPxRfi/CYEXAMPLEKEYab",
        "SHORT": "abc12",
    }
    environment["URL"] = "https://me:pw@host/v1"
    note_variables(environment.keys() - {"OTHER"})
    assert redact({name: f"{value}" for name, value in environment.items()}, environment) == {
        **environment,
        "THING": "${oc.env:THING}",
        "KEYLIKE": "${oc.env:KEYLIKE}",
        "URL": "https://***@host/v1",
    }
    assert redact_text("open with opensesame now", environment) == "open with ${oc.env:THING} now"


def test_redact_by_key_by_value_and_in_urls():
    environment = {"HF_TOKEN": "hf_0123456789", "SHORT_TOKEN": "abc", "PATH": "/usr/bin"}
    values = {
        "hf_token": "anything",
        "model": "prefix-hf_0123456789",
        "urls": ["https://me:pass@host/x", "https://host/abc"],
        "nested": {"api_key": None, "password": ""},
        "steps": 3,
    }
    assert redact(values, environment) == {
        "hf_token": MASK,
        "model": f"prefix-{MASK}",
        "urls": [f"https://{MASK}@host/x", "https://host/abc"],
        "nested": {"api_key": None, "password": ""},
        "steps": 3,
    }


def test_every_text_that_is_secret_by_its_name_is_known_for_what_else_is_written():
    values = {
        "env": [{"name": "HF_TOKEN", "value": "one"}, {"name": "HOME", "value": "plain"}],
        "args": ["serve", "--api-key", "two", "--port", "plain"],
        "nested": {"api_key": {"of": ["three", "four"]}, "password": "", "db_password": None, "steps": 3},
        "overrides": ["judge.api_key=five", "+a.hf_token='six'", "model=plain", "~judge.api_key"],
    }
    found = set(secrets_in(values))
    assert found == {"one", "two", "three", "four", "five", "six", "'six'"}
    assert not any(secret in str(redact(values, {})) for secret in found - {"one"})
    assert list(secrets_in({"HF_TOKEN": True, "tokens": "plain", "n": [1, None]})) == []


def test_a_secret_that_begins_as_another_does_is_masked_to_its_end():
    secrets = {"X_TOKEN": "river-bank", "Y_TOKEN": "river-bank-under-water", "Z_TOKEN": "old river-bank"}
    assert redact_text("say river-bank-under-water, old river-bank or river-bank", secrets) == "say ***, *** or ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("judge.api_key=abc def", "judge.api_key=***"),
        ("override 'judge.api_key=[hunter2]'", "override 'judge.api_key=***'"),
        ("steps run x a=1 hf_token=secret b=2", "steps run x a=1 hf_token=*** b=2"),
        ("with password='two words', next", "with password=***, next"),
        ("Authorization: Bearer x", "Authorization: Bearer ***"),
        ('{"hf_token": "x", "tokens": 3}', '{"hf_token": "***", "tokens": 3}'),
        ('"{\\"hf_token\\": \\"x y\\", \\"n\\": 1}"', '"{\\"hf_token\\": \\"***\\", \\"n\\": 1}"'),
        ("hf_token: x\nn: 1", "hf_token: ***\nn: 1"),
        ("serve --api-key x --port 8", "serve --api-key *** --port 8"),
        ("export PGPASSWORD=a; OPENAI_KEY=b run", "export PGPASSWORD=***; OPENAI_KEY=*** run"),
        ("GET https://h/v1?api-version=2&key=abc#token=d", "GET https://h/v1?api-version=2&key=***#token=***"),
        ("https://user:pa/ss@host/x", "https://***@host/x"),
        ("http://user:hunter2@h:8000/v1?n=1&api_key=abc&m=2", "http://***@h:8000/v1?n=1&api_key=***&m=2"),
        ("s3 https://b/k?X-Amz-Signature=ab&X-Amz-Date=2", "s3 https://b/k?X-Amz-Signature=***&X-Amz-Date=2"),
        ("-----BEGIN PRIVATE KEY-----\nab\n-----END PRIVATE KEY-----", "***"),
        ('with password="a b\nnext "line" here', 'with password=***\nnext "line" here'),
        ("with password=[a, b] secret={x: y} n=1", "with password=*** secret=*** n=1"),
        ("SENT BEARER abcdef0123456789", "SENT BEARER ***"),
        ("the token: a word; 5 tokens: 7", "the token: a word; 5 tokens: 7"),
        ("for token in tokens: token = tokens[i]", "for token in tokens: token = tokens[i]"),
        ("cache_key=0123456789abcdef0123456789abcdef", "cache_key=0123456789abcdef0123456789abcdef"),
    ],
)
def test_assignments_inside_a_sentence(text, shown):
    assert redact_text(text, {}) == shown


@pytest.mark.parametrize(
    "piece",
    ["a=", '"token": "', "token: \\", "a://b?c=d&", "-----BEGIN PRIVATE KEY-----", "eyJ-", "--api-key ", "secret=["],
)
def test_masking_takes_time_in_proportion_to_the_text(piece):
    def seconds(length):
        text = piece * (length // len(piece))
        started = time.process_time()
        redact_text(text, {})
        return time.process_time() - started

    small, large = 20_000, 160_000
    redact_text(piece, {})
    assert min(seconds(large) for _ in range(2)) < 30 * max(min(seconds(small) for _ in range(3)), 0.002)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("judge.api_key=a b", "judge.api_key=***"),
        ("judge.api_kye=a=b", "judge.api_kye=***"),
        ("a.b=c=d", "a.b=c=d"),
        ("grpo.max_steps=5", "grpo.max_steps=5"),
        ("a.b=Zx81kQ0pLmN2vB7c", "a.b=***"),
    ],
)
def test_a_refused_override_is_shown_without_what_may_be_a_secret(override, shown):
    assert shown_override(override) == shown


@pytest.mark.parametrize(
    "overrides",
    [["judge.api_key canary"], ["judge.api_key", "=canary"]],
)
def test_an_override_without_a_sign_is_refused_without_the_value_of_a_secret(overrides: list[str]) -> None:
    parsed, problems = parse_overrides(overrides)
    assert not parsed and problems and not [each for each in problems if "canary" in str(each)]


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
