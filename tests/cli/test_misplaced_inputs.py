"""Inputs typed as overrides: `--input policy=model prompts=rows.jsonl`."""

from __future__ import annotations

import shlex

import pytest

from nemotron_steps import plan
from nemotron_steps.errors import StepsError
from tests.cli.conftest import Cli
from tests.hints.pasting import hints_in

OPD = "plan rl/nemo_rl/opd -c tiny"
LIST = "plan toy/make toy/train"


@pytest.mark.parametrize(
    ("typed", "mended"),
    [
        (f"{OPD} teachers.a=model", f"{OPD} --input teachers.a=model"),
        (f"{OPD} --input teachers.a=x teachers.b=y", f"{OPD} --input teachers.a=x --input teachers.b=y"),
        (f"{OPD} +teachers.a=model", f"{OPD} --input teachers.a=model"),
        ("plan toy/train \"rows='a b'\"", "plan toy/train --input 'rows=a b'"),
        (f"{LIST} rows=x", f"{LIST} --input toy/train.rows=x"),
        (f"{LIST} toy/train.rows=x", f"{LIST} --input toy/train.rows=x"),
        ("plan toy/train toy/make rows=x", "plan toy/train toy/make --input toy/train.rows=x"),
        ("plan toy/train --over steps=1,2 rows=x", "plan toy/train --over steps=1,2 --input train.rows=x"),
    ],
)
def test_the_command_is_offered_with_its_inputs(cli: Cli, typed: str, mended: str) -> None:
    result = cli(*shlex.split(typed))
    assert "is an input of" in result.err and "nothing feeds 'rows'" not in result.err
    assert hints_in(result)[0] in mended
    assert "is an input of" not in cli(*shlex.split(mended)).err


def test_a_port_that_takes_many_needs_a_name(cli: Cli) -> None:
    assert hints_in(cli(*OPD.split(), "teachers=model")) == ["--input teachers.NAME=model"]


def test_a_key_of_the_config_is_none(cli: Cli) -> None:
    result = cli(*OPD.split(), "policy.max_total_sequence_length=word", "grpo.prompts=3")
    assert "is an input" not in result.err and "unknown key 'grpo.prompts'" in result.err


def test_the_python_api_says_the_same(cli: Cli) -> None:
    with pytest.raises(StepsError, match="'prompts' is an input of rl/nemo_rl/rlvr") as caught:
        plan("rl/nemo_rl/rlvr", config="tiny", overrides={"prompts": "rows.jsonl"})
    assert "hint: --input prompts=rows.jsonl" in str(caught.value)
