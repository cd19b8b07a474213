"""A training step of long answers on one GPU, with torch's attention and with Transformer Engine's.

    python3 -m benchmarks.bench_long_training [--length 4096]      last line JSON

The model of bench_gpu.py, 64 sequences of random tokens that share 8 prompts; each engine in the same process, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from benchmarks.bench_gpu import run_config
from benchmarks.grpo_task import make_large_checkpoint

PROMPTS, MEMBERS, PROMPT, STEPS = 8, 8, 64, 4


def batch_of(length: int):
    """Random tokens, advantages and sampling logprobs."""
    from nemotron_steps.engine.types import TrainBatch

    generator = torch.Generator().manual_seed(0)
    rows, width = PROMPTS * MEMBERS, PROMPT + length
    ids = torch.randint(10, 30_000, (rows, width), generator=generator)
    ids[:, :PROMPT] = ids[::MEMBERS, :PROMPT].repeat_interleave(MEMBERS, 0)
    mask = torch.ones(rows, width)
    mask[:, :PROMPT] = 0
    return TrainBatch(
        input_ids=ids,
        lengths=torch.full((rows,), width),
        token_mask=mask,
        sample_mask=torch.ones(rows),
        generation_logprobs=torch.full((rows, width), -10.4) * mask,
        advantages=torch.randn(rows, 1, generator=generator).expand(rows, width) * mask,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    length = parser.parse_args().length
    from nemotron_steps.config.schema.rl import RlConfig
    from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
    from nemotron_steps.engine.policy.attention import te_attention
    from nemotron_steps.engine.setup.policy_backends import build_policy

    batch, seconds, norms = batch_of(length), {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_large_checkpoint(folder)
        settings = run_config(folder, STEPS, "embedded", new_tokens=length, prompts=PROMPTS, members=MEMBERS)
        config = RlConfig.model_validate(settings)
        for name in ("torch", "transformer_engine"):
            if name == "transformer_engine" and te_attention.load() is None:
                break
            limit = 2**62 if name == "torch" else te_attention.LEAST_WORK
            loss = PolicyGradientLoss(config.loss_fn)
            policy = build_policy(config.policy, folder, loss, reference=False, total_steps=STEPS)
            times, norms[name] = [], []
            with mock.patch.object(te_attention, "LEAST_WORK", limit):
                for _ in range(STEPS):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    norms[name].append(policy.train_step(batch)["grad_norm"])
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - started)
            seconds[name] = statistics.median(times[1:])
            del policy
            torch.cuda.empty_cache()
    print(json.dumps({"length": length, "train_step_s": seconds, "grad_norms": norms}))


if __name__ == "__main__":
    main()
