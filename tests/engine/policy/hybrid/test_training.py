"""What training a hybrid must not depend on, what it must keep, and what generators get of it."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import GenerationRequest, SamplingParams, TrainBatch
from nemotron_steps.engine.weight_sync.transfer import WeightPlan
from nemotron_steps.models.huggingface import load_hf_weights, save_hf_checkpoint
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.conditioning import assert_conditioned
from tests.config.layout.memory.peak import Peak
from tests.engine.generation.embedded.test_generator import drain, prompt_of, run
from tests.engine.policy.batches import SMOOTH, grouped_batch, hf_token_logprobs, policy_config, rl_loss
from tests.models.hybrid_twins import write_hybrid

EXACT = ("A_log", "mixer.D", "dt_bias", "e_score_correction_bias")
BALANCED = {"moe_router_bias_update_rate": 1e-3, "optimizer": {**SMOOTH, "lr": 1e-3}}


def policy_of(folder, **changes):
    return MegatronPolicy(policy_config(**changes), folder, rl_loss())


@pytest.mark.parametrize(
    "change",
    [
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 5},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}},
        {"make_sequence_length_divisible_by": 96},
        {"train_micro_batch_size": 5, "megatron_cfg": {**BALANCED, "activation_checkpointing": True}},
    ],
    ids=str,
)
def test_gradients_and_biases_do_not_depend_on_how_the_batch_is_cut(change, hybrid_folders):
    def trained(changes, folder, *batches):
        policy = policy_of(folder, **{"megatron_cfg": BALANCED, **changes})
        metrics = [policy.train_step(batch) for batch in batches]
        return {"metrics": metrics, "biases": [router.expert_bias.clone() for router in policy.model.routers()]}

    given = hybrid_folders("latent"), grouped_batch(0), grouped_batch(1)
    assert_conditioned(trained(change, *given), partial(trained, {}), *given)


@pytest.mark.parametrize("frozen", [False, True])
def test_in_bfloat16_what_must_be_exact_is_float32_and_trained(frozen, hybrid_folders, batch, tmp_path):
    """The recurrence's parameters, the router's bias and a frozen router, in memory, exports and checkpoints."""
    changes = {"precision": "bfloat16", "megatron_cfg": {**BALANCED, "freeze_moe_router": frozen}}
    policy = policy_of(hybrid_folders("latent"), **changes)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    exact = {name for name in before if name.endswith(EXACT) or (frozen and name.endswith("gate.weight"))}
    assert {name for name, tensor in before.items() if tensor.dtype is torch.float32} == exact
    stored = load_hf_weights(hybrid_folders("latent"))
    assert all(torch.equal(before[name], stored[name]) for name in exact)

    policy.train_step(batch)
    after = {name: tensor.clone() for name, tensor in policy.weights()}
    still = {name for name in after if torch.equal(after[name], before[name])}
    assert not any(name.endswith(EXACT) for name in still)
    assert {name for name in still if name.endswith("gate.weight")} == {n for n in exact if n.endswith("gate.weight")}

    policy.save_checkpoint(str(tmp_path / "step"))
    resumed = policy_of(hybrid_folders("latent"), **changes)
    resumed.load_checkpoint(str(tmp_path / "step"))
    assert all(torch.equal(after[name], tensor) for name, tensor in resumed.weights())
    assert resumed.train_step(grouped_batch(1)) == policy.train_step(grouped_batch(1))

    policy.save_model(tmp_path / "model")
    convert_megatron_to_hf(tmp_path / "model", tmp_path / "hf")
    exported, live = load_hf_weights(tmp_path / "hf"), dict(policy.weights())
    assert all(
        exported[name].dtype is tensor.dtype and torch.equal(exported[name], tensor) for name, tensor in live.items()
    )


def test_a_narrow_optimizer_keeps_what_is_float32_as_it_keeps_the_rest(hybrid_folders, batch, tmp_path):
    """Remainders in place of master weights, for the bfloat16 parameters alone; a resumed run goes on like it."""
    narrow = {"lr": 1e-3, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    changes = {"precision": "bfloat16", "megatron_cfg": {"optimizer": {**narrow, "use_distributed_optimizer": True}}}
    policy = policy_of(hybrid_folders("latent"), **changes)
    assert {buffer.values.dtype for buffer in policy.buffers} == {torch.float32, torch.bfloat16}
    policy.train_step(batch)
    policy.save_checkpoint(str(tmp_path / "step"))
    resumed = policy_of(hybrid_folders("latent"), **changes)
    resumed.load_checkpoint(str(tmp_path / "step"))
    assert resumed.train_step(grouped_batch(1)) == policy.train_step(grouped_batch(1))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), resumed.weights(), strict=True))


def test_the_published_balancing_rate_trains_the_models_own_bias(hybrid_folders, batch):
    name = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    start = load_hf_weights(hybrid_folders("latent"))[name]
    config = policy_config(megatron_cfg={**BALANCED, "freeze_moe_router": True})
    policy = MegatronPolicy(config, hybrid_folders("latent"), rl_loss(), reference=True)
    reference = policy.reference_logprobs(batch)
    for _ in range(3):
        policy.train_step(batch)
    moved = (dict(policy.weights())[name] - start) / 1e-3
    assert torch.allclose(moved, moved.round(), atol=1e-2) and 1 <= float(moved.abs().max()) <= 3.01
    assert torch.equal(policy.reference_logprobs(batch), reference)  # with the biases that it started with
    untouched = policy_of(hybrid_folders("latent"))  # rate 0: the bias is there, and stays
    untouched.train_step(batch)
    assert torch.equal(dict(untouched.weights())[name], start)


def test_multi_token_prediction_survives_training_bit_for_bit(hybrid_folders, batch, tmp_path):
    stored = load_hf_weights(hybrid_folders("mtp"))
    mtp = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    assert mtp
    policy = policy_of(hybrid_folders("mtp"), precision="bfloat16")
    policy.train_step(batch)
    assert not any(name.startswith("mtp.") for name, _ in policy.weights())  # no generator loads them
    policy.save_hf(tmp_path / "hf")
    policy.save_model(tmp_path / "model")
    convert_megatron_to_hf(tmp_path / "model", tmp_path / "converted")
    policy.save_checkpoint(str(tmp_path / "step"))
    convert_megatron_to_hf(tmp_path / "step", tmp_path / "of the step")
    for folder in ("hf", "converted", "of the step"):
        found = load_hf_weights(tmp_path / folder)
        assert set(found) == set(stored)
        assert all(found[name].dtype is mtp[name].dtype and torch.equal(found[name], mtp[name]) for name in mtp), folder
    again = MegatronPolicy(policy_config(precision="bfloat16"), tmp_path / "model", rl_loss())
    assert torch.equal(again.logprobs(batch), policy.logprobs(batch))


def test_what_is_float32_in_every_precision_is_so_in_a_bfloat16_forward_pass(batch, tmp_path):
    """The rest of a layer is bfloat16 in it."""
    write_hybrid("latent", tmp_path / "hub", initializer_range=0.1)
    config = policy_config(dtensor_cfg={"enabled": True}, precision="bfloat16")
    policy = DTensorPolicy(config, tmp_path / "hub", rl_loss())
    seen: dict[str, set[torch.dtype]] = {}

    def note(module, *_):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            seen.setdefault(name, set()).add(tensor.dtype)

    for layer in policy.model.layers():
        layer.mixer.register_forward_pre_hook(note)
    policy.logprobs(batch)
    exact = {name for name, dtypes in seen.items() if dtypes == {torch.float32}}
    assert exact == {"A_log", "D", "dt_bias", "gate.e_score_correction_bias"}
    assert all(seen[name] == {torch.bfloat16} for name in set(seen) - exact)


def sent(weights):
    """Weights after a transfer: written into the buckets of a plan and read out of them, each in its own type."""
    plan = WeightPlan.of(weights())
    coming = weights()
    for bucket in plan.buckets:
        buffer = torch.zeros(bucket.bytes, dtype=torch.uint8)
        plan.fill(bucket, buffer, coming)
        yield from bucket.views(buffer)


def token_mult_prob_error(policy, generator, seed):
    """Mean of exp |logprob of the policy − logprob it was sampled with| over sampled tokens."""
    prompts = {f"p{number}": prompt_of(seed + number, 5 + 9 * number) for number in range(3)}
    requests = [GenerationRequest(name, ids, SamplingParams(12, seed=seed), 3) for name, ids in prompts.items()]
    rollouts = [(list(prompts[name]), done) for (name, _), done in run(generator, *requests).items()]
    ids, mask, sampled = (torch.zeros(len(rollouts), 40, dtype=dtype) for dtype in (torch.int64, *[torch.float32] * 2))
    lengths = []
    for row, (prompt, done) in enumerate(rollouts):
        end = len(prompt) + len(done.token_ids)
        ids[row, :end] = torch.tensor([*prompt, *done.token_ids])
        mask[row, len(prompt) : end] = 1
        sampled[row, len(prompt) : end] = torch.tensor(done.logprobs)
        lengths.append(end)
    batch = TrainBatch(ids, torch.tensor(lengths), mask, torch.ones(len(rollouts)), sampled, mask)
    return float((policy.logprobs(batch) - sampled).abs().exp()[mask > 0].mean())


@pytest.mark.parametrize(("name", "precision", "most"), [("latent", "float32", 1.0001), ("dense", "bfloat16", 1.05)])
def test_logprobs_agree_after_1_5_and_20_updates(name, precision, most, hybrid_folders):
    """With biases that move at the published rate."""
    config = policy_config(
        precision=precision, megatron_cfg={"moe_router_bias_update_rate": 1e-3, "optimizer": {"lr": 1e-3}}
    )
    policy = MegatronPolicy(config, hybrid_folders(name), rl_loss())
    dtype = getattr(torch, precision)
    generator = EmbeddedGenerator(
        policy.architecture, policy.weights(), max_sequences=9, max_total_length=64, eos_token_ids=[], dtype=dtype
    )
    for step in range(1, 21):
        before = token_mult_prob_error(policy, generator, step) if step == 20 else None
        policy.train_step(grouped_batch(step % 3))
        if step in (1, 5, 20):
            if before is not None:  # weights of 15 updates ago are told from new ones
                assert before > most
            generator.update_weights(sent(policy.weights), step)
            assert token_mult_prob_error(policy, generator, step) < most


TOKENS, CHUNK = 65_536, 1024
VOCABULARIES = (150, 650)
SMALL = {"hidden_size": 16, "mamba_num_heads": 2, "n_groups": 1, "ssm_state_size": 8, "intermediate_size": 16}


def long_row():
    ids = torch.randint(3, 150, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    mask, ones = torch.ones(1, TOKENS), torch.ones(1)
    return TrainBatch(ids, torch.tensor([TOKENS]), mask, ones, torch.zeros_like(mask), mask)


def test_no_memory_grows_with_vocabulary_times_length(tmp_path):
    """Attention apart, whose time would grow with the square of the length."""
    most = {}
    for vocabulary in VOCABULARIES:
        write_hybrid("dense", tmp_path / str(vocabulary), pattern="M-", vocab_size=vocabulary, chunk_size=128, **SMALL)
        config = policy_config(megatron_cfg={"activation_checkpointing": True}, logprob_chunk_size=CHUNK)
        policy = MegatronPolicy(config, tmp_path / str(vocabulary), NegativeLogLikelihood())
        for work in (policy.logprobs, policy.train_step):
            with Peak() as peak:
                work(long_row())
            most[work.__name__, vocabulary] = peak.most
    more = 4 * (VOCABULARIES[1] - VOCABULARIES[0])
    for work in ("logprobs", "train_step"):
        grown = most[work, VOCABULARIES[1]] - most[work, VOCABULARIES[0]]
        assert grown < 4 * CHUNK * more < TOKENS * more / 10  # some copies of the logits of a chunk


def test_time_steps_below_the_published_least_one_are_those_of_decoding(tmp_path, batch):
    """Weights are drawn for steps of 0.001 and more, and trained ones go below. transformers then bounds them, but not
    where it decodes; policy and generators never do."""
    write_hybrid("dense", tmp_path, initializer_range=0.1, time_step_min=0.001)
    weights = load_hf_weights(tmp_path)
    for name, tensor in weights.items():
        if name.endswith("dt_bias"):
            tensor.fill_(-9.0)  # 1.2e-4 after softplus
        elif name.endswith("in_proj.weight"):
            tensor.mul_(3)
    save_hf_checkpoint(tmp_path / "trained", weights.items(), tmp_path)
    policy = MegatronPolicy(policy_config(), tmp_path / "trained", rl_loss())
    found = policy.logprobs(batch)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32).eval()
    with torch.no_grad():
        bounded = hf_token_logprobs(model, batch)
        for layer in model.model.layers:
            if hasattr(layer.mixer, "time_step_limit"):
                assert layer.mixer.time_step_limit == (0.001, float("inf"))
                layer.mixer.time_step_limit = (0.0, float("inf"))
        torch.testing.assert_close(found, hf_token_logprobs(model, batch), atol=1e-5, rtol=0)
    assert float((found - bounded).abs().max()) > 1e-4
    generator = EmbeddedGenerator(
        policy.architecture, policy.weights(), max_sequences=4, max_total_length=64, eos_token_ids=[]
    )
    generator.submit(GenerationRequest("r", list(range(5, 25)), SamplingParams(20, seed=0), 1))
    completion = drain(generator)["r", 0]
    ids = torch.tensor([[*range(5, 25), *completion.token_ids]])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0, 19:-1], -1)
    sampled = expected.gather(1, ids[0, 20:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), sampled, atol=1e-5, rtol=0)
