"""Rows packed ahead of training: what is read of them is what was packed, and training on them is what it was."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.packing import pack
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, PackedRow, PackedRows, chats_of, row_of
from nemotron_steps.engine.supervised.loop import batch_of
from nemotron_steps.errors import DataError
from tests.models.checkpoints import write_checkpoint

SIZE = 32
VOCABULARY = 64


def chats(count: int) -> list[ChatSequence]:
    rng = random.Random(3)
    made = []
    for _ in range(count):
        asked, said = rng.randint(1, 9), rng.randint(1, 14)
        ids = [rng.randrange(VOCABULARY) for _ in range(asked + said)]
        made.append(ChatSequence(ids, [0] * asked + [1] * said))
    return made


def rows_of(given: list[ChatSequence]) -> list[list[ChatSequence]]:
    packed = pack("modified_first_fit_decreasing", [len(chat.token_ids) for chat in given], SIZE)
    return [[given[place] for place in sorted(row)] for row in packed]


def written(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def opened(file: Path, *, max_length: int = SIZE) -> PackedRows:
    return PackedRows(file, max_length=max_length, vocabulary=VOCABULARY)


def test_what_is_read_is_what_was_packed(tmp_path: Path) -> None:
    rows = rows_of(chats(40))
    assert len(rows) < 25 and max(len(row) for row in rows) > 2
    for row in rows:
        assert list(chats_of(row_of(row))) == row
    found = opened(written(tmp_path / "train.jsonl", [row_of(row) for row in rows]))
    assert [list(row.chats) for row in found] == rows and [list(row.chats) for row in found[3:5]] == rows[3:5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "qwen3"
    write_checkpoint("qwen3", folder, initializer_range=0.1)
    return folder


def stepped(policy: Any, examples: list[Any]) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
    """Metrics of a training step, weights after it, and what the policy says of the batch then."""
    batch = batch_of(examples)
    metrics = policy.train_step(batch)
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    return {name: metrics[name] for name in ("loss", "grad_norm")}, weights, policy.logprobs(batch)


def megatron(checkpoint: Path, algorithm: str) -> MegatronPolicy:
    packing = {"enabled": True, "train_mb_tokens": SIZE, "logprob_mb_tokens": SIZE, "algorithm": algorithm}
    settings = {"precision": "float32", "sequence_packing": packing, "megatron_cfg": {"optimizer": {"lr": 1e-3}}}
    return MegatronPolicy(PolicyConfig.model_validate(settings), checkpoint, NegativeLogLikelihood())


def test_megatron_steps_on_packed_rows_bit_for_bit_as_on_chats_that_it_packs_itself(checkpoint: Path) -> None:
    given = chats(40)
    rows = rows_of(given)
    metrics, weights, said = stepped(megatron(checkpoint, "modified_first_fit_decreasing"), given)
    found = stepped(megatron(checkpoint, "concatenative"), [PackedRow(tuple(row)) for row in rows])
    assert found[0] == metrics and metrics["grad_norm"] > 0
    assert all(torch.equal(found[1][name], tensor) for name, tensor in weights.items())
    order = [given.index(chat) for row in rows for chat in row]
    assert torch.equal(found[2], said[order])


def test_a_policy_that_pads_has_the_same_loss_and_gradient(checkpoint: Path) -> None:
    given = chats(12)
    settings = {
        "precision": "float32",
        "dtensor_cfg": {"enabled": True},
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 128, "logprob_mb_tokens": 128},
        "optimizer": {"kwargs": {"lr": 1e-3}},
    }
    found = []
    for examples in (given, [PackedRow(tuple(row)) for row in rows_of(given)]):
        policy = DTensorPolicy(PolicyConfig.model_validate(settings), checkpoint, NegativeLogLikelihood())
        found.append(stepped(policy, examples))
    (metrics, weights, _), (packed_metrics, packed_weights, _) = found
    assert packed_metrics == pytest.approx(metrics, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(packed_weights[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"input_ids": []}, "non-empty list of token ids"),
        ({"input_ids": [1, 2, 3, -1]}, "non-empty list of token ids"),
        ({"input_ids": [1, 2, 3, True]}, "non-empty list of token ids"),
        ({"loss_mask": [0, 1]}, "for each of `input_ids`"),
        ({"loss_mask": [0, 1, 1, 2]}, "for each of `input_ids`"),
        ({"loss_mask": [[0], [1], [1], [0]]}, "for each of `input_ids`"),
        ({"loss_mask": [0, 1, 1, {}]}, "for each of `input_ids`"),
        ({"seq_start_id": [1, 2]}, "begins with 0"),
        ({"seq_start_id": [0, 2, 2]}, "must rise"),
        ({"seq_start_id": [0, 4]}, "end before the last"),
        ({"seq_start_id": []}, "begins with 0"),
        ({"input_ids": [1, 2, 3, VOCABULARY]}, "packed with another tokenizer"),
    ],
)
def test_a_row_that_is_none_is_named_before_training_begins(tmp_path: Path, changed: Any, problem: str) -> None:
    good = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0], "seq_start_id": [0, 2]}
    file = written(tmp_path / "train.jsonl", [good, {**good, **changed}])
    with pytest.raises(DataError, match=problem) as caught:
        opened(file)
    assert str(caught.value.where).startswith(f"{file}:2")
