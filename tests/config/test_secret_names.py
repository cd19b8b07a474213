"""Every word by which a name says that its value is a secret, or that it is none."""

from __future__ import annotations

import pytest

from nemotron_steps.config.secrets import Strength, strength

ALWAYS = (
    "password passwords passwd passphrase passcode pwd secret secrets credential credentials creds apikey apikeys "
    "authorization bearer"
)
ENDINGS = "password passwd passphrase secret apikey credentials accesskey privatekey"
KEYS = (
    "api access private secret auth signing encryption service account client ssh deploy master subscription license "
    "storage session shared webhook"
)
DATA_KEYS = "cache public sort primary foreign group partition hash dedup lookup index row"
TEXT_TOKENS = (
    "pad padding eos bos unk sep cls mask special stop end start begin first last next new prev previous per by each "
    "every single max min num total mean image img video audio speech vision think thinking reasoning tool prompt "
    "response answer sample sampled system user assistant separator delimiter decoder encoder added extra vocab boi "
    "eoi eom eot eod sot im fim prefix suffix middle patch class text word language lang target source draft output "
    "input generated placeholder call line newline space byte char time to of yes no positive negative good bad turn "
    "role chat a the one this that"
)
TOKENS = "api access auth refresh hf hub github gitlab"
PASSES = "forward backward two one first second third num by per single multi full all final did must"
ABOUT = (
    "file path dir folder env var variable name names field column type length policy provider backend manager enabled "
    "required format count expiry"
)


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (ALWAYS, "{}", Strength.ANY),
        (ALWAYS, "my_{}_2", Strength.ANY),
        (ENDINGS, "my{}", Strength.ANY),
        (KEYS, "{}_key", Strength.ANY),
        (KEYS, "x.{}Keys", Strength.ANY),
        (DATA_KEYS, "{}_key", Strength.NONE),
        (DATA_KEYS, "{}_KEYS", Strength.NONE),
        (TEXT_TOKENS, "{}_token", Strength.NONE),
        (TEXT_TOKENS, "{}token", Strength.NONE),
        (TOKENS, "{}_tokens", Strength.TEXT),
        (TOKENS, "{}_token", Strength.TEXT),
        (PASSES, "{}_pass", Strength.NONE),
        (ABOUT, "api_key_{}", Strength.NONE),
        ("auth cookie cookies dsn webhook", "my_{}", Strength.TEXT),
        ("connection_string webhook_url auth_header pass db_pass SSHPASS GITHUB_PAT OPENAI_KEY", "{}", Strength.TEXT),
        ("openai_key openai_keys", "{}", Strength.MAYBE),
        ("string url header key keys KEY pat PAT bypass BYPASS COMPASS sshpass github_pat 12 - new_tokens", "{}",
         Strength.NONE),
    ],
)  # fmt: skip
def test_each_word_says_as_much_as_it_does(words: str, name: str, expected: Strength) -> None:
    said = {word: strength(name.format(word)) for word in words.split()}
    assert {word: each for word, each in said.items() if each is not expected} == {}
