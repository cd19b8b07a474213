import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.schema.dpo import DpoConfig, DpoTrainConfig
from nemotron_steps.config.schema.rl import CheckpointingConfig
from nemotron_steps.engine.batching import fixed_micro_batches, select_rows, token_budget_micro_batches
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.losses.loss import count_normalizers, finalize_metrics, merge_metric_sums
from nemotron_steps.engine.losses.supervised import DpoLoss
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence
from nemotron_steps.engine.supervised.training import (
    PreferencePair,
    encode_pair,
    optimize_preferences,
    pair_batch,
)
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.tokenizers import train_tokenizer
from tests.models.checkpoints import write_checkpoint
from tests.models.stock_chats import stock_chat


def random_pairs(count: int, seed: int = 0, prefer: int | None = None) -> list[PreferencePair]:
    """Pairs over a 200-token vocabulary; with `prefer`, chosen answers repeat that token and rejected ones never do."""
    g = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        return torch.randint(3, 150, (int(torch.randint(low, high, (), generator=g)),), generator=g).tolist()

    def side(prompt: list[int], answer: list[int]) -> ChatSequence:
        return ChatSequence(prompt + answer, [0] * len(prompt) + [1] * len(answer))

    pairs = []
    for _ in range(count):
        prompt = tokens(3, 12)
        chosen, rejected = tokens(2, 9), tokens(2, 9)
        if prefer is not None:
            chosen = [prefer] * len(chosen)
        pairs.append(PreferencePair(side(prompt, chosen), side(prompt, rejected)))
    return pairs


def scored_batch(count: int = 4, seed: int = 0) -> tuple[Any, torch.Tensor]:
    batch = pair_batch(random_pairs(count, seed))
    g = torch.Generator().manual_seed(seed)
    batch.reference_logprobs = -torch.rand(batch.input_ids.shape, generator=g) * 3
    lp = (-torch.rand(batch.input_ids.shape, generator=g) * 3).requires_grad_()
    return batch, lp


def by_hand(lp: torch.Tensor, batch: Any, c: DpoTrainConfig) -> float:
    total = 0.0
    for k in range(len(batch) // 2):
        delta, nll = [], []
        for row in (2 * k, 2 * k + 1):
            ts = [t for t in range(1, batch.input_ids.shape[1]) if batch.token_mask[row, t] > 0]
            d = sum(lp[row, t].item() - batch.reference_logprobs[row, t].item() for t in ts)
            delta.append(d / len(ts) if c.preference_average_log_probs else d)
            s = -sum(lp[row, t].item() for t in ts)
            nll.append(s / len(ts) if c.sft_average_log_probs else s)
        margin = c.reference_policy_kl_penalty * (delta[0] - delta[1])
        total += c.preference_loss_weight * -math.log(1 / (1 + math.exp(-margin))) + c.sft_loss_weight * nll[0]
    return total / (len(batch) // 2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"preference_average_log_probs": True, "reference_policy_kl_penalty": 1.0},
        {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_loss_weight": 0.5},
    ],
)
def test_the_loss_equals_the_formula_and_its_slope(changes: dict[str, Any]) -> None:
    config = DpoTrainConfig.model_validate(changes)
    batch, lp = scored_batch()
    loss, _ = DpoLoss(config)(lp, batch, count_normalizers(batch))
    assert loss.item() == pytest.approx(by_hand(lp, batch, config), rel=1e-5)
    loss.backward()
    row, t = 1, int(batch.lengths[1]) - 1
    moved = [lp.detach().clone().double() for _ in range(2)]
    moved[0][row, t] += 1e-5
    moved[1][row, t] -= 1e-5
    slope = (by_hand(moved[0], batch, config) - by_hand(moved[1], batch, config)) / 2e-5
    assert lp.grad is not None and lp.grad[row, t].item() == pytest.approx(slope, rel=1e-3, abs=1e-7)
    assert not lp.grad[batch.token_mask == 0].any()


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), seed=st.integers(0, 99))
def test_pairs_are_never_parted_and_the_loss_does_not_depend_on_the_cut(count: int, seed: int) -> None:
    batch, lp = scored_batch(count, seed)
    lengths = batch.lengths.tolist()
    normalizers = count_normalizers(batch)
    whole, sums = DpoLoss(DpoTrainConfig())(lp, batch, normalizers)
    for plan in (
        fixed_micro_batches(len(lengths), 3, unit=2),
        token_budget_micro_batches(lengths, 60, unit=2),
    ):
        assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
        parts = []
        for rows in plan:
            assert [row ^ 1 for row in rows] == [r for k in range(0, len(rows), 2) for r in (rows[k + 1], rows[k])]
            parts.append(DpoLoss(DpoTrainConfig())(lp[rows], select_rows(batch, rows), normalizers))
        assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-5)
        merged = finalize_metrics(merge_metric_sums(part for _, part in parts), normalizers)
        assert merged == pytest.approx(finalize_metrics(sums, normalizers), rel=1e-4, abs=1e-5)


# -- data -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Which tool? ", "none needed"]).save_pretrained(folder)
    return ChatFormat.from_folder(folder)


def trained_text(chat: ChatFormat, sequence: ChatSequence) -> str:
    return chat.decode([t for t, m in zip(sequence.token_ids, sequence.token_mask, strict=True) if m])


def test_only_the_answers_are_trained_whatever_form_they_come_in(chat: ChatFormat) -> None:
    prompt = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "Which tool? "},
    ]
    rejected = {"role": "assistant", "content": "", "tool_calls": [{"name": "made_up", "arguments": {}}]}
    forms = ["none needed", {"role": "assistant", "content": "none needed"}, [*prompt, {"role": "assistant", "content": "none needed"}]]  # fmt: skip  # noqa: E501
    encoded = [encode_pair(chat, {"prompt": prompt, "chosen": c, "rejected": rejected}, "row") for c in forms]
    assert encoded[0] == encoded[1] == encoded[2]
    assert trained_text(chat, encoded[0].chosen) == "none needed"
    assert trained_text(chat, encoded[0].rejected).startswith("<tool_call>")
    pair = encode_pair(chat, {"prompt": "Which tool? ", "chosen": "a", "rejected": "b"}, "row")
    shared = pair.chosen.token_mask.index(1)
    assert pair.chosen.token_ids[:shared] == pair.rejected.token_ids[:shared]


def test_under_a_template_that_rewrites_turns_the_last_is_trained_and_an_answer_of_several_is_refused() -> None:
    chat = stock_chat("qwen3")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nso\n</think>\n\nearlier"}]
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    pair = encode_pair(chat, {"prompt": [*said, said[0]], **answers}, "f:1")
    for side in (pair.chosen, pair.rejected):
        trained = side.token_mask.index(1)
        assert side.token_ids[:trained] == chat.render([*said, said[0]])
        assert chat.decode(side.token_ids[trained:]).strip() in [f"<think>\n\n</think>\n\n{each}" for each in answers]
    longer = {side: [said[1], said[0], *answer] for side, answer in answers.items()}
    with pytest.raises(DataError, match="rewrites a turn of the answer") as caught:
        encode_pair(chat, {"prompt": said[:1], **longer}, "f:1")
    assert (caught.value.where, caught.value.found) == ("f:1", "an answer shown in 2 parts")


# -- the loop on a real policy --------------------------------------------------------------------------------------


class Record:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.events: list[str] = []

    def metrics(self, step: int, values: Any) -> None:
        if step:  # 0: validation before the first one
            self.steps.append(dict(values))

    def event(self, name: str, **fields: Any) -> None:
        self.events.append(name)

    def ignored(self, *given: Any, **more: Any) -> None: ...

    sample = signal = progress = ignored


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo") / "qwen3"
    write_checkpoint("qwen3", folder, initializer_range=0.1)
    return folder


def dpo_config(max_num_steps: int = 4, **policy: Any) -> DpoConfig:
    settings: dict[str, Any] = {
        "precision": "float32",
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "megatron_cfg": {"optimizer": {"lr": 3e-3}},
        **policy,
    }
    return DpoConfig.model_validate(
        {
            "dpo": {"max_num_steps": max_num_steps, "max_num_epochs": 5, "reference_policy_kl_penalty": 0.5},
            "policy": settings,
            "checkpointing": {"save_period": 2},
        }
    )


def run(config: DpoConfig, checkpoint: Path, work: Path, validation: int = 4) -> tuple[dict[str, Any], Record]:
    policy = MegatronPolicy(config.policy, checkpoint, DpoLoss(config.dpo), reference=True)
    record = Record()
    manager = CheckpointManager(work, CheckpointingConfig(save_period=2))
    summary = optimize_preferences(
        policy, random_pairs(12, prefer=7), random_pairs(validation, 1, prefer=7), config, manager, record
    )
    return summary, record


def test_a_policy_learns_the_preference_starting_from_ln_2(checkpoint: Path, tmp_path: Path) -> None:
    summary, record = run(dpo_config(10), checkpoint, tmp_path)
    assert record.steps[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert summary["validation_loss"]["before"] == pytest.approx(math.log(2), abs=1e-6)
    assert summary["validation_accuracy"]["after"] == 1.0
    assert summary["validation_loss"]["after"] < 0.4
    assert record.steps[-1]["rewards_margin"] > 0.5


def test_a_resumed_run_equals_an_unbroken_one(checkpoint: Path, tmp_path: Path) -> None:
    whole, expected = run(dpo_config(4), checkpoint, tmp_path / "whole")
    run(dpo_config(2), checkpoint, tmp_path / "broken")
    resumed, found = run(dpo_config(4), checkpoint, tmp_path / "broken")
    assert found.events == ["resumed"]
    assert [s["loss"] for s in found.steps] == [s["loss"] for s in expected.steps[2:]]
    assert resumed == whole
