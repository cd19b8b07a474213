"""Folders of a hybrid that are not what they should be: each is refused by name, with something to paste."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.layout.constraints import model_violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.config.schema.convert import ConvertConfig
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ArtifactError, UnsupportedError
from nemotron_steps.models.megatron_checkpoint import convert_hf_to_megatron, convert_megatron_to_hf
from nemotron_steps.steps.preflight import check_converted as check
from tests.engine.policy.batches import policy_config
from tests.models.hybrid_twins import write_hybrid


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "mtp"
    write_hybrid("mtp", folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "hub")


def config_with(**changes):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return apply


def weights_with(change):
    def apply(folder):
        weights = load_file(folder / "model.safetensors")
        save_file(change(weights), folder / "model.safetensors")

    return apply


def without(prefix):
    return weights_with(lambda weights: {key: value for key, value in weights.items() if not key.startswith(prefix)})


def in_eight_bits(name):
    return weights_with(lambda weights: {**weights, name: weights[name].to(torch.float8_e4m3fn)})


def sharded(folder):
    """Two shards and their index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(sorted(weights))}
    for shard in set(places.values()):
        save_file({name: weights[name] for name in places if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder / "model-00002-of-00002.safetensors"


def cut(keep):
    def apply(folder):
        shard = sharded(folder)
        shard.write_bytes(shard.read_bytes()[:keep])

    return apply


def pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


DOWNLOAD = "hf download MODEL"


MISFITS = [
    (config_with(layers_block_type=["mamba", "moe", "attention", "mlp", "mamba", "mlp"]), "lacks", "download"),
    (config_with(moe_latent_size=16), "experts.0.up_proj.weight has another shape", DOWNLOAD),
    (without("backbone.layers.1.mixer.gate.e_score"), "lacks the tensor backbone.layers.1.mixer.gate", "download"),
    (lambda folder: sharded(folder).unlink(), "model-00002-of-00002.safetensors", DOWNLOAD),
    (cut(50), "model-00002-of-00002.safetensors", DOWNLOAD),
    (pointer, "model.safetensors", "lfs pull"),
]


def preflight(folder):
    check(ConvertConfig(), {"checkpoint_hf": Artifact("checkpoint_hf", "", folder)})


@pytest.mark.parametrize(("spoil", "said", "hint"), MISFITS)
def test_what_does_not_fit_together_is_refused_before_and_in_a_run_with_what_to_do(spoil, said, hint, folder, tmp_path):
    preflight(folder)
    spoil(folder)

    def validated():
        validate("checkpoint_hf", folder)
        convert_hf_to_megatron(folder, tmp_path / "megatron")

    for read in (lambda: preflight(folder), validated, lambda: convert_hf_to_megatron(folder, tmp_path / "megatron")):
        with pytest.raises(ArtifactError) as caught:
            read()
        error = caught.value
        assert said in str(error) and str(folder) in error.where and hint in error.hints[0]


def test_an_eight_bit_tensor_is_refused_by_name(folder, tmp_path):
    in_eight_bits("backbone.layers.4.mixer.in_proj.weight")(folder)
    with pytest.raises(UnsupportedError, match=r"layers\.4\.mixer\.in_proj\.weight is float8_e4m3fn"):
        convert_hf_to_megatron(folder, tmp_path / "megatron")
    with pytest.raises(UnsupportedError, match=r"layers\.4\.mixer\.in_proj\.weight is f8_e4m3"):
        preflight(folder)


def mtp_policy(folder):
    return MegatronPolicy(policy_config(megatron_cfg={"mtp_num_layers": 1}), folder, NegativeLogLikelihood())


@pytest.mark.parametrize("kind", ["checkpoint_hf", "checkpoint_megatron"])
def test_blocks_that_are_claimed_and_not_there_are_refused_when_planned_and_when_loaded(kind, folder, tmp_path):
    """As of a model that transformers has saved, which has no place for them."""
    without("mtp.")(folder)
    if kind == "checkpoint_megatron":
        convert_hf_to_megatron(folder, tmp_path / "megatron")
        convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")  # as it came
        folder = tmp_path / "megatron"
    facts = ModelSpec.from_attributes(validate(kind, folder))
    (violation,) = model_violations(ParallelConfig(mtp_layers=1), facts)
    assert violation.key == "policy.megatron_cfg.mtp_num_layers" and violation.expected == "0"
    with pytest.raises(ArtifactError, match=r"mtp\.layers\.0") as caught:
        mtp_policy(folder)
    assert caught.value.hints[0].startswith("policy.megatron_cfg.mtp_num_layers=0")


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (without("mtp.layers.0.eh_proj"), ArtifactError, "lacks the tensor mtp.layers.0.eh_proj.weight"),
        (in_eight_bits("mtp.layers.0.eh_proj.weight"), UnsupportedError, "mtp.layers.0.eh_proj.weight is float8"),
    ],
)
def test_blocks_that_are_not_as_claimed_are_carried_and_not_trained(spoil, error, said, folder, tmp_path):
    spoil(folder)
    convert_hf_to_megatron(folder, tmp_path / "megatron")
    for start in (folder, tmp_path / "megatron"):
        with pytest.raises(error) as caught:
            mtp_policy(start)
        assert said in str(caught.value)
