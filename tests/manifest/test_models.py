"""What a step's manifest means: its ports under a config, and what contradicts itself."""

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.manifest.loader import parse_step, read_toml
from nemotron_steps.manifest.models import StepManifest

STEP = """[step]
id = "x/y"
[[consumes]]
type = "a"
bind = "a.path"
unless = { "judge.backend" = "http", "judge.off" = "yes" }
[[consumes]]
type = "b"
many = true
bind = "b"
[[consumes]]
type = "c"
bind = { "c.train" = "train.jsonl" }
[[produces]]
type = "model"
becomes = { "lora.on" = "adapter", "small" = "tiny" }
"""


def parsed(tmp_path: Path, text: str, **options: Any) -> StepManifest:
    (tmp_path / "step.toml").write_text(text)
    step, problems = parse_step(read_toml(tmp_path / "step.toml"), **options)
    assert step is not None, problems
    return step


def mistake(tmp_path: Path, text: str) -> str:
    (tmp_path / "step.toml").write_text(text)
    step, problems = parse_step(read_toml(tmp_path / "step.toml"))
    assert step is None
    return "; ".join(f"{str(p.where).rpartition(':')[2]} {p.what}" for p in problems)


@pytest.mark.parametrize(
    ("config", "idle"),
    [
        ({"judge.backend": "embedded"}, False),
        ({"judge.backend": "http"}, True),
        ({"judge.off": "yes"}, True),
    ],
)
def test_an_input_is_idle_under_any_of_the_values_that_say_so(
    config: dict[str, Any], idle: bool, tmp_path: Path
) -> None:
    step = parsed(tmp_path, STEP)
    assert step.inputs["a"].idle(config) == idle and not step.inputs["b"].idle(config)
    assert list(step.under(config).inputs) == (["b", "c"] if idle else ["a", "b", "c"])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "model"),
        ({"lora.on": False, "small": True}, "tiny"),
        ({"lora.on": True, "small": True}, "adapter"),
    ],
)
def test_an_output_is_of_another_type_where_a_key_is_true(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    step = parsed(tmp_path, STEP)
    assert step.under(config).outputs["model"].type == kind
    assert step.outputs["model"].type == "model"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[produces]]\ntype = "t"\n[[produces]]\nname = "t"\ntype = "u"\n', "3 produces: two entries are named 't'"),
        ('[[parameters]]\nname = "a.b c"\n', "is not a dotted config key"),
        ('[[consumes]]\ntype = "t"\nmany = true\n', "many = true needs one config key"),
        ('[[produces]]\ntype = "t"\ninherits = "t"\n', "inherits names no input port 't'"),
        ('[[consumes]]\ntype = "t"\n[[constraints]]\nsame = ["t.a", "u.a"]\n', "'u.a' is not PORT.ATTRIBUTE"),
        ('[[errors]]\nname = "e"\nrecovery = "r"\nmatch = ["fine", "("]\n', "match '(' is not a regular expression"),
        ('[[errors]]\nname = "e"\nrecovery = "r"\noverride = ["a=1", "no value"]\n', "override 'no value' cannot"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, said: str, tmp_path: Path) -> None:
    assert said in mistake(tmp_path, f'[step]\nid = "x"\n{text}')
