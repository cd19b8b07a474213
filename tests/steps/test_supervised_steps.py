"""What the supervised steps put around their training: data, start, schedule, what they report and what they refuse."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.genrm import GenRmConfig
from nemotron_steps.config.schema.sft import SftConfig
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


@pytest.mark.parametrize(
    ("rows", "most", "epochs", "total"), [(10, 99, 2, 4), (10, 3, 2, 3), (8, 99, 1, 2), (7, 99, 1, 1)]
)
def test_a_schedule_is_as_long_as_the_whole_batches_of_its_epochs(
    rows: int, most: int, epochs: int, total: int, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = opened(supervised)
    monkeypatch.setattr(supervised, "_read_examples", lambda path, chat, limit: ([path] * rows, rows, 0))
    monkeypatch.setattr(supervised, "finetune", lambda *given: {"steps": given[1:3]})
    config = sft(sft={"max_num_steps": most, "max_num_epochs": epochs})
    with supervised.trained_on_chats(plain_context(config, tmp_path), config) as trained:
        assert notes == [("base", {"reference": False, "total_steps": total})]  # and it is open still
        assert (trained.policy, trained.chat, trained.summary) == ("policy", "chat", {"steps": (["t"] * rows, [])})
    assert notes[-1] == "closed"


@pytest.mark.parametrize("too_long", [0, 2])
def test_chats_that_are_too_long_to_train_on_are_counted_and_those_to_validate_on_are_read(
    too_long: int, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(supervised)
    monkeypatch.setattr(
        supervised, "_read_examples", lambda path, chat, limit: ([path] * 4, 4, too_long if path == "t" else 7)
    )
    monkeypatch.setattr(supervised, "finetune", lambda *given: {"validation": given[2]})
    config = sft(data={"train": {"data_path": "t"}, "validation": {"data_path": "v"}})
    records: list[dict[str, Any]] = []
    with supervised.trained_on_chats(plain_context(config, tmp_path, listener=records.append), config) as trained:
        assert trained.summary == {"validation": ["v"] * 4}
    events = {record["name"]: record["fields"] for record in records if record["kind"] == "event"}
    limit = config.policy.max_total_sequence_length
    left_out = {"chats_left_out": {"longer_than": limit, "count": 2}} if too_long else {}
    assert events == {**left_out, "placement": {"backend": "process"}}


def test_training_without_chats_is_refused(opened: Open, tmp_path: Path) -> None:
    notes, config = opened(supervised), sft(data={})
    begun = supervised.trained_on_chats(plain_context(config, tmp_path), config)
    with pytest.raises(ConfigError, match="no training chats"), begun:
        pass
    assert notes == []


def test_a_new_model_is_made_once_of_its_shape_tokenizer_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def initialize(shape: Any, tokenizer: Path, target: Path, seed: int) -> None:
        made.append((shape, str(tokenizer), seed))
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(supervised, "initialize_checkpoint", initialize)
    data, alone = {"tokenizer": "tok", "train": {"data_path": "t"}}, {"policy": {"checkpoint": None}}
    config = sft(**alone, from_scratch={"num_hidden_layers": 3}, data=data, sft={"seed": 7})
    context = plain_context(config, tmp_path)
    assert [supervised._starting_checkpoint(context, config) for _ in range(2)] == [context.work / "initial"] * 2
    assert made == [(config.from_scratch, "tok", 7)]
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        supervised._starting_checkpoint(context, sft(**alone, from_scratch={}))
    with pytest.raises(ConfigError, match="nothing to train"):
        supervised._starting_checkpoint(context, sft(**alone))
    assert supervised._starting_checkpoint(context, sft(from_scratch={})) == Path("base")


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


def test_preferences_are_trained_on_against_the_policy_as_it_was(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, saved = opened(supervised), []
    monkeypatch.setattr(supervised, "read_pairs", lambda path, chat, limit: ([path] * 9, {"t": 2, "v": 5}[path]))
    monkeypatch.setattr(supervised, "total_steps", lambda settings, batch_size, pairs: pairs + 1)
    monkeypatch.setattr(supervised, "optimize_preferences", lambda *given: {"trained": given[1], "validated": given[2]})
    monkeypatch.setattr(supervised, "save_trained", lambda *given, port: saved.append((*given, port, notes[-1])))
    data = {"train": {"data_path": "t"}, "validation": {"data_path": "v"}}
    config = DpoConfig.model_validate({"policy": {"checkpoint": "base"}, "data": data})
    records: list[dict[str, Any]] = []
    context = plain_context(config, tmp_path, outputs={"model": "checkpoint_megatron"}, listener=records.append)
    supervised.dpo(context)
    assert notes == [("base", {"reference": True, "total_steps": 10}), "closed"]
    assert saved == [("policy", context, "base", "policy", notes[0])]  # while it is open
    (left_out, _) = [record["fields"] for record in records if record["kind"] == "event"]
    assert left_out == {"longer_than": config.policy.max_total_sequence_length, "count": 2}
    (summary,) = [record["values"] for record in records if record["kind"] == "summary"]
    assert summary == {"trained": ["t"] * 9, "validated": ["v"] * 9}


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


def test_a_judge_is_measured_on_held_out_pairs_once_its_policy_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged(monkeypatch, agreed=15)
    judged.run(tmp_path, **HELD_OUT, agreement={"minimum": 0.75, "max_pairs": 20, "temperature": 0.5})
    assert judged.notes == [
        *(("saved", "reward_model"), "closed", ("generates", "reward_model", "bfloat16", 20), (("judge", 3), 20, 0.5))
    ]
    assert judged.attributes == {"heldout_agreement": 0.75}  # and no layout, of no rows
    assert [r["sample"]["question"] for r in judged.records if r["kind"] == "sample"] == [str(n) for n in range(8)]
    (summary,) = [record["values"] for record in judged.records if record["kind"] == "summary"]
    assert summary == {"loss": 1.0, "heldout_agreement": 0.75, "heldout_pairs": 20, "heldout_unparsed": 1}


@pytest.mark.parametrize(("asked", "layout"), [("user", "plain"), ("response_1", "roles")])
def test_how_a_judge_was_asked_in_training_is_recorded(
    asked: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": asked, "content": "y"}]}))
    judged = Judged(monkeypatch, agreed=15)
    judged.run(tmp_path, data={"train": {"data_path": str(rows)}})
    assert judged.attributes == {"comparison_layout": layout}
    rows.write_text(json.dumps({"input_ids": [1], "loss_mask": [0], "seq_start_id": [0]}))
    judged.run(tmp_path, data={"train": {"data_path": str(rows)}})
    assert judged.attributes == {}


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


def test_a_judge_without_held_out_pairs_is_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(monkeypatch, agreed=0)
    judged.run(tmp_path, agreement={"minimum": 0.75})
    assert judged.notes == [("saved", "reward_model"), "closed"] and judged.attributes == {}
    assert [record["values"] for record in judged.records if record["kind"] == "summary"] == [{"loss": 1.0}]
