"""data_prep/palindrome_prompts: seeded prompts for the palindromes environment, in three disjoint files."""

from __future__ import annotations

import json
import random

from pydantic import BaseModel, ConfigDict, PositiveInt

from nemotron_steps.runs.context import StepContext

FILES = {"train": "train-split.jsonl", "validation": "val-split.jsonl", "heldout": "heldout.jsonl"}


class PromptsConfig(BaseModel):
    """The step's config. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: PositiveInt = 512
    validation: PositiveInt = 32
    heldout: PositiveInt = 100
    seed: int = 0


def run(context: StepContext[PromptsConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    rng = random.Random(config.seed)
    words: set[str] = set()
    while len(words) < config.train + config.validation + config.heldout:
        words.add("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 6))))
    left = sorted(words)
    rng.shuffle(left)
    for split, name in FILES.items():
        with (context.outputs["prompts"].path / name).open("w", encoding="utf-8") as file:
            for _ in range(getattr(config, split)):
                text = f"Answer with a palindrome. Use letters of: {left.pop()}"
                row = {
                    "responses_create_params": {"input": [{"role": "user", "content": text}]},
                    "agent_ref": {"type": "responses_api_agents", "name": "palindromes"},
                }
                file.write(json.dumps(row) + "\n")
    context.tracker.summary({f"{split}_prompts": getattr(config, split) for split in FILES})
