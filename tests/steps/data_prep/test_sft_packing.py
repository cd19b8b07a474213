"""Packed chats: every chat once, the same bytes however the work was cut, and training that reads them."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.sft import SftConfig, SftPackingConfig
from nemotron_steps.engine.supervised.chat_tokens import chats_of
from nemotron_steps.engine.supervised.training import read_chats
from nemotron_steps.errors import ConfigError, DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.tokenizers import save_tokenizer, train_tokenizer
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import supervised
from nemotron_steps.steps.data_prep import sft_packing
from nemotron_steps.steps.data_prep.blends import formats
from tests.steps.data_prep.blends.conftest import write_lines

SIZE = 48


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 60 training and 8 validation chats, of 12 tokens to more than a row has, and their tokenizer."""
    folder, rng = tmp_path_factory.mktemp("chats"), random.Random(5)
    save_tokenizer(train_tokenizer(["one two three four"] * 3), folder / "tokenizer")
    for split, count in (("train", 60), ("validation", 8)):
        rows = []
        for number in range(count):
            words = [["one", "two", "three", "four"][rng.randrange(4)] for _ in range(rng.randint(1, 14))]
            said = [
                {"role": "user", "content": f"{split[0]}{number}"},
                {"role": "assistant", "content": " ".join(words)},
            ]
            rows.append({"messages": said})
        write_lines(folder / f"{split}.jsonl", rows)
    return folder


def config_of(chats: Path, **settings: Any) -> SftPackingConfig:
    data = {split: {"data_path": str(chats / f"{split}.jsonl")} for split in ("train", "validation")}
    return SftPackingConfig.model_validate(
        {
            "data": {**data, "tokenizer": str(chats / "tokenizer")},
            "packing": {"pack_size": SIZE},
            "num_workers": 1,
            **settings,
        }
    )


def packed(config: SftPackingConfig, folder: Path) -> Path:
    context = plain_context(config, folder, outputs={"packed": "packed_chats"})
    sft_packing.run(context)
    assert context.outputs["packed"].attributes["pack_size"] == config.packing.pack_size
    return context.outputs["packed"].path


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def done(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(config_of(chats), tmp_path_factory.mktemp("packed"))


def test_every_chat_that_fits_is_in_one_row_as_training_would_read_it(chats: Path, done: Path) -> None:
    told = json.loads((done / "metadata.json").read_text())
    accounts = json.loads((done / "accounting.json").read_text())
    assert (told["pack_size"], told["algorithm"]) == (SIZE, "modified_first_fit_decreasing")
    left_out = 0
    for split in ("train", "validation"):
        expected, _, too_long = read_chats(chats / f"{split}.jsonl", ChatFormat.from_folder(chats / "tokenizer"), SIZE)
        rows = rows_of(done / f"{split}.jsonl")
        found = [chat for row in rows for chat in chats_of(row)]
        assert Counter(map(repr, found)) == Counter(map(repr, expected))
        assert all(len(row["input_ids"]) <= SIZE for row in rows)
        tokens, trained = (sum(map(len, (c.token_ids for c in found))), sum(sum(c.token_mask) for c in found))
        fill = round(tokens / (len(rows) * SIZE), 4)
        counts = {"sequences": len(found), "rows": len(rows), "tokens": tokens, "trained_tokens": trained, "fill": fill}
        assert told["splits"][split] == counts
        left_out += too_long
    assert told["splits"]["train"]["fill"] > 0.85 and left_out > 0
    assert accounts["left_out_by_reason"] == {f"the chat has more than packing.pack_size = {SIZE} tokens": left_out}


def test_parts_of_any_size_give_the_same_bytes(
    chats: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "PART_BYTES", 700)
    again = packed(config_of(chats), tmp_path)
    for name in ("train.jsonl", "validation.jsonl", "metadata.json"):
        assert (again / name).read_bytes() == (done / name).read_bytes()


def test_a_step_killed_while_it_packed_does_not_tokenise_again(
    chats: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(sft_packing, "pack_file", killed)
        packed(config_of(chats), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sft_packing, "chat_sequences", killed)
        again = packed(config_of(chats), tmp_path)
    assert (again / "train.jsonl").read_bytes() == (done / "train.jsonl").read_bytes()
    assert not any((tmp_path / "work").rglob("*.jsonl"))


def test_a_broken_chat_is_named_and_nothing_to_pack_says_why(chats: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="every one was left out") as caught:
        packed(config_of(chats, packing={"pack_size": 4}), tmp_path / "small")
    assert "more than packing.pack_size = 4 tokens" in str(caught.value.found)
    assert caught.value.hints[0].startswith("sed -n 1p "), "a row that was left out"
    file = write_lines(tmp_path / "train.jsonl", [{"messages": []}])
    with pytest.raises(DataError, match="`messages` must be a non-empty list") as caught:
        packed(
            config_of(chats, data={"train": {"data_path": str(file)}, "tokenizer": str(chats / "tokenizer")}), tmp_path
        )
    assert caught.value.where == f"{file}:1 field messages"
    given = {"train": {"data_path": str(file)}, "tokenizer": str(chats / "tokenizer")}
    with pytest.raises(ConfigError, match="no tokenizer to pack with") as caught:
        packed(config_of(chats, data=given, packing={"tokenizer": "ORG/NAME"}), tmp_path)
    assert (caught.value.where, caught.value.found) == ("packing.tokenizer", "ORG/NAME, which does not exist")
    assert caught.value.hints[0] == "packing.tokenizer=PATH"
    with pytest.raises(ConfigError, match="which tokenizer"):
        packed(config_of(chats, data={"train": {"data_path": str(file)}}), tmp_path)


def test_a_chat_that_the_template_refuses_is_named_and_counts_as_refused(chats: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(chats / "tokenizer", tokenizer)
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    template = tokenizer / "chat_template.jinja"
    template.write_text(strict + template.read_text())
    system = {"role": "system", "content": "be kind"}
    good = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    file = write_lines(tmp_path / "train.jsonl", [{"messages": m} for m in (good, [system, good[1]], good[1:])])
    data = {"train": {"data_path": str(file)}, "tokenizer": str(tokenizer)}
    with pytest.raises(DataError, match="the chat template refuses the chat") as caught:
        packed(config_of(chats, data=data), tmp_path / "all")
    assert (caught.value.where, caught.value.found) == (f"{file}:2", "roles must alternate")
    done = packed(config_of(chats, data=data, max_refused_share=0.7), tmp_path / "half")
    assert json.loads((done / "metadata.json").read_text())["splits"]["train"]["sequences"] == 1


@pytest.mark.parametrize("step", [supervised.sft_megatron_bridge, supervised.sft_automodel])
def test_both_ways_of_fine_tuning_train_on_packed_rows(step: Any, done: Path, tmp_path: Path) -> None:
    dtensor = step is supervised.sft_automodel
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    kind = "dynamic_batching" if dtensor else "sequence_packing"
    rate = {"optimizer": {"kwargs": {"lr": 1e-2}}} if dtensor else {"megatron_cfg": {"optimizer": {"lr": 1e-2}}}
    config = SftConfig.model_validate(
        {
            "from_scratch": {**shape, "num_attention_heads": 4, "num_key_value_heads": 4},
            "sft": {"max_num_epochs": 3},
            "policy": {
                "precision": "float32",
                "train_global_batch_size": 8,
                "max_total_sequence_length": SIZE,
                "dtensor_cfg": {"enabled": dtensor},
                kind: {"enabled": True, "train_mb_tokens": 4 * SIZE},
                **rate,
            },
            "data": {
                "train": {"data_path": str(done / "train.jsonl")},
                "validation": {"data_path": str(done / "validation.jsonl")},
                "tokenizer": str(done / "tokenizer"),
            },
            "checkpointing": {"enabled": False},
        }
    )
    records: list[dict[str, Any]] = []
    step(plain_context(config, tmp_path, outputs={"model": "checkpoint_hf"}, listener=records.append))
    summary = next(record["values"] for record in records if record["kind"] == "summary")
    assert summary["steps"] == 3 * (len(rows_of(done / "train.jsonl")) // 8)  # rows, not chats, make a batch
    assert summary["validation_loss"]["after"] < summary["validation_loss"]["before"] - 0.1
