"""The dtensor policy gives what the megatron policy gives."""

from functools import partial

import pytest
import torch

from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ConfigError, UnsupportedError
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.conditioning import assert_conditioned
from tests.engine.policy.batches import SMOOTH, hf_token_logprobs, policy_config, rl_loss
from tests.models.checkpoints import SIZES, write_checkpoint, write_tokenizer
from tests.models.hybrid_twins import write_hybrid


def fsdp_config(activation_checkpointing=False, **changes):
    return policy_config(dtensor_cfg={"enabled": True, "activation_checkpointing": activation_checkpointing}, **changes)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied", "llama_rope_scaling", "qwen3_moe", "nemotron_h_latent"])
@pytest.mark.parametrize("loss", [{}, {"force_on_policy_ratio": False, "reference_policy_kl_penalty": 0.1}], ids=str)
def test_it_trains_like_megatron(name, loss, tmp_path, batch):
    if name.startswith("nemotron_h_"):
        write_hybrid(name.removeprefix("nemotron_h_"), tmp_path, initializer_range=0.1)
    else:
        write_checkpoint(name, tmp_path, initializer_range=0.1)
    sizes = {"train_micro_batch_size": 4, "logprob_batch_size": 5, "megatron_cfg": {"optimizer": SMOOTH}}

    def policy_of(kind, folder):
        config = fsdp_config(**sizes) if kind is DTensorPolicy else policy_config(**sizes)
        return kind(config, folder, rl_loss(**loss), reference=True)

    def trained(kind, folder, batch):
        policy = policy_of(kind, folder)
        found = {"before": policy.logprobs(batch), "metrics": [policy.train_step(batch) for _ in range(2)]}
        assert torch.equal(policy.reference_logprobs(batch), found["before"])
        return found | {"weights": dict(policy.weights())}

    before = policy_of(MegatronPolicy, tmp_path).logprobs(batch)
    batch.prev_logprobs = before + 0.05 * batch.token_mask
    batch.reference_logprobs = before - 0.1 * batch.token_mask
    assert_conditioned(trained(DTensorPolicy, tmp_path, batch), partial(trained, MegatronPolicy), tmp_path, batch)


def test_its_models_open_in_the_other_policy(qwen3_folder, tmp_path, batch):
    policy = DTensorPolicy(fsdp_config(), qwen3_folder, rl_loss())
    policy.train_step(batch)
    expected = policy.logprobs(batch)
    policy.save_model(tmp_path / "megatron")
    policy.save_hf(tmp_path / "hf")
    for folder in ("megatron", "hf"):
        for kind in (MegatronPolicy, DTensorPolicy):
            config = policy_config() if kind is MegatronPolicy else fsdp_config()
            found = kind(config, tmp_path / folder, rl_loss()).logprobs(batch)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_activation_checkpointing_changes_nothing(qwen3_folder, batch, plain_step):
    policy = DTensorPolicy(fsdp_config(activation_checkpointing=True), qwen3_folder, rl_loss())
    plain_step["metrics"].check(policy.train_step(batch))


def test_padding_to_a_multiple_changes_nothing(qwen3_folder, batch, plain_step):
    padded = DTensorPolicy(fsdp_config(make_sequence_length_divisible_by=64), qwen3_folder, rl_loss())
    widths = []
    padded.model.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    plain_step.check({"logprobs": padded.logprobs(batch), "metrics": padded.train_step(batch)})
    assert widths and all(width % 64 == 0 for width in widths) and batch.input_ids.shape[1] % 64


def test_a_micro_batch_that_only_keeps_ranks_in_step_counts_nothing(qwen3_folder, batch, plain_step, monkeypatch):
    plain, in_step = (DTensorPolicy(fsdp_config(), qwen3_folder, rl_loss()) for _ in range(2))
    of_own_rows = DTensorPolicy._micro_batches

    def with_idle(policy, *given, **options):
        yield from of_own_rows(policy, *given, **options)
        if policy is in_step:  # as where another rank has one more
            yield [0, 1], True

    monkeypatch.setattr(DTensorPolicy, "_micro_batches", with_idle)
    torch.testing.assert_close(in_step.logprobs(batch), plain.logprobs(batch), atol=0, rtol=0)
    plain_step["metrics"].check(in_step.train_step(batch))


@pytest.mark.parametrize(
    ("model_type", "changes", "match"),
    [
        ("gpt2", {"summary_first_dropout": 0.0}, "dropout"),  # attn_pdrop, embd_pdrop and resid_pdrop are 0.1
        ("mixtral", {"num_local_experts": 2, "router_jitter_noise": 0.1}, "dropout"),
        ("opt", {"dropout": 0.0, "ffn_dim": 96, "word_embed_proj_dim": 64}, "a decoder with `model.layers`"),
    ],
)
def test_a_model_that_it_cannot_train_is_refused(model_type, changes, match, tmp_path):
    write_family(tmp_path, model_type, **changes)
    with pytest.raises(UnsupportedError, match=match):
        DTensorPolicy(fsdp_config(), tmp_path, rl_loss())


def test_a_layout_that_the_ranks_do_not_fill_is_refused_with_one_that_they_do(qwen3_folder):
    config = policy_config(dtensor_cfg={"enabled": True, "tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match="not a multiple of the tensor-parallel size") as caught:
        DTensorPolicy(config, qwen3_folder, rl_loss())
    assert caught.value.hints == ("policy.dtensor_cfg.tensor_parallel_size=1",)


def write_family(folder, model_type, **changes):
    """A random model of a family that has no Megatron mapping."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SIZES, "bos_token_id": 1, "eos_token_id": 2, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("cohere", {"logit_scale": 0.5}), ("granite", {"logits_scaling": 4.0}), ("gemma3_text", {}), ("olmo2", {})],
)
def test_logprobs_are_those_of_the_model_where_it_scales_its_logits(model_type, changes, tmp_path, batch):
    model = write_family(tmp_path, model_type, **changes)
    policy = DTensorPolicy(fsdp_config(), tmp_path, rl_loss())
    with torch.no_grad():
        torch.testing.assert_close(policy.logprobs(batch), hf_token_logprobs(model, batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("gemma2", {"final_logit_softcapping": 1e4}),
        ("phi", {}),
    ],
    ids=str,
)
def test_a_model_whose_logits_would_be_computed_wrongly_is_refused(model_type, changes, tmp_path):
    write_family(tmp_path, model_type, **changes)
    with pytest.raises(UnsupportedError, match="output layer"):
        DTensorPolicy(fsdp_config(), tmp_path, rl_loss())


def test_a_hybrid_comes_out_whole_in_bfloat16_too(tmp_path):
    """Under the hub's names, with the router's bias and the tensors of multi-token prediction."""
    write_hybrid("mtp", tmp_path / "in")
    policy = DTensorPolicy(fsdp_config(precision="bfloat16"), tmp_path / "in", rl_loss())
    policy.save_hf(tmp_path / "out")
    before, after = load_hf_weights(tmp_path / "in"), load_hf_weights(tmp_path / "out")
    assert set(before) == set(after)
    exact = (".A_log", ".D", ".dt_bias", ".e_score_correction_bias")
    for name, tensor in after.items():
        kept = name.startswith("mtp.") or name.endswith(exact)
        assert torch.equal(tensor, before[name] if kept else before[name].bfloat16()), name
    policy.save_model(tmp_path / "megatron")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = load_hf_weights(tmp_path / "back")
    assert set(back) == set(after) and all(torch.equal(tensor, after[name]) for name, tensor in back.items())
