"""A tiny checkpoint, and a global batch with groups that share prompts."""

import pytest

from nemotron_steps.engine.policy.megatron import MegatronPolicy
from tests.conditioning import Conditioned
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.models.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "qwen3"
    write_checkpoint("qwen3", folder, initializer_range=0.1)
    return folder


@pytest.fixture(scope="session")
def plain_step(qwen3_folder):
    """Logprobs before a step with the whole batch in one micro-batch, and its metrics."""

    def step(folder, batch):
        policy = MegatronPolicy(policy_config(), folder, rl_loss())
        return {"logprobs": policy.logprobs(batch), "metrics": policy.train_step(batch)}

    return Conditioned(step, qwen3_folder, grouped_batch())


@pytest.fixture
def batch():
    return grouped_batch()
