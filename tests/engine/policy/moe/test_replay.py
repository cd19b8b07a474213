"""Experts that the generator chose, replayed by the policy."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import EngineError
from tests.conditioning import Conditioned
from tests.engine.policy.batches import policy_config, rl_loss
from tests.engine.policy.routes import chosen_by, some_routes
from tests.models.checkpoints import write_checkpoint
from tests.models.hybrid_twins import write_hybrid

BALANCED = {"moe_router_bias_update_rate": 1e-3, "optimizer": {"lr": 1e-3}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    write_checkpoint("qwen3_moe", root / "qwen3_moe", initializer_range=0.1)
    write_hybrid("latent", root / "latent", initializer_range=0.1)
    return root


def policy_of(folder, **changes):
    return MegatronPolicy(policy_config(**{"megatron_cfg": BALANCED, **changes}), folder, rl_loss(), reference=True)


def other_choices(policy):
    """Move the biases, which choose and never weigh: now it is a generator that chooses other experts."""
    generator = torch.Generator().manual_seed(5)
    for router in policy.model.routers():
        router.expert_bias.data += 0.3 * torch.randn(router.expert_bias.shape, generator=generator)
    return policy


def gradients(policy):
    return torch.cat([buffer.grads.float().flatten() for buffer in policy.buffers])


@pytest.mark.parametrize("model", ["qwen3_moe", "latent"])
@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 64}},
        {"train_micro_batch_size": 2, "megatron_cfg": {**BALANCED, "activation_checkpointing": True}},
    ],
    ids=["whole", "packed", "checkpointed"],
)
def test_replay_makes_the_policy_the_model_that_was_sampled_from(cut, model, folders, batch):
    def sampled_from(folder, batch):
        policy = other_choices(policy_of(folder))
        found = {"logprobs": policy.logprobs(batch), "loss": policy.train_step(batch)["loss"]}
        return found | {"gradients": gradients(policy)}

    expected, policy = Conditioned(sampled_from, folders / model, batch), policy_of(folders / model, **cut)
    before = policy.logprobs(batch)
    # That much is between them without replay.
    assert float((before - expected.value["logprobs"]).abs().max()) > 0.05
    routed = replace(batch, routed_experts=chosen_by(other_choices(policy_of(folders / model)), batch))
    found = {"logprobs": policy.logprobs(routed)}
    assert torch.equal(policy.reference_logprobs(routed), policy.reference_logprobs(batch))
    metrics = policy.train_step(routed)
    assert metrics["router_replay_share"] == 1 and 0.05 < metrics["router_replay_mismatch"] < 1
    expected.check(found | {"loss": metrics["loss"], "gradients": gradients(policy)})


def test_where_no_choice_is_known_routers_choose_themselves(folders, batch):
    policy = policy_of(folders / "latent")
    nothing = torch.full((*batch.input_ids.shape, 2, 2), -1, dtype=torch.int16)
    assert torch.equal(policy.logprobs(replace(batch, routed_experts=nothing)), policy.logprobs(batch))
    metrics = policy.train_step(replace(batch, routed_experts=nothing))
    assert metrics["router_replay_share"] == 0 and "router_replay_mismatch" not in metrics


def test_shares_do_not_depend_on_the_cut_into_micro_batches(folders, batch):
    def trained(changes, folder, batch):
        return policy_of(folder, **changes).train_step(batch)

    routed = replace(batch, routed_experts=some_routes(batch, 2, 2, 8))
    whole = Conditioned(partial(trained, {}), folders / "latent", routed)
    assert 0.7 < whole.value["router_replay_share"] < 0.9
    whole.check(trained({"train_micro_batch_size": 1}, folders / "latent", routed))


def test_a_policy_that_cannot_replay_refuses_to(folders, batch):
    config = policy_config(dtensor_cfg={"enabled": True})
    policy = DTensorPolicy(config, folders / "latent", rl_loss())
    with pytest.raises(EngineError, match="replay"):
        policy.logprobs(replace(batch, routed_experts=some_routes(batch, 2, 2, 8)))
