"""Model, tokenizer, template and prompts are looked at together when a training is planned, in real small folders."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps import GRPO
from nemotron_steps.errors import PlanError
from tests.api.conftest import ROWS, TINY

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
SYSTEM = [
    {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["prompt"]}]} for row in ROWS
]
LONGER = {**TINY, "policy": {**TINY["policy"], "max_total_sequence_length": 512}}


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return edit


def template(text: str | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        if text is not None:
            (folder / "chat_template.jinja").write_text(text)

    return edit


def score(completions, **columns):
    return [0.0] * len(completions)


def problems(folder: Path, rows: Any, settings: dict[str, Any]) -> list[Any]:
    try:
        GRPO(folder, rows, score, config="cpu", **settings).plan()
    except PlanError as error:
        return list(error.problems)
    return []


@pytest.fixture
def folder(model: Path, workplace: Path) -> Path:
    shutil.copytree(model, workplace / "own-model")
    (workplace / "own-model/generation_config.json").unlink()  # it names an end, too
    return workplace / "own-model"


@pytest.mark.parametrize(
    ("spoil", "rows", "settings", "told", "hint"),
    [
        (None, ROWS, LONGER, "positions", "policy.max_total_sequence_length=256"),
        (edited("config.json", vocab_size=200), ROWS, TINY, "the model has no embedding", "--input policy=PATH"),
        (template(None), ROWS, TINY, "has no chat template", "own-model/chat_template.jinja"),
        (template(NO_SYSTEM), SYSTEM, TINY, "has system messages", "one that writes system"),
        (edited("tokenizer_config.json", eos_token=...), ROWS, TINY, "no token that ends an answer", "eos_token"),
    ],
)
def test_what_does_not_fit_is_one_problem_with_a_hint(
    folder: Path, spoil: Callable[[Path], None] | None, rows: Any, settings: Any, told: str, hint: str
) -> None:
    if spoil is not None:
        assert problems(folder, rows, settings) == []
        spoil(folder)
    (problem,) = problems(folder, rows, settings)
    assert told in problem.what
    assert any(hint in each for each in problem.hints)


def test_the_command_for_an_end_token_mends_it(folder: Path) -> None:
    edited("tokenizer_config.json", eos_token=...)(folder)
    (problem,) = problems(folder, ROWS, TINY)
    command = shlex.split(problem.hints[0], comments=True)
    words = [sys.executable if word == "python" else str(folder) if word == "MODEL" else word for word in command]
    subprocess.run([word.replace("<|im_end|>", "</s>") for word in words], check=True, timeout=60)
    assert problems(folder, ROWS, TINY) == []
