"""How a step's rollouts are cut into micro-batches, in tokens."""

import pytest

from nemotron_steps.config.layout.memory.settings import BatchArithmetic, MemorySettings
from tests.config.layout.memory.shapes import flat

ROWS, GROUP, PROMPT, ANSWER = 8, 4, 40, 22


def settings_of(**policy) -> MemorySettings:
    values = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": GROUP},
        "policy": {
            "train_global_batch_size": ROWS,
            "max_total_sequence_length": PROMPT + ANSWER,
            "precision": "float32",
            **policy,
            "generation": {
                "backend": "embedded",
                "max_new_tokens": ANSWER,
                "max_sequences": ROWS,
                **policy.get("generation", {}),
            },
        },
        "cluster": {"gpus_per_node": 1},
    }
    return MemorySettings.read(flat(values).get)


@pytest.mark.parametrize(
    ("budget", "micro_batches", "tokens", "trained"),
    [(10**6, 1, 2 * PROMPT + 8 * ANSWER, 8 * ANSWER), (200, 2, 200, 8 * ANSWER), (100, 3, 100, 100)],
)
@pytest.mark.parametrize("section", ["sequence_packing", "dynamic_batching"])
def test_a_prompt_that_rows_share_is_read_once_and_not_trained_on(budget, micro_batches, tokens, trained, section):
    cut = {"enabled": True, "train_mb_tokens": budget}
    batch = BatchArithmetic.of(settings_of(**{section: cut}))
    assert (batch.micro_batches, batch.tokens, batch.trained) == (micro_batches, tokens, trained)
    assert (batch.rows, batch.updates, batch.budget) == (8, 1, True)
    assert batch.micro_rows == tokens * 8 // (2 * PROMPT + 8 * ANSWER)


@pytest.mark.parametrize(("rows", "micro_batches", "prompts"), [(1, 8, 1), (4, 2, 1), (6, 2, 2), (64, 1, 2)])
def test_rows_of_a_group_share_its_prompt_where_rows_cut_the_batch(rows, micro_batches, prompts):
    batch = BatchArithmetic.of(settings_of(train_micro_batch_size=rows))
    cut = min(rows, 8)
    assert (batch.micro_batches, batch.micro_rows, batch.budget) == (micro_batches, cut, False)
    assert (batch.tokens, batch.trained) == (prompts * PROMPT + cut * ANSWER, cut * ANSWER)
