"""The built-in artifact types keep to what types of other packages are held to.

All but `prompt_data`, `chat_data` and `pair_data`, which are what others write: imports read them.
"""

from functools import partial
from pathlib import Path

import pytest

from nemotron_steps.testing import artifact_type
from nemotron_steps.testing.step_subject import write_sample
from nemotron_steps.testing.suite import Examination, State
from tests.artifacts.checkpoint_files import write_adapter, write_hf, write_megatron

EXAMPLES = {
    **{
        name: partial(write_sample, name)
        for name in ("training_jsonl", "sft_chats", "rl_prompts", "preference_pairs", "eval_report")
    },
    "adapter": write_adapter,
    "checkpoint_hf": write_hf,
    "checkpoint_megatron": write_megatron,
    "reward_model_hf": write_hf,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_built_in_type_keeps_to_the_rules(tmp_path: Path, name: str):
    examination = Examination(artifact_type.SUITE, artifact_type.TypeSubject(name, tmp_path, EXAMPLES[name]))
    outcomes = examination.outcomes()
    failed = {check: outcome.text for check, outcome in outcomes.items() if outcome.state is State.FAILED}
    assert failed == {}
