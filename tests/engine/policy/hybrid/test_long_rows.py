"""One row of 64k tokens: what its logprobs and its training step hold at once."""

from __future__ import annotations

import torch

from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import TrainBatch
from tests.config.layout.memory.peak import Peak
from tests.engine.policy.batches import policy_config
from tests.models.hybrid_twins import write_hybrid

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
