"""Teachers beside a policy: what they score, and a policy that learns from it, against transformers in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.teachers import FrozenTeachers, frozen_teacher
from nemotron_steps.errors import ConfigError, EngineError
from tests.conditioning import Conditioned
from tests.engine.losses.test_distillation import KINDS, plain
from tests.engine.policy.batches import policy_config, rl_loss
from tests.engine.policy.distilling_ranks import LAYOUTS, VOCAB, distilled, names_of, run_two, write_models
from tests.models.checkpoints import write_checkpoint
from tests.models.hybrid_twins import write_hybrid

K = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("teachers"))


@pytest.fixture(scope="module")
def one(folders):
    """By the number of heaviest tokens, what one process finds with the whole batch at once."""

    def found(topk, *given):
        return distilled(dict(zip(folders, given, strict=True)), {}, topk)

    return {topk: Conditioned(partial(found, topk), *folders.values()) for topk in (K, None)}


def whole_logits(folder, batch):
    """float64 [N, T, V] at each token: of the distribution it was drawn from."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = []
    for ids, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True):
        logits = model(ids[None, :length]).logits[0, :-1]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 1, len(ids) - length)))
    return torch.stack(rows), model


def teachers_of(folders, **changes):
    named = {name: folders[name] for name in ("a", "b")}
    policy = MegatronPolicy(policy_config(**changes), folders["policy"], rl_loss())
    return FrozenTeachers(policy, named, K, offload=True)


def test_each_row_is_scored_by_its_teacher_alone(folders, batch):
    names = names_of(batch)
    trained = (batch.token_mask > 0) & (batch.sample_mask > 0)[:, None]

    def ours(a, b):
        scored = teachers_of({**folders, "a": a, "b": b}).score(batch, names)
        assert not scored.teacher_topk_logprobs[~trained].any() and not scored.teacher_logprobs[~trained].any()
        found = {"sampled": scored.teacher_logprobs[trained], "heaviest": scored.teacher_topk_logprobs[trained]}
        return found | {"tokens": scored.teacher_topk_indices[trained].long()}

    both = {name: whole_logits(folders[name], batch)[0].detach().log_softmax(-1) for name in ("a", "b")}
    logprobs = torch.stack([both[name or "a"][row] for row, name in enumerate(names)])
    sampled = logprobs.gather(2, batch.input_ids[..., None])[..., 0]
    heaviest = logprobs.topk(K)
    found = Conditioned(ours, folders["a"], folders["b"])
    found["sampled"].check(sampled[trained])
    found["heaviest"].check(heaviest.values[trained])
    assert (found.value["tokens"] == heaviest.indices[trained]).float().mean() > 0.99


@pytest.mark.parametrize("kl", KINDS, ids=lambda kl: f"{kl.kl_type}, {'zero' if kl.zero_outside_topk else 'top k'}")
def test_loss_and_gradient_over_packed_rows_are_those_of_whole_distributions_row_by_row(kl, folders, batch):
    packed = {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}}
    scored = teachers_of(folders, **packed).score(batch, names_of(batch))
    policy = MegatronPolicy(policy_config(max_grad_norm=1e9, **packed), folders["policy"], DistillationLoss(kl))
    metrics = policy.train_step(scored)

    logits, model = whole_logits(folders["policy"], batch)
    trained = (batch.token_mask > 0) & (batch.sample_mask > 0)[:, None]
    tokens = scored.teacher_topk_indices[trained].long()
    teacher = torch.full((len(tokens), VOCAB), -1e9, dtype=torch.float64)
    teacher.scatter_(1, tokens, scored.teacher_topk_logprobs[trained].double())
    loss = plain(kl, logits[trained], teacher, tokens).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["teacher_divergence"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    log_p = logits.detach()[trained].log_softmax(-1)
    assert metrics["entropy"] == pytest.approx(-(log_p.exp() * log_p).sum(-1).mean().item(), rel=1e-4)
    assert metrics["teacher_topk_mass"] == pytest.approx(
        scored.teacher_topk_logprobs[trained].exp().sum(-1).mean().item(), rel=1e-5
    )


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_the_full_kl_is_over_whole_distributions_of_teachers_of_different_width(kind, folders, batch):
    packed = {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}}
    config = policy_config(max_grad_norm=1e9, logprob_chunk_size=7, **packed)
    policy = MegatronPolicy(config, folders["policy"], DistillationLoss(TeacherKl(kind, 0.3)))
    names, teachers = names_of(batch), {name: folders[name] for name in ("a", "b")}
    scored = FrozenTeachers(policy, teachers, None, offload=True).score(batch, names)
    assert scored.teacher_states.shape[2] == 96 and scored.teacher_topk_logprobs is None
    metrics = policy.train_step(scored)

    logits, model = whole_logits(folders["policy"], batch)
    trained = (batch.token_mask > 0) & (batch.sample_mask > 0)[:, None]
    q = torch.zeros_like(logits)
    for name, folder in teachers.items():
        rows = [row for row, chosen in enumerate(names) if chosen == name]
        q[rows] = whole_logits(folder, batch)[0].detach().log_softmax(-1)[rows]
    p, q = logits[trained].log_softmax(-1), q[trained]
    forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": 0.3}[kind]
    loss = (weight * forward + (1 - weight) * reverse).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


@pytest.mark.parametrize("topk", [K, None])
@pytest.mark.parametrize("change", [{"train_micro_batch_size": 1}, {"train_micro_batch_size": 5}], ids=str)
def test_it_does_not_depend_on_how_the_batch_is_cut(change, topk, folders, one):
    one[topk].check(distilled(folders, change, topk))


@pytest.mark.parametrize("training", [{"mtp_num_layers": 1}, {"moe_router_bias_update_rate": 0.1}], ids=str)
def test_a_teacher_has_nothing_that_only_training_needs(training, tmp_path):
    if "mtp_num_layers" in training:
        write_hybrid("mtp", tmp_path, vocab_size=VOCAB)
    else:
        write_checkpoint("qwen3_moe", tmp_path, vocab_size=VOCAB)
    teacher = frozen_teacher(policy_config(megatron_cfg=training), "a", tmp_path, VOCAB)
    assert teacher.model.mtp is None
    biases = [router.expert_bias for router in teacher.model.routers()]
    assert biases and all((bias is None) is ("mtp_num_layers" not in training) for bias in biases)


def test_teachers_choose_their_own_experts_and_have_at_most_all_tokens(folders, batch):
    policy = MegatronPolicy(policy_config(), folders["policy"], rl_loss())
    teachers = FrozenTeachers(policy, {name: folders[name] for name in ("a", "b")}, VOCAB + 9, offload=True)
    routes = torch.zeros(*batch.input_ids.shape, 2, 2, dtype=torch.int16)
    scored = teachers.score(replace(batch, routed_experts=routes), ["b"] * len(batch))  # nothing is the first one's
    assert scored.routed_experts is routes and scored.teacher_states is scored.teacher_number is None
    trained = (batch.token_mask > 0) & (batch.sample_mask > 0)[:, None]
    assert scored.teacher_topk_logprobs.shape[2] == VOCAB
    mass = scored.teacher_topk_logprobs[trained].exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass))


def test_a_teacher_of_another_vocabulary_is_refused(folders, tmp_path):
    write_checkpoint("qwen3", tmp_path, vocab_size=VOCAB + 8)
    policy = MegatronPolicy(policy_config(), folders["policy"], rl_loss())
    with pytest.raises(ConfigError, match="another vocabulary") as caught:
        FrozenTeachers(policy, {"other": tmp_path}, K, offload=True)
    assert caught.value.where == "on_policy_distillation.teachers.other" and caught.value.hints


def test_a_batch_that_no_teacher_has_scored_is_refused(folders, batch):
    policy = MegatronPolicy(policy_config(), folders["policy"], DistillationLoss(TeacherKl()))
    with pytest.raises(EngineError, match="no teacher has scored"):
        policy.train_step(batch)


def test_a_frozen_policy_keeps_neither_gradients_nor_moments(folders):
    frozen = MegatronPolicy(policy_config(), folders["a"], rl_loss(), frozen=True)
    assert frozen.buffers == [] and frozen.optimizer.moments == []


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")
def test_two_ranks_distil_like_one(folders, one, tmp_path):
    found, other = run_two(tmp_path, folders)
    assert found == other
    for sampled in found["sampled"]:  # without any heaviest tokens
        one[K]["teacher"].check(sampled)
    for topk in (K, None):
        for layout in LAYOUTS:
            one[topk].check(found[f"{layout} {topk}"])
