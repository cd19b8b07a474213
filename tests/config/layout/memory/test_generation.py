"""Weights and caches of generators, predicted and counted; what vLLM's share of a GPU has to hold."""

import dataclasses
import json

import pytest

from nemotron_steps.config.layout.memory.generation import GIB, SLEEPING, policy_generator, rows_that_fit
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from tests.config.layout.memory.shapes import QWEN3_8B
from tests.config.layout.memory.test_batch import ANSWER, GROUP, PROMPT, ROWS, settings_of
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint


@pytest.mark.parametrize(
    ("name", "records"), [("qwen3", False), ("qwen2_tied", False), ("latent", False), ("latent", True)]
)
def test_the_embedded_generators_caches_are_predicted(name, records, tmp_path):
    hybrid = name in hybrid_twins.TWINS
    (hybrid_twins.write_hybrid if hybrid else write_checkpoint)(name, tmp_path)
    shape = ModelShape.read(json.loads((tmp_path / "config.json").read_text()))
    generator = EmbeddedGenerator(
        Architecture.from_folder(tmp_path),
        load_hf_weights(tmp_path).items(),
        max_sequences=ROWS,
        max_total_length=PROMPT + ANSWER,
        eos_token_ids=[],
        record_routed_experts=records,
    )
    for number in range(2):
        prompt = [3 + (number * 7 + token) % 150 for token in range(PROMPT)]
        generator.submit(GenerationRequest(str(number), prompt, SamplingParams(ANSWER, seed=0), GROUP))
    generator.step()
    batch = generator._batch
    kept = [batch.keys, batch.values, batch.tokens, batch.logprobs, batch._bias, batch.routed_experts]
    kept += [] if batch.states is None else [batch.states.ssm, batch.states.inputs]
    for prefix in batch.prefixes:
        kept += [prefix.keys, prefix.values]
        kept += [] if prefix.states is None else [prefix.states.ssm, prefix.states.window]
    assert len(batch.prefixes) == 2
    counted = sum(tensor.nbytes for tensor in kept)
    memory = policy_generator(shape, settings_of(router_replay={"enabled": records}))
    # On CPU there are 64 columns from the start, where a GPU has as many as are needed.
    column = shape.kv_bytes_per_token * 2 + 8 + 4 + 4 * shape.key_value_heads
    column += 2 * batch.routed_experts.shape[2:].numel()
    more = ROWS * (batch.columns - (ANSWER + 2)) * column
    assert memory.generates["cache"] + more == counted
    storages = [slot.view.untyped_storage() for slot in generator._model._slots.values()]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert memory.generates["weights"] == pytest.approx(sum(weights.values()), rel=0.02)


@pytest.mark.parametrize(
    ("vllm", "asynchronous", "asleep"),
    [({}, False, True), ({"tensor_parallel_size": 2}, False, False), ({"async_engine": False}, False, False),
     ({}, True, False)],
)  # fmt: skip
def test_vllm_sleeps_in_a_process_of_its_own_beside_a_policy(vllm, asynchronous, asleep):
    settings = settings_of(generation={"backend": "vllm", "vllm_cfg": {"gpu_memory_utilization": 0.5, **vllm}})
    memory = policy_generator(ModelShape.read(QWEN3_8B), dataclasses.replace(settings, asynchronous=asynchronous))
    assert sum(memory.generates.values()) == memory.share == 40 * GIB
    assert memory.rests == ({"asleep": SLEEPING} if asleep else memory.generates)


@pytest.mark.parametrize("length", [1024, 4096, 32_768])
@pytest.mark.parametrize("free", [24, 79, 139])
def test_as_many_rows_are_decoded_at_once_as_free_memory_has_room_for(free, length):
    shape = ModelShape.read(QWEN3_8B)
    assert shape is not None
    rows = rows_that_fit(shape, free * GIB, most=100_000, length=length, element=2)
    keys_and_values = shape.kv_bytes_per_token * (length + length // 8)
    weights = 8.2e9 * 2
    widened = 4 / 3 * keys_and_values  # a third of the cache exists twice while it grows
    assert rows == 1 or weights + rows * widened < 0.9 * free * GIB
    assert weights + (rows + 1) * widened > 0.8 * free * GIB  # and not far fewer
    assert rows_that_fit(shape, free * GIB, most=2, length=length, element=2) == min(2, rows)
