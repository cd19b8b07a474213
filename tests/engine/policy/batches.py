"""Batches with the shapes RL produces: groups with one prompt each, of unequal lengths, and some loners."""

from dataclasses import replace

import torch

from nemotron_steps.config.schema.dpo import DpoTrainConfig
from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.loss import SampledFrom
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.losses.supervised import DpoLoss
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.models.mapping import split

ALL_TOKENS, SOME_TOKENS = SampledFrom(), SampledFrom(temperature=0.8, top_p=0.9, top_k=150)
"""Whole distributions, and truncated ones that keep most of the tokens of `grouped_batch`, but not all."""

SMOOTH = {"lr": 1e-2, "weight_decay": 0.1, "adam_eps": 1e-4}
"""An optimizer for tests that compare what follows a step. Adam's first step is lr g / (|g| + eps): with the usual eps
that is lr in the direction of g's sign, which rounding decides where g is all but 0."""


def grouped_batch(seed: int = 0, prompts=((20, 3), (33, 3), (5, 1), (7, 1), (12, 4)), width: int = 60) -> TrainBatch:
    """(prompt length, rollouts) of each group; lengths vary within a group, one row trains nothing."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(count for _, count in prompts)
    ids = torch.randint(3, 200, (rows, width), generator=generator)
    lengths = torch.zeros(rows, dtype=torch.int64)
    mask = torch.zeros(rows, width)
    row = 0
    for prompt, count in prompts:
        first = row
        for _ in range(count):
            ids[row, :prompt] = ids[first, :prompt]
            lengths[row] = int(torch.randint(prompt + 1, width + 1, (), generator=generator))
            mask[row, prompt : lengths[row]] = 1
            row += 1
    mask[1, int(lengths[1]) - 2] = 0  # a tool's token inside a response
    sample_mask = torch.ones(rows)
    sample_mask[3] = 0
    noise = torch.randn(rows, width, generator=generator)
    return TrainBatch(
        input_ids=ids,
        lengths=lengths,
        token_mask=mask,
        sample_mask=sample_mask,
        generation_logprobs=(-5.0 + 0.1 * noise) * mask,
        advantages=torch.randn(rows, 1, generator=generator).expand(rows, width) * mask,
    )


def paired(batch: TrainBatch) -> TrainBatch:
    """The rows as chosen and rejected answers in turn: a pair is masked as a whole, and has logprobs to start from."""
    noise = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    sample_mask = batch.sample_mask.view(-1, 2).amin(1).repeat_interleave(2)
    return replace(batch, sample_mask=sample_mask, reference_logprobs=(-5.0 + noise) * batch.token_mask)


def preference_loss() -> DpoLoss:
    """With a share of the chosen answers' likelihood."""
    return DpoLoss(DpoTrainConfig(sft_loss_weight=0.1))


def policy_config(**changes) -> PolicyConfig:
    """float32, everything in one micro-batch unless changed."""
    settings = {"precision": "float32", "train_micro_batch_size": 64, "logprob_batch_size": 64, **changes}
    settings.setdefault("megatron_cfg", {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}})
    if settings.get("dtensor_cfg", {}).get("enabled"):
        given = settings.pop("megatron_cfg").get("optimizer", {})
        settings["optimizer"] = {"kwargs": {name.removeprefix("adam_"): value for name, value in given.items()}}
    return PolicyConfig.model_validate(settings)


def lora_config(optimizer=None, precision="float32", **peft) -> PolicyConfig:
    """Of the megatron policy, with adapters."""
    settings = {"enabled": True, "dim": 4, "alpha": 8, **peft}
    megatron = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1, **(optimizer or {})}, "peft": settings}
    return policy_config(precision=precision, megatron_cfg=megatron)


def rl_loss(sampled_from: SampledFrom = ALL_TOKENS, **changes) -> PolicyGradientLoss:
    """On-policy ratio, truncated importance sampling: what the Super3 stages run."""
    settings = {"force_on_policy_ratio": True, "use_importance_sampling_correction": True, **changes}
    return PolicyGradientLoss(LossFnConfig.model_validate(settings), sampled_from)


def hf_token_logprobs(model, batch: TrainBatch) -> torch.Tensor:
    """Reference: logprobs of trained tokens from a transformers model, row by row, with gradient."""
    rows = []
    for row in range(len(batch)):
        length = int(batch.lengths[row])
        ids = batch.input_ids[row : row + 1, :length]
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        rows.append(torch.nn.functional.pad(logprobs, (1, batch.input_ids.shape[1] - length)))
    return torch.stack(rows) * batch.token_mask


def hf_gradients(model):
    """Gradients of a transformers model under the names it saves: experts are one tensor in memory only."""
    for name, parameter in model.named_parameters():
        if model.config.model_type == "nemotron_h" and name.startswith("model."):
            name = name.replace("model.", "backbone.", 1)
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            if kind != "gate_up_proj":
                yield f"{stem}.{expert}.{kind}.weight", gradient
            else:
                for part, half in zip(("gate", "up"), gradient.chunk(2), strict=True):
                    yield f"{stem}.{expert}.{part}_proj.weight", half


def policy_gradients(policy):
    """Of the last step, of a policy on one rank, under Hugging Face names."""
    for buffer in policy.buffers:
        gradients = buffer.unflatten(buffer.grads)
        for slot in buffer.slots:
            yield from split(slot.parameter, gradients[slot.parameter.name], policy.architecture)
