"""The experts that a real vLLM's tokens went through, as completions have them."""

import numpy as np
import pytest
import torch

from nemotron_steps.config.schema.policy import VllmConfig
from nemotron_steps.engine.batching import pad_rows
from nemotron_steps.engine.generation.vllm.generator import recorded_experts
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from nemotron_steps.errors import EngineError, UnsupportedError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from tests.engine.generation.embedded.test_routed_experts import rollout_of
from tests.engine.generation.vllm.conftest import sample
from tests.engine.policy.batches import policy_config, rl_loss
from tests.engine.policy.routes import chosen_by
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.vllm

MAX_LENGTH, BLOCK = 96, 32
BEGINNING = [20 + i * 7 % 150 for i in range(2 * BLOCK)]
PROMPTS = [[5, 6, 7, 8], BEGINNING, [*BEGINNING, 9, 11], [*BEGINNING, 9, 12, 13, 14, 15]]
"""With a beginning in common, which vLLM computes once and keeps."""


def recorded(record, token_ids=(7, 8, 9)):
    """vLLM's own output, of these experts."""
    from vllm.outputs import CompletionOutput

    return CompletionOutput(0, "", list(token_ids), None, None, routed_experts=record)


def record_of(tokens, layers=4, dtype=np.uint8):
    """Two of 8 experts; layers without experts hold zeros."""
    first = np.arange(tokens * layers).reshape(tokens, layers) % 7
    chosen = np.stack((first + 1, first), -1).astype(dtype)
    chosen[:, 0] = 0
    return chosen


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_of_all_layers_those_with_experts_are_taken(dtype):
    record = record_of(6, dtype=dtype)
    found = recorded_experts(recorded(record), (1, 3), 6)
    assert found.dtype == np.int16 and found.shape == (6, 2, 2)
    assert np.array_equal(found, record[:, [1, 3]].astype(np.int16))


def test_tokens_taken_back_are_dropped_and_those_not_recorded_unknown():
    record = record_of(6)
    assert np.array_equal(recorded_experts(recorded(record), (1, 3), 4), record[:4, [1, 3]])
    found = recorded_experts(recorded(record), (1, 3), 8)
    assert np.array_equal(found[:6], record[:, [1, 3]]) and (found[6:] == -1).all() and found.shape == (8, 2, 2)


@pytest.mark.parametrize(
    "record",
    [None, record_of(6, layers=3), np.zeros((6, 4, 2), np.uint8)],
    ids=["nothing", "fewer layers", "unwritten buffers"],
)
def test_a_record_that_is_none_is_an_error_and_not_a_guess(record):
    with pytest.raises(EngineError):
        recorded_experts(recorded(record), (1, 3), 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "qwen3_moe"
    # vLLM on CPU has no narrower heads, and no narrower experts
    write_checkpoint("qwen3_moe", folder, head_dim=32, moe_intermediate_size=32)
    return folder


@pytest.fixture(scope="module")
def generator(folder):
    from vllm import EngineArgs

    from nemotron_steps.engine.generation.vllm.engine import check_recording
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

    try:
        check_recording(EngineArgs)
    except UnsupportedError as refusal:
        pytest.skip(f"needs CUDA: {refusal.what}")
    generator = VllmGenerator(
        folder,
        VllmConfig(enforce_eager=True, max_num_seqs=8),
        max_total_length=MAX_LENGTH,
        precision="float32",
        weights=load_hf_weights(folder).items(),
        record_routed_experts=True,
        options={"block_size": BLOCK},
    )
    yield generator
    generator.close()


def batch_of(completions):
    prompts = {f"t/{number}": prompt for number, prompt in enumerate(PROMPTS)}
    return pad_rows([rollout_of(each, prompts) for each in completions], torch.ones(len(completions)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_recorded_are_the_experts_that_a_policy_of_these_weights_chooses(folder, generator):
    """Twice, so that prompts are found whole in the prefix cache; some samples of one token, some cut short."""
    policy = MegatronPolicy(policy_config(), folder, rl_loss())
    mixtures = Architecture.from_folder(folder).mixtures
    for new in (12, 1):
        completions = sample(generator, PROMPTS, "t", n=2, seed=4, max_new_tokens=new)
        for each in completions:
            fed = len(PROMPTS[int(each.request_id[2:])]) + len(each.token_ids) - 1
            assert each.routed_experts.shape == (fed, len(mixtures), 2) and each.routed_experts.dtype == np.int16
        batch = batch_of(completions)
        assert torch.equal(batch.routed_experts.sort(-1).values, chosen_by(policy, batch).sort(-1).values)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_an_update_in_flight_each_token_has_the_experts_it_went_through(folder, generator):
    """The tokens before it keep those of the weights before it."""
    policy = MegatronPolicy(policy_config(), folder, rl_loss())
    weights = load_hf_weights(folder)
    changed = {name: -tensor if name.endswith("mlp.gate.weight") else tensor for name, tensor in weights.items()}
    generator.submit(GenerationRequest("t/1", PROMPTS[1], SamplingParams(max_new_tokens=12, seed=1), 6))
    done = []
    for _ in range(5):
        done += generator.step()
    generator.update_weights(changed.items(), 1)
    while generator.pending():
        done += generator.step()
    generator.update_weights(weights.items(), 2)
    through = [each for each in done if set(each.weight_versions) == {0, 1}]
    assert through
    batch = batch_of(through)
    same = (batch.routed_experts.sort(-1).values == chosen_by(policy, batch).sort(-1).values).all((-1, -2))
    for row, completion in enumerate(through):
        before = len(PROMPTS[1]) + completion.weight_versions.count(0) - 1
        fed = len(completion.routed_experts)
        assert bool(same[row, :before].all()) and not bool(same[row, before:fed].any())
