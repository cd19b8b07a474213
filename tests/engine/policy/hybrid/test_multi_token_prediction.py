"""Training of multi-token prediction, against transformers' layers put together here as DeepSeek-V3 describes it."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from nemotron_steps.engine.losses.loss import count_normalizers, loss_mask
from nemotron_steps.engine.losses.supervised import DpoLoss, NegativeLogLikelihood
from nemotron_steps.engine.policy.megatron import MegatronPolicy, PredictionLoss
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.conditioning import assert_conditioned
from tests.engine.policy.batches import (
    SMOOTH,
    grouped_batch,
    hf_gradients,
    hf_token_logprobs,
    paired,
    policy_config,
    policy_gradients,
    preference_loss,
    rl_loss,
)
from tests.models.hybrid_twins import hybrid_model, write_hybrid

SCALE = 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Blocks → a checkpoint that has as many."""
    root = tmp_path_factory.mktemp("mtp")
    for blocks in (1, 2):
        write_hybrid("mtp", root / str(blocks), initializer_range=0.1, num_nextn_predict_layers=blocks)
    return {blocks: root / str(blocks) for blocks in (1, 2)}


def policy_of(folder, loss=None, *, lr=1e-2, **megatron):
    megatron = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": SCALE, "optimizer": {"lr": lr}, **megatron}
    return MegatronPolicy(policy_config(max_grad_norm=1e9, megatron_cfg=megatron), folder, loss or rl_loss())


class Reference:
    """A model and its blocks of multi-token prediction, each row by itself and unpadded."""

    def __init__(self, folder, blocks, *, detach):
        self.model = hybrid_model("mtp", initializer_range=0.1, num_nextn_predict_layers=blocks)
        self.detach = detach
        weights = load_hf_weights(folder)
        self.blocks, self.beside = [], {}
        for block in range(blocks):
            layers = hybrid_model("mtp", pattern="*E", initializer_range=0.1)
            state = layers.model.state_dict()
            for name in state:
                stem, _, kind = name.rpartition(".")
                if name.startswith("layers."):
                    number, rest = name.removeprefix("layers.").split(".", 1)
                    theirs = f"mtp.layers.{2 * block + int(number)}.{rest}"
                    if stem.endswith(".experts"):
                        prefix = theirs.rpartition(".")[0]
                        state[name] = torch.stack([weights[f"{prefix}.{e}.{kind}.weight"] for e in range(8)])
                    else:
                        state[name] = weights[theirs]
            state["norm_f.weight"] = weights[f"mtp.layers.{2 * block + 1}.final_layernorm.weight"]
            layers.model.load_state_dict(state)
            self.blocks.append(layers.model)
            for name in ("enorm", "hnorm", "eh_proj"):
                key = f"mtp.layers.{2 * block}.{name}.weight"
                self.beside[key] = weights[key].requires_grad_()

    def losses(self, batch, depths):
        """Of every depth: mean over the trained tokens that it predicts."""
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        sums, counts = [0.0] * depths, [0.0] * depths
        for row in range(len(batch)):
            ids = batch.input_ids[row, : int(batch.lengths[row])]
            for depth, logprobs in enumerate(self.predictions(ids, depths)):
                targets, weights = ids[depth + 2 :], mask[row, depth + 2 : len(ids)]
                chosen = logprobs[: len(targets)].gather(1, targets[:, None]).squeeze(1)
                sums[depth] = sums[depth] - (chosen * weights).sum()
                counts[depth] += float(weights.sum())
        return [total / count for total, count in zip(sums, counts, strict=True)]

    def predictions(self, ids, depths):
        """Of every depth, logprobs [T, V]: row i of the token at i + depth + 1."""
        hidden = self.model.model(ids[None]).last_hidden_state[0]
        table, head = self.model.model.embeddings.weight, self.model.lm_head.weight
        if self.detach:
            hidden, table, head = hidden.detach(), table.detach(), head.detach()
        for depth in range(1, depths + 1):
            block = (depth - 1) % len(self.blocks)
            ahead = table[pad(ids[depth:], (0, min(depth, len(ids))))]
            both = (self._norm(block, "enorm", ahead), self._norm(block, "hnorm", hidden))
            into = torch.cat(both, -1) @ self.beside[f"mtp.layers.{2 * block}.eh_proj.weight"].T
            hidden = self.blocks[block](inputs_embeds=into[None]).last_hidden_state[0]
            yield (hidden @ head.T).log_softmax(-1)

    def gradients(self):
        """By names of the hub."""
        yield from hf_gradients(self.model)
        for number, block in enumerate(self.blocks):
            for name, gradient in hf_gradients(block):
                if name == "norm_f.weight":
                    yield f"mtp.layers.{2 * number + 1}.final_layernorm.weight", gradient
                elif name.startswith("layers."):
                    layer, rest = name.removeprefix("layers.").split(".", 1)
                    yield f"mtp.layers.{2 * number + int(layer)}.{rest}", gradient
        for name, tensor in self.beside.items():
            yield name, tensor.grad

    def _norm(self, block, name, states):
        weight = self.beside[f"mtp.layers.{2 * block}.{name}.weight"]
        return weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    ("blocks", "depths", "detach", "loss"),
    [
        (1, 1, False, NegativeLogLikelihood()),
        (2, 2, False, rl_loss()),
        (1, 2, True, rl_loss()),
        (1, 3, False, NegativeLogLikelihood()),
        (1, 2, False, preference_loss()),
    ],
    ids=["one", "two blocks", "repeated, detached", "repeated", "preferences"],
)
def test_losses_and_every_gradient_equal_a_plain_reference(blocks, depths, detach, loss, folders, batch):
    if isinstance(loss, DpoLoss):
        batch = paired(batch)
    reference = Reference(folders[blocks], blocks, detach=detach)
    own, _ = loss(hf_token_logprobs(reference.model, batch), batch, count_normalizers(batch))
    ahead = reference.losses(batch, depths)
    (own + SCALE / depths * sum(ahead)).backward()

    def ours(folder, batch):
        repeated = depths > blocks
        policy = policy_of(
            folder, loss, mtp_num_layers=depths, mtp_use_repeated_layer=repeated, mtp_detach_heads=detach
        )
        metrics = policy.train_step(batch)
        losses = [metrics["loss"], *(metrics[f"mtp_{depth + 1}_loss"] for depth in range(depths))]
        return {"losses": losses, "gradients": dict(policy_gradients(policy))}

    theirs = dict(reference.gradients())
    assert sum(name.startswith("mtp.") for name in theirs) == 31 * blocks  # all but the router's bias
    losses = [float(each.detach()) for each in (own, *ahead)]  # the policy's own, and each depth's
    assert_conditioned({"losses": losses, "gradients": theirs}, ours, folders[blocks], batch)


def test_a_draft_is_accepted_where_it_is_the_very_token_that_follows(folders, batch):
    reference = Reference(folders[1], 1, detach=True)
    mask = loss_mask(batch.token_mask, batch.sample_mask)
    batch = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    accepted, drafted = 0.0, 0.0
    for last in (False, False, True):  # answers that begin with drafts, a token or two longer each time
        for row in range(len(batch)):
            ids = batch.input_ids[row, : int(batch.lengths[row])]
            with torch.no_grad():
                (logprobs,) = reference.predictions(ids, 1)
            drafts, weights = logprobs[:-2].argmax(-1), mask[row, 2 : len(ids)]
            if last:
                accepted += float(((drafts == ids[2:]) * weights).sum())
                drafted += float(weights.sum())
            else:
                ids[2:] = torch.where(weights > 0, drafts, ids[2:])
    assert 0.05 < accepted / drafted < 0.95
    metrics = policy_of(folders[1]).train_step(batch)
    assert metrics["mtp_1_acceptance_rate"] == pytest.approx(100 * accepted / drafted)  # in percent, as in NeMo-RL


def test_trained_blocks_are_weights_of_checkpoints_and_exports(folders, batch, tmp_path):
    """Bit for bit: resumed, converted, exported, and carried on by a policy that does not train them."""
    policy = policy_of(folders[1])
    policy.train_step(batch)
    live = {name: tensor.clone() for name, tensor in policy.shards.hf_tensors()}
    assert not any(name.startswith("mtp.") for name, _ in policy.weights())  # no generator loads them
    stored = load_hf_weights(folders[1])
    moved = {name for name, tensor in live.items() if name.startswith("mtp.") and not torch.equal(tensor, stored[name])}
    assert len(moved) > 20 and set(live) == set(stored)  # not every expert was chosen

    policy.save_hf(tmp_path / "hub")
    policy.save_model(tmp_path / "model")
    policy.save_checkpoint(str(tmp_path / "step"))
    assert not (tmp_path / "model" / "hf" / "carried.safetensors").exists()
    resumed = policy_of(folders[1])
    resumed.load_checkpoint(str(tmp_path / "step"))
    again = policy_of(tmp_path / "model")
    untrained = policy_of(tmp_path / "model", mtp_num_layers=0)
    untrained.save_model(tmp_path / "carried")
    untrained.save_hf(tmp_path / "hub of untrained")
    for folder in ("model", "step", "carried"):
        convert_megatron_to_hf(tmp_path / folder, tmp_path / f"{folder} on the hub")
    assert (tmp_path / "carried" / "hf" / "carried.safetensors").is_file()
    for name in ("hub", "hub of untrained", "model on the hub", "step on the hub", "carried on the hub"):
        assert_equal(load_hf_weights(tmp_path / name), live)
    for other in (resumed, again, policy_of(tmp_path / "carried")):
        assert_equal(dict(other.shards.hf_tensors()), live)
    assert resumed.train_step(grouped_batch(1)) == policy.train_step(grouped_batch(1))


def test_a_checkpoint_without_the_block_that_is_to_be_trained_is_refused(folders, tmp_path):
    policy_of(folders[1], mtp_num_layers=0).save_model(tmp_path)
    (tmp_path / "hf" / "carried.safetensors").unlink()
    with pytest.raises(ArtifactError, match="no block of multi-token prediction") as caught:
        policy_of(tmp_path)
    assert caught.value.hints == ("policy.megatron_cfg.mtp_num_layers=0",)


def test_a_depth_that_predicts_nothing_has_no_loss_and_no_metric(batch):
    batch = dataclasses.replace(batch, token_mask=torch.zeros_like(batch.token_mask))
    batch.token_mask[0, 1:3] = 1  # the token after the next one is predicted once, the one after that never
    config = policy_config(megatron_cfg={"mtp_num_layers": 2, "mtp_loss_scaling_factor": SCALE}).megatron_cfg
    loss = PredictionLoss(batch, config, torch.device("cpu"))
    cells = torch.tensor([2, 7])  # the second is not trained
    layout = SimpleNamespace(ahead=[SimpleNamespace(cells=cells), SimpleNamespace(cells=cells[1:])])
    said = torch.tensor([-3.0, -torch.inf]), torch.tensor([1.0, 1.0])
    added = loss([said, tuple(each[1:] for each in said)], layout, batch)
    assert float(added) == pytest.approx(SCALE / 2 * 3.0)
    assert loss.metrics(SimpleNamespace(data_size=1)) == {"mtp_1_loss": 3.0, "mtp_1_acceptance_rate": 100.0}


def assert_equal(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    "change",
    [
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 5, "make_sequence_length_divisible_by": 96},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}},
    ],
    ids=str,
)
def test_losses_do_not_depend_on_how_the_batch_is_cut(change, folders):
    megatron = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "moe_router_bias_update_rate": 1e-3}

    def trained(changes, folder, *batches):
        megatron_cfg = {**megatron, "activation_checkpointing": bool(changes), "optimizer": {**SMOOTH, "lr": 1e-3}}
        policy = MegatronPolicy(policy_config(megatron_cfg=megatron_cfg, **changes), folder, rl_loss())
        metrics = [policy.train_step(batch) for batch in batches]
        biases = [router.expert_bias.clone() for router in policy.model.routers()]
        assert len(biases) == 3  # the block's own is balanced like the others
        return {"metrics": metrics, "biases": biases}

    given = folders[1], grouped_batch(0), grouped_batch(1)
    assert_conditioned(trained(change, *given), partial(trained, {}), *given)


def test_rows_without_advantage_are_learned_from(folders, batch):
    """Their answers are sampled as any other; only the policy's own loss has nothing of them."""
    batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    policy = policy_of(folders[1], mtp_detach_heads=True)
    before = {name: tensor.clone() for name, tensor in policy.shards.hf_tensors()}
    losses = [policy.train_step(batch)["mtp_1_loss"] for _ in range(3)]
    assert losses[2] < losses[0] - 0.1
    after = dict(policy.shards.hf_tensors())
    assert all(torch.equal(after[name], before[name]) for name in after if not name.startswith("mtp."))


def test_detached_blocks_are_clipped_by_themselves(folders, batch):
    """So that the model is trained as without them, however large their gradient is."""
    settings = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1e3}
    policies = [
        MegatronPolicy(policy_config(max_grad_norm=0.1, megatron_cfg=megatron), folders[1], rl_loss())
        for megatron in ({}, {**settings, "mtp_detach_heads": True}, settings)
    ]
    plain, detached, attached = (policy.train_step(batch) for policy in policies)
    assert detached["mtp_grad_norm"] > 100 and detached["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert attached["grad_norm"] > 100 and "mtp_grad_norm" not in attached
    clipped = [dict(policy_gradients(policy)) for policy in policies]
    for name, gradient in clipped[0].items():
        torch.testing.assert_close(clipped[1][name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-4)
    blocks = [torch.stack([each[n].norm() for n in each if n.startswith("mtp.")]).norm() for each in clipped[1:]]
    assert float(blocks[0]) == pytest.approx(0.1, rel=1e-3) and float(blocks[1]) < 0.1
