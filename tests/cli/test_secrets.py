"""No secret of a command line, an environment or a config reaches a file or the screen."""

import re
from pathlib import Path

import pytest

MANIFEST = """
[step]
id = "leaky/call"
name = "call"
category = "toy"
description = "Writes what it was given wherever it can."
entry = "leaky_steps:run"
[[produces]]
type = "leaky_file"
name = "file"
"""
TYPES = """
[leaky_file]
description = "a file"
"""
CONFIG = """
base_url: https://someone:canary-userinfo@host/v1?api-version=2024&key=canary-query&x=1
storage: https://host/c?sv=2020&sig=canary-signature
from_env: ${oc.env:PLAIN_NAME}
inside: prefix/${oc.env:PLAIN_NAME}/suffix
again: ${from_env}
PGPASSWORD: canary-pg
MY_PASS: canary-pass
OPENAI_KEY: canary-openai
WANDB_KEY: canary-wandb
accessToken: canary-access
clientSecret: canary-client
GITLAB_TOKEN_1: canary-gitlab
headers: {Authorization: Bearer canary-header, X-Api-Key: canary-x, Accept: text}
arguments: [--host, here, --api-key, canary-flag]
variables: [{name: HF_TOKEN, value: canary-named}]
note: "call it with --token canary-note or PASSWORD=canary-note2"
short: {api_key: abc9}
model: ${oc.env:JUDGE_MODEL}
max_new_tokens: 512
pad_token: <|pad|>
tokenizer: org/tokenizer
answer_key: answer
cache_key: 0123456789abcdef0123456789abcdef
"""
STEP = """
import json, logging, os

def run(context):
    log = logging.getLogger("nemotron_steps.leaky")
    log.warning("config: %s", json.dumps(context.config))
    log.warning("repr: %r", context.config)
    log.warning("Authorization: Bearer canary-log")
    log.warning('answer: {"hf_token": "canary-json", "tokens": 17}')
    log.warning("GET https://host/v1?access_token=canary-get with %s", os.environ["PGPASSWORD"])
    log.warning("key sk-proj-canary-0123456789abcdefghij in a sentence")
    context.tracker.event("request", url=context.config["base_url"], headers=context.config["headers"])
    context.tracker.sample({"prompt": context.config["from_env"], "response": "api_key=canary-sample"})
    context.tracker.summary({"called": "https://host/?token=canary-summary"})
    (context.outputs["file"].path / "file.txt").write_text("x")
    if context.config["fail"]:
        raise RuntimeError(f"401 for {json.dumps(context.config)} with Bearer canary-0123456789-error")
"""
SHOWN = (
    "max_new_tokens: 512",
    "pad_token: <|pad|>",
    "tokenizer: org/tokenizer",
    "answer_key: answer",
    "model: org/judge",
)


@pytest.fixture
def pack(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "leaky_pack"
    for path, text in {
        "manifests/leaky/call.toml": MANIFEST,
        "manifests/types.toml": TYPES,
        "configs/leaky/call/default.yaml": CONFIG + "fail: false\n",
        "leaky_steps.py": STEP,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    monkeypatch.setenv("STEPS_PATH", str(root))
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("PLAIN_NAME", "canary-from-env")
    monkeypatch.setenv("PGPASSWORD", "canary-environment")
    monkeypatch.setenv("JUDGE_MODEL", "org/judge")
    return root


def canaries(text: str) -> set[str]:
    return set(re.findall(r"canary[\w-]*|abc9", text))


@pytest.mark.parametrize(
    "command", [("-d",), ("-d", "--json"), (), ("--json",), ("fail=true",), ("fail=true", "--json")]
)
def test_no_secret_reaches_a_file_or_the_screen(cli, workplace, pack, command):
    result = cli("run", "leaky/call", *command, "note='password: canary-override'")
    assert result.code == (1 if "fail=true" in command else 0), result.err
    assert canaries(result.out + result.err) == set()
    if "-d" in command:
        return
    home = workplace / "home"
    files = [path for path in home.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"config.yaml", "report.html", "log.txt", "events.jsonl", "run.json"}
    found = {str(path.relative_to(home)): canaries(path.read_text()) for path in files}
    assert {name: secrets for name, secrets in found.items() if secrets} == {}
    config = next(path for path in files if path.name == "config.yaml").read_text()
    assert [line for line in SHOWN if line not in config] == []
    assert "${oc.env:PLAIN_NAME}" in config


def test_a_dry_run_shows_what_is_no_secret(cli, pack):
    shown = cli("run", "leaky/call", "-d").out
    assert [line for line in SHOWN if line not in shown] == []
    assert "from_env: ${oc.env:PLAIN_NAME}" in shown
    assert "https://***@host/v1?api-version=2024&key=***&x=1" in shown
    assert "arguments:\n- --host\n- here\n- --api-key\n- '***'" in shown


@pytest.mark.parametrize(
    "override",
    [
        "judge.api_key=canary$(x",
        "judge.api_key=canary1,canary2",
        "judge.api_kye=canary",
        "hf_token=canary",
        "optimizer.lr=canary-0123456789abcdefgh",
    ],
)
def test_the_value_of_a_refused_override_is_not_echoed(cli, override):
    for command in (("plan",), ("run",), ("run", "-d")):
        result = cli(command[0], "toy/train", *command[1:], override)
        assert result.code == 2 and result.err.startswith("error[")
        assert canaries(result.out + result.err) == set()
    assert canaries(cli("plan", "toy_all", override).err) == set()


SECRETS = [
    *(
        f"{command} {words}"
        for command in ("plan toy/train", "run toy_all --json")
        for words in (
            "judge.api_key canary",
            "judge.api_key: canary",
            "judge.api_key:canary",
            "--judge.api_key canary",
            "--api-key canary",
            "token:canary",
            "judge.api_key canary=",
            "toy/train.judge.api_key canary",
        )
    ),
    "show api_key canary",
    "env serve equivalence_llm_judge api_key= canary",
    "plan toy/train api_key canary --dryrun",
    "artifacts show api_key canary",
    "run toy/train judge.api_key --seed 1 canary",
    "run toy/train judge.api_key --dry-run canary",
    "run toy/train judge.api_key -canary",
    "run toy/train judge.api_key --CANARY-canary",
]


@pytest.mark.parametrize("command", SECRETS)
def test_a_secret_is_in_no_error_however_it_was_written_apart_from_its_key(cli, command):
    result = cli(*command.split())
    assert result.code == 2 and ("--json" in command or result.err.startswith("error["))
    assert "canary" not in result.out + result.err
