"""Decoding with the CUDA kernels, run in Triton's interpreter: the same tokens as operator by operator."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SCRIPT = """
import json
import sys
import traceback
import torch
from tests.engine.generation.embedded.embedded_models import random_model
from nemotron_steps.engine.generation.embedded import kernels as embedded_kernels
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.generation.embedded.decoders import GraphDecoder
from nemotron_steps.engine.types import GenerationRequest, SamplingParams

embedded_kernels._PREFIX_PROGRAMS = 3  # fewer than prefixes times heads; the interpreter runs each in turn

def model_of(family):
    heads_of_16 = {"hidden_size": 64} if family == "llama-rope3" else {}  # which the kernel needs
    return random_model(family, num_hidden_layers=2, **heads_of_16)

def generate(family, length, fused):
    model, architecture = model_of(family)
    generator = EmbeddedGenerator(
        architecture, model.state_dict().items(), max_sequences=5, max_total_length=length + 24, eos_token_ids=[3]
    )
    generator._decoder = GraphDecoder(generator._model, generator._batch, capture=False) if fused else None
    done = {}
    for i in range(3):
        prompt = torch.randint(0, 96, (length + i,), generator=torch.Generator().manual_seed(i)).tolist()
        generator.submit(GenerationRequest(f"r{i}", prompt, SamplingParams(3 + 2 * i, seed=i), 3 - i))
    while generator.pending():
        done.update({(c.request_id, c.index): c for c in generator.step()})
    return done

def check(family, length, splits):
    embedded_kernels.parts_of_keys = lambda rows_and_heads, columns: splits
    plain, fused = generate(family, length, False), generate(family, length, True)
    assert len(plain) == 6
    assert {k: c.token_ids for k, c in fused.items()} == {k: c.token_ids for k, c in plain.items()}
    for key, completion in plain.items():
        torch.testing.assert_close(
            torch.tensor(fused[key].logprobs), torch.tensor(completion.logprobs), atol=1e-4, rtol=1e-4
        )

found = []
for case in json.loads(sys.argv[1]):
    try:
        check(*case)
        found.append("")
    except Exception:
        found.append(traceback.format_exc())
print(json.dumps(found))
"""
CASES = [
    ("qwen3-tied", 70, 1),
    ("qwen3-tied", 70, 4),
    ("llama-rope3", 9, 1),
    ("llama-rope3", 9, 2),
    ("qwen3-mha", 20, 1),
]


@cache
def interpreted() -> dict[tuple[str, int, int], str]:
    """What was wrong in each case, of one process for all: Triton reads its variable when it is imported."""
    root = Path(__file__).parents[4]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)],
        cwd=root,
        env={
            "TRITON_INTERPRET": "1",
            "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(root),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(CASES, json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_fused_step_samples_the_same_tokens(case: tuple[str, int, int]) -> None:
    pytest.importorskip("triton")
    assert interpreted()[case] == ""
