"""data_prep/sft_packing: chats tokenised in shards by several processes, and packed window by window into rows of one
length, ahead of training."""

import shutil
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from nemotron_steps.artifacts.checkpoints import chat_template_digest, listing, tokenizer_digest
from nemotron_steps.artifacts.files import remove_tree, storage_errors, to_json_bytes
from nemotron_steps.config.schema.sft import PackingConfig, SftPackingConfig
from nemotron_steps.engine.packing import pack
from nemotron_steps.engine.supervised.chat_tokens import chat_sequences, row_of
from nemotron_steps.errors import ConfigError, fetch_again
from nemotron_steps.models.architecture import hf_folder
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_chat
from nemotron_steps.rows.lines import Row, read_rows
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import ACCOUNTING, REFUSALS, Source, prepare
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowLeftOut
from nemotron_steps.steps.data_prep.blends.sources import data_files
from nemotron_steps.steps.data_prep.blends.splits import FILES, TOKENIZER_FOLDER, Split

METADATA = "metadata.json"
WINDOW_ROWS = 128
WINDOW_TOKENS = 1 << 20
"""Chats are packed among the chats of a window: this many tokens, or this many full rows where that is more."""


def run(context: StepContext[SftPackingConfig]) -> None:
    """Write the `packed` output."""
    packing, slot = context.config.packing, context.outputs["packed"]
    tokenizer = tokenizer_folder(context.config)
    chat = ChatFormat.from_folder(tokenizer)
    encoded = encode(context, tokenizer)
    splits: dict[Split, dict[str, Any]] = {}
    with storage_errors(slot.path):
        for split, name in FILES.items():
            if (encoded / name).is_file():
                context.tracker.event("packing", split=split)
                splits[split] = pack_file(encoded / name, slot.path / name, packing)
        for name in (ACCOUNTING, REFUSALS):
            if (encoded / name).is_file():
                shutil.copyfile(encoded / name, slot.path / name)
        chat.tokenizer.save_pretrained(str(slot.path / TOKENIZER_FOLDER))
        record = {"pack_size": packing.pack_size, "algorithm": packing.algorithm, "splits": splits}
        (slot.path / METADATA).write_bytes(to_json_bytes(record))
    slot.attributes["tokenizer"] = tokenizer_digest(slot.path / TOKENIZER_FOLDER)
    template = chat_template_digest(tokenizer)
    if template is not None:
        slot.attributes["chat_template"] = template
    slot.attributes["pack_size"] = packing.pack_size
    context.tracker.summary({f"{split}_{key}": value for split, told in splits.items() for key, value in told.items()})
    remove_tree(encoded)


def tokenizer_folder(config: SftPackingConfig) -> Path:
    """The folder of the tokenizer that the config names. ConfigError if it names none, or the folder has none."""
    named = config.packing.tokenizer or config.data.tokenizer
    if named is None:
        raise ConfigError(
            "nothing says which tokenizer the chats are for",
            where="packing.tokenizer",
            hints=("packing.tokenizer=PATH",),
        )
    folder = hf_folder(named)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(
            "no tokenizer to pack with",
            where="packing.tokenizer" if config.packing.tokenizer is not None else "data.tokenizer",
            found=f"{named}, which {f'has {listing(folder)}' if folder.exists() else 'does not exist'}",
            hints=("packing.tokenizer=PATH", *fetch_again(Path(named))),
        )
    return folder


def encode(context: StepContext[SftPackingConfig], tokenizer: Path) -> Path:
    """A folder in the work folder with the tokenised chats of each split, each a row of its own."""
    config, folder = context.config, context.work / "encoded"
    if (folder / ACCOUNTING).is_file():  # written last, by an attempt that was killed while it packed
        return folder
    given: dict[Split, str | None] = {
        "train": config.data.train.data_path,
        "validation": config.data.validation.data_path,
    }
    if given["train"] is None:
        raise ConfigError(
            "no training chats", where="data.train.data_path", hints=["--input chats=PATH", "data.train.data_path=PATH"]
        )
    folder.mkdir(exist_ok=True)
    sources = [
        Source(split, data_files(path, key=f"data.{split}.data_path"), split=split)
        for split, path in given.items()
        if path is not None
    ]
    prepare(context, sources, partial(encoded_rows, str(tokenizer), config.packing), folder)
    return folder


def encoded_rows(tokenizer: str, packing: PackingConfig) -> RowFunction:
    """Of chats: each sequence as a packed row that has it alone."""
    chat = ChatFormat.from_folder(tokenizer, packing.chat_template_kwargs)
    size = packing.pack_size

    def become(where: str, row: Row) -> list[Row]:
        read = read_chat(row, where)
        sequences = chat_sequences(chat, read.messages, where, read.beside)
        if any(len(sequence.token_ids) > size for sequence in sequences):
            raise RowLeftOut(f"the chat has more than packing.pack_size = {size} tokens")
        return [row_of([sequence]) for sequence in sequences]

    return become


def pack_file(source: Path, target: Path, packing: PackingConfig) -> dict[str, int | float]:
    """Pack the tokenised chats of a file. Returns counts, and the share of the rows' room that tokens fill."""
    counts = {"sequences": 0, "rows": 0, "tokens": 0, "trained_tokens": 0}
    with target.open("wb", buffering=1 << 20) as out:
        for window in _windows(source, max(WINDOW_TOKENS, WINDOW_ROWS * packing.pack_size)):
            sizes = [len(ids) for ids, _ in window]
            for chosen in pack(packing.algorithm, sizes, packing.pack_size):
                _write([window[place] for place in sorted(chosen)], out)
                counts["rows"] += 1
            counts["sequences"] += len(window)
            counts["tokens"] += sum(sizes)
            counts["trained_tokens"] += sum(sum(mask) for _, mask in window)
    return {**counts, "fill": round(counts["tokens"] / (counts["rows"] * packing.pack_size), 4)}


_Chat = tuple["array[int]", bytes]
"""Token ids and loss mask: five bytes a token, where lists would take forty."""


def _windows(source: Path, tokens: int) -> Iterator[list[_Chat]]:
    window: list[_Chat] = []
    held = 0
    for _, row in read_rows(source):
        window.append((array("i", row["input_ids"]), bytes(row["loss_mask"])))
        held += len(row["input_ids"])
        if held >= tokens:
            yield window
            window, held = [], 0
    if window:
        yield window


def _write(chats: list[_Chat], out: BinaryIO) -> None:
    row: dict[str, list[int]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for ids, mask in chats:
        row["seq_start_id"].append(len(row["input_ids"]))
        row["input_ids"] += ids
        row["loss_mask"] += mask
    out.write(msgspec.json.encode(row) + b"\n")
