"""Python values as overrides: what Hydra reads back is what was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemotron_steps.api.planned import override_texts, request_for
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.session.run_request import RunRequest

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])).filter(lambda t: "${" not in t)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z][a-z_0-9]{0,5}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@example("A¹")
@example("it's \\")
@example(["null", "True", "false", "inf", "NaN"])
@given(VALUES)
def test_hydra_reads_back_what_was_given(value: Any) -> None:
    (text,) = override_texts({"key": [value]})
    parsed = OverridesParser.create().parse_override(text)
    assert parsed.key_or_group == "key" and parsed.value() == [value]


def test_every_argument_has_its_place_in_the_request() -> None:
    model = Artifact("checkpoint_hf", "d", Path("x"), name="sft/model", version=2)
    asked = request_for(
        ["sft", "rl"],
        config=Path("own.yaml"),
        inputs={"policy": model, "prompts": Path("rows.jsonl")},
        overrides=["a=1"],
        profile="big",
        first="sft",
        until="rl",
        over={"rl.inputs.policy": [model, "other"], "seed": (1, 2)},
        ignore_checks="sft",
        grpo={"seed": None},
    )
    assert asked == RunRequest(
        ("sft", "rl"),
        ("a=1", "grpo.seed=null"),
        "own.yaml",
        {"policy": "sft/model:v2", "prompts": "rows.jsonl"},
        "big",
        first="sft",
        until="rl",
        over=("rl.inputs.policy=sft/model:v2,other", "seed=1,2"),
        ignore_checks=("sft",),
    )
    assert request_for("s", over=["seed=1,2", "lr=3,4"], ignore_checks=["a", "b"]) == RunRequest(
        ("s",), over=("seed=1,2", "lr=3,4"), ignore_checks=("a", "b")
    )
