"""What the supervised steps put around their training: data, start, schedule, what they report and what they refuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.sft import GenRmConfig, SftConfig
from nemotron_steps.engine.rollouts.evaluation import Agreement
from nemotron_steps.errors import ConfigError, StepFailedError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import supervised

Open = Callable[[Any], list[Any]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Notes how a module's step opens its policy, and when it is closed."""

    def of(module: Any) -> list[Any]:
        notes: list[Any] = []

        @contextmanager
        def open_policy(cluster: Any, policy: Any, start: Path, loss: Any, **given: Any) -> Iterator[Any]:
            notes.append((str(start), given))
            yield "policy", {"backend": "process"}
            notes.append("closed")

        monkeypatch.setattr(module, "open_policy", open_policy)
        monkeypatch.setattr(module, "ChatFormat", SimpleNamespace(from_folder=lambda *given: "chat"))
        monkeypatch.setattr(module, "hf_folder", lambda folder: folder)
        monkeypatch.setattr(module.placement, "check", lambda config, inputs: None)
        return notes

    return of


def sft(**values: Any) -> SftConfig:
    policy = {"checkpoint": "base", "train_global_batch_size": 4, "train_micro_batch_size": 4}
    return SftConfig.model_validate({"policy": policy, "data": {"train": {"data_path": "t"}}, **values})


def test_training_without_chats_is_refused(opened: Open, tmp_path: Path) -> None:
    notes, config = opened(supervised), sft(data={})
    begun = supervised.trained_on_chats(plain_context(config, tmp_path), config)
    with pytest.raises(ConfigError, match="no training chats"), begun:
        pass
    assert notes == []


def test_the_step_of_fsdp_refuses_another_policy(tmp_path: Path) -> None:
    context = plain_context(sft(), tmp_path, outputs={"model": "checkpoint_hf"})
    with pytest.raises(ConfigError, match="trains with FSDP2") as caught:
        supervised.sft_automodel(context)
    assert caught.value.hints[0] == "policy.dtensor_cfg.enabled=true"


@pytest.mark.parametrize(("given", "missing"), [({}, "policy"), ({"policy": {"checkpoint": "base"}}, "preferences")])
def test_preference_training_asks_for_what_it_lacks(
    given: dict[str, Any], missing: str, opened: Open, tmp_path: Path
) -> None:
    notes = opened(supervised)
    with pytest.raises(ConfigError, match=f"the {missing} input is missing") as caught:
        supervised.dpo(
            plain_context(DpoConfig.model_validate(given), tmp_path, outputs={"model": "checkpoint_megatron"})
        )
    assert (caught.value.where, caught.value.hints, notes) == (missing, (f"--input {missing}=PATH",), [])


@dataclass
class _Policy:
    save_hf: Callable[[Path], None]


class Judged:
    """A judge's training and measuring without a model: what happens, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agreed: int) -> None:
        self.notes: list[Any] = []
        self.records: list[dict[str, Any]] = []
        self._agreed = agreed
        for name in ("trained_on_chats", "build_generator", "measure_agreement", "read_rows"):
            monkeypatch.setattr(supervised, name, getattr(self, name))
        monkeypatch.setattr(supervised, "AsyncSampler", lambda generator: "sampler")
        monkeypatch.setattr(supervised, "GeneratorJudge", lambda *given, **named: ("judge", named["seed"]))

    @contextmanager
    def trained_on_chats(self, context: Any, config: Any) -> Iterator[Any]:
        policy = _Policy(self.save_hf)
        self.policy = weakref.ref(policy)
        yield SimpleNamespace(policy=policy, chat="chat", summary={"loss": 1.0})
        self.notes.append("closed")

    def save_hf(self, folder: Path) -> None:
        self.notes.append(("saved", folder.name))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    def build_generator(self, folder: Path, generation: Any, chat: str, **given: Any) -> None:
        assert self.policy() is None  # its memory is the judge's
        self.notes.append(("generates", folder.name, given["precision"], generation.max_sequences))

    def read_rows(self, path: str) -> list[int]:
        return list(range(30))

    def measure_agreement(self, judge: Any, rows: list[int], *, temperature: float, max_tokens: int) -> Any:
        self.notes.append((judge, len(rows), temperature))
        return Agreement(20, self._agreed, 1), [{"question": str(row)} for row in rows]

    def run(self, tmp_path: Path, **values: Any) -> Any:
        config = GenRmConfig.model_validate({"sft": {"seed": 3, "max_num_steps": 50}, **values})
        outputs = {"reward_model": "checkpoint_hf"}
        context = plain_context(config, tmp_path, outputs=outputs, listener=self.records.append)
        try:
            supervised.genrm(context)
        finally:
            self.attributes = context.outputs["reward_model"].attributes


HELD_OUT = {"data": {"heldout": {"data_path": "h"}}}


def test_a_judge_that_agrees_too_seldom_is_refused_with_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged(monkeypatch, agreed=14)
    with pytest.raises(StepFailedError, match="does not agree") as caught:
        judged.run(tmp_path, **HELD_OUT, agreement={"minimum": 0.75})
    assert caught.value.hints == ("sft.max_num_steps=100", "agreement.minimum=0.70")
    assert (caught.value.expected, caught.value.found) == (
        "at least 0.75",
        "0.700 of 20 pairs (1 replies unreadable)",
    )
