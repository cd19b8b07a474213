"""Tensors of every Hugging Face folder that a step reads, looked at before the first step of a run."""

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import ArtifactError, UnsupportedError
from nemotron_steps.errors.plugins import load_object
from tests.models.checkpoints import write_checkpoint

MANIFESTS = Path(__file__).parents[2] / "manifests"
NORM = "model.norm.weight"
JUDGE = "genrm_model"
Given = Callable[[str], dict[str, Any]]


def of_model(folder: str) -> dict[str, Any]:
    return {"model": folder}


def of_policy(folder: str) -> dict[str, Any]:
    policy = {"checkpoint": folder, "max_total_sequence_length": 64, "dtensor_cfg": {"enabled": True}}
    return {"policy": policy}


def of_judge(folder: str, role: str = JUDGE, **settings: Any) -> dict[str, Any]:
    vllm_model = {"model": folder, "max_total_sequence_length": 64, **settings}
    return {"env": {"nemo_gym": {role: {"responses_api_models": {"vllm_model": vllm_model}}}}}


READERS: dict[tuple[str, str], Given] = {
    ("convert/merge_adapter", "base"): lambda folder: {"base": folder},
    ("data_prep/difficulty", "model"): of_model,
    ("eval/model_eval", "model"): of_model,
    ("eval/stages", "models"): lambda folder: {"models": {"one": folder}},
    ("rl/nemo_rl/rlhf", "reward_model"): of_judge,
    ("rl/nemo_rl/rlvr", "reward_model"): of_judge,
    ("sft/automodel", "model"): of_policy,
}
"""(step, port) → a config that has the folder, as the port's binding puts it there."""


def preflight(step: str, given: dict[str, Any]) -> Callable[[dict[str, Artifact | None]], None]:
    """The preflight of a step with a config, as a function of its inputs."""
    table = tomllib.loads((MANIFESTS / f"{step}.toml").read_text())["step"]
    look, config = load_object(table["preflight"]), load_object(table["config_schema"]).model_validate(given)
    later = dict.fromkeys(("prompts", "teachers.one")) if step.startswith("rl/") else {}
    return lambda inputs: look(config, {**later, **inputs})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "whole"
    write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture
def hub(whole: Path, tmp_path: Path) -> Path:
    """A folder that is whole so far."""
    return Path(shutil.copytree(whole, tmp_path / "hub"))


def change(hub: Path, **tensors: torch.Tensor | None) -> None:
    weights: dict[str, Any] = {**load_file(hub / "model.safetensors"), **tensors}
    save_file({name: each for name, each in weights.items() if each is not None}, hub / "model.safetensors")


def refusal(look: Callable[[dict[str, Artifact | None]], None], **inputs: Artifact | None) -> Any:
    with pytest.raises((ArtifactError, UnsupportedError)) as caught:
        look(inputs)
    return caught.value


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({NORM: None}, f"lacks the tensor {NORM}"),
        ({NORM: torch.zeros(3)}, f"the tensor {NORM} has another shape"),
        ({NORM: torch.zeros(2, dtype=torch.float8_e4m3fn)}, f"the tensor {NORM} is f8_e4m3"),
    ],
)
def test_a_tensor_that_is_not_the_models_is_named_with_its_folder(
    tensors: dict[str, torch.Tensor | None], told: str, hub: Path
) -> None:
    change(hub, **tensors)
    error = refusal(preflight("eval/model_eval", of_model(str(hub))))
    assert told in f"{error.what} {error.found}" and error.where == str(hub)
    assert str(hub) in error.hints[0] and error.hints[0].startswith("hf download MODEL")


@pytest.mark.parametrize(("step", "port"), [each for each in READERS if each[0] != "eval/stages"])
def test_what_an_earlier_step_will_make_is_not_looked_at(step: str, port: str, hub: Path) -> None:
    change(hub, **{NORM: None})
    preflight(step, READERS[step, port](str(hub)))({port: None})


@pytest.mark.parametrize("config", [
    {"model_type": "gpt2"},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": None},
    {"quantization_config": {"quant_method": "fp8"}},
])  # fmt: skip
def test_what_only_a_library_knows_is_left_to_it(config: dict[str, Any], hub: Path) -> None:
    change(hub, **{NORM: None})
    changed = {**json.loads((hub / "config.json").read_text()), **config}
    (hub / "config.json").write_text(json.dumps(changed))
    preflight("rl/nemo_rl/rlvr", of_judge(str(hub), backend="vllm"))({})
    preflight("convert/merge_adapter", {"base": str(hub)})({})
    assert isinstance(refusal(preflight("rl/nemo_rl/rlvr", of_judge(str(hub)))), UnsupportedError)
    if config == {"model_type": "gpt2"}:
        preflight("sft/automodel", of_policy(str(hub)))({})
