"""Every block of Python, YAML, TOML or JSON that a page shows holds: it has a check here, or a test that runs it."""

import asyncio
import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from nemotron_steps.config.profiles import MirrorSettings, load_environment
from nemotron_steps.engine.types import FinishReason, SamplingParams
from nemotron_steps.environments.registry import create, resolve
from tests.cli.conftest import Cli, cli, workplace  # noqa: F401, fixtures
from tests.docs.pages import FENCE, PAGES, ROOT
from tests.engine.rollouts.scripted import ScriptedGenerator
from tests.models.stock_chats import stock_chat

Check = Callable[[str, Cli], None]
"""What is done with a block, in an empty folder."""


def planned(cli: Cli, *words: str) -> None:  # noqa: F811
    result = cli("run", *words, "-d")
    assert result.code == 0, result.err


def config(step: str, before: str = "") -> Check:
    """A config of a step, as `-c FILE`; `before` is what a fragment builds on."""

    def check(block: str, cli: Cli) -> None:  # noqa: F811
        Path("mine.yaml").write_text(before + block)
        planned(cli, step, "-c", "mine.yaml")

    return check


def pipeline(before: str = "", *named: str) -> Check:
    """A pipeline's file, without `-c` and with each name of its own."""

    def check(block: str, cli: Cli) -> None:  # noqa: F811
        Path("mine.toml").write_text(before + block)
        planned(cli, "./mine.toml")
        for name in named:
            planned(cli, "./mine.toml", "-c", name)

    return check


def reward(block: str, cli: Cli) -> None:  # noqa: F811
    """A reward function: the right one of two short answers, as texts and as chats."""
    named: dict[str, Any] = {}
    exec(block, named)
    (function,) = [each for name, each in named.items() if name != "__builtins__"]
    chats = [[{"role": "assistant", "content": text}] for text in ("2", "3")]
    for completions in (["2", "3"], chats):
        given = function(prompts=["1 + 1?"] * 2, completions=completions, answer=["2"] * 2, uuid=["a", "b"])
        assert (asyncio.run(given) if inspect.iscoroutine(given) else given) == [1.0, 0.0]


def profiles(block: str, cli: Cli) -> None:  # noqa: F811
    """An env.toml: a run can be planned on each of its profiles, and its mirrors are understood."""
    Path("env.toml").write_text(block)
    environment = load_environment()
    assert {*environment.names, *environment.mirror_tables} == set(tomllib.loads(block))
    assert isinstance(environment.mirrors, MirrorSettings)
    for name in environment.names:
        planned(cli, "rl/nemo_rl/rlvr", "-c", "tiny", "-b", name)


def agents(block: str, cli: Cli) -> None:  # noqa: F811
    """Settings of environments, which a run reads: a plan does not look into them."""
    config("rl/nemo_rl/rlvr", "defaults: [tiny]\n")(block, cli)
    options = yaml.safe_load(block)["env"]["nemo_gym"]["environments"]
    for name in options:
        found = resolve(name, options)
        assert found is not None, name
        create(*found)


def blend(block: str, cli: Cli) -> None:  # noqa: F811
    """A blend file: its rows, from copies, are the rows of the splits."""
    row = {"responses_create_params": {"input": "1 + 1?"}, "agent_ref": {"name": "math_with_judge_simple_agent"}}
    rows = [{**row, "question": "1 + 1?", "expected_answer": "2", "uuid": str(n)} for n in range(40)]
    for file in ("hub/ORG/NAME/math-train.jsonl", "mine.jsonl"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("".join(json.dumps({**each, "from": file}) + "\n" for each in rows))
    Path("hub/ORG/NAME/code-train.jsonl").write_text("of another subset")
    Path("blend.json").write_text(block)
    keys = ("jsonl=null", "blend_path=blend.json", "mirror=hub", "rows.validation=0", "rows.heldout=0")
    result = cli("run", "data_prep/rl_prep", *keys)
    assert result.code == 0, result.err
    (made,) = Path("home").rglob("train-split.jsonl")
    read = [json.loads(line)["from"] for line in made.read_text().splitlines()]
    assert read.count("hub/ORG/NAME/math-train.jsonl") == 40 and 18 < read.count("mine.jsonl") < 22


def judge(block: str, cli: Cli) -> None:  # noqa: F811
    """A judge that is served: its client answers what the generator says, until the program's user presses a key."""
    chat = stock_chat("qwen3")
    generator = ScriptedGenerator(chat, lambda request, index: ("Yes.", True, FinishReason.STOP))
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(chat.tokenizer.eos_token_id,))
    answers = []

    def client() -> None:
        asked = {"messages": [{"role": "user", "content": "Is it?"}]}
        url = f"{named['e'].url}/chat/completions"
        with urlopen(Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})) as answer:
            answers.append(json.load(answer)["choices"][0]["message"]["content"])

    named: dict[str, Any] = {"generator": generator, "chat": chat, "params": params, "input": client}
    exec(block, named)
    assert answers == ["Yes."]


def conformance(block: str, cli: Cli) -> None:  # noqa: F811
    """A line of the kit: a class of tests."""
    named: dict[str, Any] = {}
    exec(block, named)
    (made,) = [each for each in named.values() if isinstance(each, type)]
    assert any(name.startswith("test_") for name in vars(made))


def pitfalls(block: str, cli: Cli) -> None:  # noqa: F811
    """A function called on answers by hand: it prints what the comment beside the call says."""
    named: dict[str, Any] = {}
    exec(block, named)
    assert f"# {named['score']([None] * 5, named['tried'], ['12'] * 5)}" in block


def front_matter(block: str, cli: Cli) -> None:  # noqa: F811
    """What a README.md begins with."""
    assert next(yaml.safe_load_all(block)) == {"license": "apache-2.0"}


PIPELINE = '[pipeline]\nname = "mine"\n\n'
STAGES = "".join(
    f'[[stages]]\nname = "{name}"\nstep = "{step}"\nconfig = "tiny"\n\n'
    for name, step in (("prep", "data_prep/rl_prep"), ("sft", "sft/megatron_bridge"))
)
CHECKS: dict[str, list[Check]] = {
    "docs/cli.md": [config("rl/nemo_rl/rlvr"), config("rl/nemo_rl/rlvr", "defaults: [tiny]\n")],
    "docs/data.md": [blend],
    "docs/environments.md": [reward, agents],
    "docs/executors.md": [profiles, config("rl/nemo_rl/rlvr", "defaults: [rlvr1]\n")],
    "docs/howto/gpus.md": [profiles],
    "docs/howto/own_reward.md": [reward],
    "docs/howto/reward_pitfalls.md": [pitfalls],
    "docs/licences.md": [front_matter],
    "docs/models.md": [config("sft/megatron_bridge")],
    "docs/pipelines.md": [pipeline("", "tiny"), pipeline(PIPELINE + STAGES), pipeline(PIPELINE)],
    "docs/serving.md": [config("rl/nemo_rl/rlvr", "defaults: [tiny]\n"), judge],
    "docs/testing.md": [conformance],
    "docs/tutorial.md": [reward],
}
ELSEWHERE = {
    "README.md": ("tests/api/test_docs.py", {"python"}),
    "docs/python.md": ("tests/api/test_docs.py", {"python"}),
    "docs/pages.md": ("tests/docs/test_pages.py", {"toml"}),
    "docs/howto/own_environment.md": ("tests/docs/test_packages.py", {"python", "toml"}),
    "docs/howto/own_executor.md": ("tests/docs/test_packages.py", {"python"}),
    "docs/howto/own_type.md": ("tests/docs/test_packages.py", {"python", "toml"}),
}
"""Pages whose blocks of some languages are all run by another test."""


def shown(page: str) -> list[tuple[str, str]]:
    """Language and body of each fenced block that is no shell's and no program's output."""
    found = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    return [(language, body) for _, language, body in found if language not in ("", "sh", "bash")]


def test_every_block_of_every_page_has_a_check() -> None:
    for page in (each.relative_to(ROOT).as_posix() for each in PAGES):
        if page in ELSEWHERE:
            test, languages = ELSEWHERE[page]
            assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"
            assert {language for language, _ in shown(page)} == languages, page
        else:
            checks = len(CHECKS.get(page, []))
            assert checks == len(shown(page)), f"{page} shows {len(shown(page))} blocks, and CHECKS has {checks}"


@pytest.mark.parametrize(("page", "number"), [(page, number) for page in CHECKS for number in range(len(CHECKS[page]))])
def test_a_block_does_what_its_page_says(page: str, number: int, cli: Cli) -> None:  # noqa: F811
    CHECKS[page][number](shown(page)[number][1], cli)
