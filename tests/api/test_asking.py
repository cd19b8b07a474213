"""Python values as overrides: what Hydra reads back is what was given."""

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemotron_steps.api.planned import override_texts, reference, request_for
from nemotron_steps.api.result import Result
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import RequestError
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


@pytest.mark.parametrize(
    ("outputs", "taken"),
    [
        ({"model": "checkpoint_hf", "teacher": "checkpoint_hf"}, "x/model:v1"),
        ({"checkpoint_hf": "reward_model_hf", "rows": "training_jsonl"}, "x/checkpoint_hf:v1"),
        ({"adapter": "adapter"}, "x/adapter:v1"),
        ({"model": "of_no_pack"}, "x/model:v1"),
        ({"a": "adapter", "b": "checkpoint_hf", "rows": "training_jsonl"}, "several models (found done: a, b)"),
        ({"rows": "training_jsonl"}, "no model (found done: rows)"),
    ],
)
def test_a_run_as_an_input_is_the_model_that_it_made_whatever_the_port(
    outputs: dict[str, str], taken: str, tmp_path: Path
) -> None:
    made = {port: Artifact(kind, "d", Path("x"), name=f"x/{port}", version=1) for port, kind in outputs.items()}
    result = type("Made", (Result,), {"status": "done", "outputs": made})(ArtifactStore(tmp_path), "r")
    if taken.startswith("x/"):
        assert reference(result) == taken
    else:
        with pytest.raises(RequestError) as refused:
            reference(result)
        assert f"{refused.value.what} (found {refused.value.found})".endswith(taken)


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
