"""The embedded generator on a GPU: the same results as on the CPU."""

import pytest
import torch

from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.types import Completion, GenerationRequest, SamplingParams
from tests.engine.generation.embedded.embedded_models import random_model

pytestmark = pytest.mark.cuda


def generate(device: str, dtype: torch.dtype, length: int) -> dict[tuple[str, int], Completion]:
    model, architecture = random_model("qwen3-tied")
    generator = EmbeddedGenerator(
        architecture,
        model.state_dict().items(),
        max_sequences=6,
        max_total_length=256,
        device=device,
        dtype=dtype,
        eos_token_ids=[3],
    )
    for i in range(4):
        prompt = torch.randint(0, 96, (length + i,), generator=torch.Generator().manual_seed(i)).tolist()
        generator.submit(GenerationRequest(f"r{i}", prompt, SamplingParams(24 + i, seed=i), 3))
    done: dict[tuple[str, int], Completion] = {}
    while generator.pending():
        done.update({(c.request_id, c.index): c for c in generator.step()})
    return done


@pytest.mark.parametrize("length", [10, 100])
def test_float32_samples_the_same_tokens_as_on_the_cpu(length: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    cpu, cuda = generate("cpu", torch.float32, length), generate("cuda", torch.float32, length)
    assert {k: c.token_ids for k, c in cuda.items()} == {k: c.token_ids for k, c in cpu.items()}
    for key, completion in cpu.items():
        torch.testing.assert_close(
            torch.tensor(cuda[key].logprobs), torch.tensor(completion.logprobs), atol=1e-4, rtol=0
        )


def test_bfloat16_runs_and_records_plausible_logprobs() -> None:
    done = generate("cuda", torch.bfloat16, 100)
    assert len(done) == 12
    assert all(p <= 0 for c in done.values() for p in c.logprobs)
