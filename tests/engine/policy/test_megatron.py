"""The megatron policy against transformers, and the invariances training must have."""

import pytest
import torch

from nemotron_steps.engine.losses.loss import count_normalizers
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.token_layout import build_layout
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.conditioning import assert_conditioned
from tests.engine.policy.batches import (
    grouped_batch,
    hf_gradients,
    hf_token_logprobs,
    policy_config,
    policy_gradients,
    rl_loss,
)
from tests.models.checkpoints import SHAPES, hf_model, write_checkpoint
from tests.models.hybrid_twins import TWINS, hybrid_model, write_hybrid


def written(name, folder, **changes):
    """A checkpoint of a tiny model, and the model in transformers."""
    hybrid = name in TWINS
    (write_hybrid if hybrid else write_checkpoint)(name, folder, **changes)
    return (hybrid_model if hybrid else hf_model)(name, **changes)


@pytest.mark.parametrize("name", [*sorted(SHAPES), *sorted(TWINS)])
def test_logprobs_and_gradients_equal_transformers(name, tmp_path, batch):
    model = written(name, tmp_path, **({"initializer_range": 0.1} if name in TWINS else {}))
    logprobs = hf_token_logprobs(model, batch)
    loss, _ = rl_loss()(logprobs, batch, count_normalizers(batch))
    loss.backward()
    theirs = dict(hf_gradients(model))
    figures = {
        "loss": float(loss.detach()),
        "grad_norm": float(torch.stack([g.norm() for g in theirs.values()]).norm()),
    }

    def ours(folder, batch):
        policy = MegatronPolicy(policy_config(max_grad_norm=1e9), folder, rl_loss())
        found = {"logprobs": policy.logprobs(batch)}
        metrics = policy.train_step(batch)
        found |= {"metrics": {metric: metrics[metric] for metric in figures}}
        return found | {"gradients": dict(policy_gradients(policy))}

    found = {"logprobs": logprobs.detach(), "metrics": figures, "gradients": theirs}
    assert_conditioned(found, ours, tmp_path, batch)


@pytest.mark.parametrize("name", [*sorted(SHAPES), *sorted(TWINS)])
def test_logits_equal_transformers_to_1e_5(name, tmp_path):
    model = written(name, tmp_path, initializer_range=0.1 if name in TWINS else 0.05)
    policy = MegatronPolicy(policy_config(), tmp_path, rl_loss())
    ids = torch.randint(3, 200, (1, 120), generator=torch.Generator().manual_seed(0))
    everything = TrainBatch(ids, torch.tensor([120]), torch.ones(1, 120), torch.ones(1), *(torch.zeros(1, 120),) * 2)
    layout = build_layout(everything, [0])
    with torch.no_grad():
        hidden = policy.model.predictors(policy.model(layout), layout.source)
        logits = hidden @ policy.model.output_weight().T
        torch.testing.assert_close(logits, model(ids).logits[0, :-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 5},
        {"logprob_chunk_size": 7},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 96}},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "algorithm": "concatenative"}},
        {"dynamic_batching": {"enabled": True, "train_mb_tokens": 200, "sequence_length_round": 1}},
        {"make_sequence_length_divisible_by": 96},
        {"megatron_cfg": {"activation_checkpointing": True, "optimizer": {"lr": 1e-2}}},
        {"megatron_cfg": {"optimizer": {"lr": 1e-2, "use_distributed_optimizer": True}}},
    ],
    ids=str,
)
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(change, qwen3_folder, batch, plain_step):
    plain_step["metrics"].check(MegatronPolicy(policy_config(**change), qwen3_folder, rl_loss()).train_step(batch))


def test_a_masked_sequence_and_padding_change_nothing(qwen3_folder, batch):
    policy = MegatronPolicy(policy_config(), qwen3_folder, rl_loss())
    before = policy.logprobs(batch)
    garbage = grouped_batch(seed=5).input_ids
    dirty = TrainBatch(**{**vars(batch), "input_ids": batch.input_ids.clone()})
    for row in range(len(batch)):
        dirty.input_ids[row, int(batch.lengths[row]) :] = garbage[row, int(batch.lengths[row]) :]
    assert torch.equal(policy.logprobs(dirty), before)
    assert bool((before[batch.token_mask == 0] == 0).all())


@pytest.mark.parametrize(
    "loss", [{}, {"force_on_policy_ratio": False, "reference_policy_kl_penalty": 0.1}], ids=["no KL", "KL"]
)
def test_rows_without_gradient_are_not_trained_but_measured(loss, qwen3_folder, batch):
    batch.advantages = batch.advantages.clone()
    batch.advantages[3:6] = 0
    batch.advantages[9] = 0
    policy = MegatronPolicy(policy_config(), qwen3_folder, rl_loss(**loss), reference=True)
    batch.prev_logprobs = policy.logprobs(batch) + 0.05 * batch.token_mask
    batch.reference_logprobs = policy.reference_logprobs(batch) - 0.1 * batch.token_mask
    whole = rl_loss(**loss)
    whole.gradient_needs_advantage = False

    def trained(folder, batch):
        return MegatronPolicy(policy_config(), folder, whole).train_step(batch)

    assert_conditioned(policy.train_step(batch), trained, qwen3_folder, batch)


def test_saved_models_load_everywhere(qwen3_folder, tmp_path, batch):
    from transformers import AutoModelForCausalLM

    policy = MegatronPolicy(policy_config(), qwen3_folder, rl_loss())
    policy.train_step(batch)
    expected = policy.logprobs(batch)
    live = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.save_model(tmp_path / "megatron")
    policy.save_hf(tmp_path / "hf")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "converted")
    for folder in ("hf", "converted"):
        stored = load_hf_weights(tmp_path / folder)
        assert set(stored) == set(live) and all(torch.equal(stored[name], live[name]) for name in live)
    reloaded = MegatronPolicy(policy_config(), tmp_path / "megatron", rl_loss())
    assert torch.equal(reloaded.logprobs(batch), expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    torch.testing.assert_close(hf_token_logprobs(model, batch).detach(), expected, atol=2e-5, rtol=0)


def test_a_checkpoint_of_another_shape_is_refused(qwen3_folder, tmp_path):
    write_checkpoint("qwen3", tmp_path / "other", hidden_size=32)
    other = MegatronPolicy(policy_config(), tmp_path / "other", rl_loss())
    other.save_checkpoint(str(tmp_path / "step"))
    policy = MegatronPolicy(policy_config(), qwen3_folder, rl_loss())
    with pytest.raises(ArtifactError):
        policy.load_checkpoint(str(tmp_path / "step"))
    with pytest.raises(ArtifactError, match="training checkpoint"):
        policy.load_checkpoint(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("said", "instead"),
    [('"num_hidden_layers": 3', '"num_hidden_layers": 4'), ('"tie_word_embeddings": true', '"_": 0')],
    ids=["a layer", "an output layer"],
)
def test_a_model_that_lacks_weights_is_refused(said, instead, tmp_path):
    write_checkpoint("qwen3_tied", tmp_path / "tied")
    MegatronPolicy(policy_config(), tmp_path / "tied", rl_loss()).save_model(tmp_path / "model")
    config = tmp_path / "model" / "hf" / "config.json"
    text = config.read_text()
    assert said in text
    config.write_text(text.replace(said, instead))
    with pytest.raises(ArtifactError):
        MegatronPolicy(policy_config(), tmp_path / "model", rl_loss())


def test_weights_are_views_of_the_live_model(qwen3_folder):
    policy = MegatronPolicy(policy_config(), qwen3_folder, rl_loss())
    (buffer,) = policy.buffers
    base = buffer.values.untyped_storage().data_ptr()
    shared = {name for name, tensor in policy.weights() if tensor.untyped_storage().data_ptr() == base}
    copied = {name.rsplit(".", 2)[-2] for name, _ in policy.weights() if name not in shared}
    assert copied <= {"q_proj", "k_proj", "v_proj"}
