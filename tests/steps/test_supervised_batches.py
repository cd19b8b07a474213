"""The shipped configs that train on chats and pairs cut a batch by tokens, as many as the longest row may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.policy.micro_batches import plan_micro_batches
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence
from nemotron_steps.engine.supervised.loop import batch_of
from nemotron_steps.manifest.packs import builtin_pack_root
from nemotron_steps.session.session import Session

STEPS = {"sft/megatron_bridge": 1, "reward_model/genrm": 1, "sft/automodel": 1, "rl/nemo_rl/dpo": 2}
"""Step → sequences of what its batch counts: a chat, or the two of a pair."""
CONFIGS = [
    (step, name)
    for step in STEPS
    for name in ("one_gpu", "one_node", "cpu")
    if Path(builtin_pack_root(), "configs", step, f"{name}.yaml").exists()
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Session(home=str(tmp_path_factory.mktemp("home")))


def micro_batches(values, unit, length):
    """Rows of each micro-batch of each rank, of a step whose chats all have that length."""
    policy = PolicyConfig.model_validate(values["policy"])
    rows = policy.train_global_batch_size * unit
    batch = batch_of([ChatSequence([number] * length, [0] + [1] * (length - 1)) for number in range(rows)])
    padded, ranks = policy.dtensor_cfg.enabled, max(1, values["cluster"].get("gpus_per_node", 0))
    plan = plan_micro_batches(batch, range(rows), policy, ranks, train=True, unit=unit, padded=padded)
    return [[len(part) for part in share] for share in plan]


@pytest.mark.parametrize(("step", "config"), CONFIGS)
def test_short_rows_are_trained_on_together_on_every_rank(step, config, bench):
    values, unit = bench.compose(step, config, ()).values, STEPS[step]
    shares = micro_batches(values, unit, 100)
    rows = values["policy"]["train_global_batch_size"] * unit
    assert len(shares) == {"one_gpu": 1, "one_node": 8, "cpu": 1}[config]
    assert [[rows // len(shares)]] * len(shares) == shares  # one micro-batch, and no rank idle
