"""The supervised loop on a real policy: it learns, and a resumed run ends like an unbroken one."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.supervised.chat_tokens import chat_sequences
from nemotron_steps.engine.supervised.training import finetune, read_chats
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.tokenizers import train_tokenizer
from nemotron_steps.runs.context import Tracker
from tests.engine.supervised.test_dpo import random_pairs
from tests.models.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft") / "qwen3"
    write_checkpoint("qwen3", folder, initializer_range=0.1)
    return folder


def run(
    steps: int, checkpoint: Path, work: Path, megatron: dict[str, Any] | None = None, **sft: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary, and the metrics of each step, of step 0 first."""
    config = SftConfig.model_validate(
        {
            "sft": {"max_num_steps": steps, "max_num_epochs": 5, **sft},
            "policy": {
                "precision": "float32",
                "train_global_batch_size": 4,
                "train_micro_batch_size": 4,
                "megatron_cfg": {"optimizer": {"lr": 3e-3}, **(megatron or {})},
            },
            "checkpointing": {"save_period": 2},
        }
    )
    policy = MegatronPolicy(config.policy, checkpoint, NegativeLogLikelihood())
    chats, unseen = ([pair.chosen for pair in random_pairs(n, seed, prefer=7)] for n, seed in ((12, 0), (4, 1)))
    records: list[dict[str, Any]] = []
    with CheckpointManager(work, config.checkpointing) as manager:
        summary = finetune(policy, chats, unseen, config, manager, Tracker("test", None, records.append))
    return summary, [r["values"] for r in records if r["kind"] == "metrics"]


def test_it_learns_and_a_resumed_run_equals_an_unbroken_one(checkpoint: Path, tmp_path: Path) -> None:
    whole, expected = run(4, checkpoint, tmp_path / "whole")
    loss = whole["validation_loss"]
    assert loss["after"] < loss["before"]
    assert [step.get("validation_loss") for step in expected] == [loss["before"], None, None, None, loss["after"]]
    run(2, checkpoint, tmp_path / "broken")
    resumed, found = run(4, checkpoint, tmp_path / "broken")
    assert found[0] == expected[0]
    assert [m["loss"] for m in found[1:]] == [m["loss"] for m in expected[3:]]
    assert resumed == whole


def test_chats_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["hi there"] * 3)
    chat, file = ChatFormat(tokenizer), tmp_path / "train.jsonl"

    def read(*texts: str | None, most: int = 40) -> tuple[int, int]:
        chats = [
            {"messages": text and [{"role": "user", "content": text}, {"role": "assistant", "content": "hi"}]}
            for text in texts
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in chats))
        sequences, _, too_long = read_chats(file, chat, most)
        return len(sequences), too_long

    exact = len(
        chat_sequences(chat, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}], "", {})[
            -1
        ].token_ids
    )
    assert read("hi", "hi " * 40, "hi", most=exact) == (2, 1)
    with pytest.raises(DataError, match="all 2 chats are longer") as caught:
        read("hi", "hi", most=exact - 1)
    assert caught.value.hints == (f"policy.max_total_sequence_length={exact}",)
    with pytest.raises(DataError, match="`messages` must be a non-empty list") as caught:
        read("hi", None)
    assert caught.value.where == f"{file}:2 field messages"
