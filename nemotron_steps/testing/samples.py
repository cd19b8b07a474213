"""Small data sets of the built-in types of rows, for ports that a kit was given nothing for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = 8
PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\xff\xfe" * 8
"""What no file of rows or of text begins with."""


def cut(data: bytes) -> bytes:
    """The first part of a file's bytes: it ends in the middle of something."""
    return data[: max(1, len(data) * 2 // 3 - 3)]


def _rows(type_name: str) -> list[dict[str, Any]] | None:
    numbers = range(1, ROWS + 1)
    question = [f"What is {n} + {n}?" for n in numbers]
    if type_name == "training_jsonl":
        return [{"text": f"{text} It is {2 * n}."} for n, text in zip(numbers, question, strict=True)]
    if type_name == "sft_chats":
        return [
            {
                "messages": [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": f"It is {2 * n}."},
                ]
            }
            for n, text in zip(numbers, question, strict=True)
        ]
    if type_name == "packed_chats":
        return [{"input_ids": [n, 2, 3, n, 4], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]} for n in numbers]
    if type_name == "preference_pairs":
        return [
            {"prompt": text, "chosen": f"It is {2 * n}.", "rejected": f"It is {2 * n + 1}."}
            for n, text in zip(numbers, question, strict=True)
        ]
    if type_name == "rl_prompts":
        return [
            {
                "responses_create_params": {"input": [{"role": "user", "content": text}]},
                "question": text,
                "expected_answer": str(2 * n),
                "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
            }
            for n, text in zip(numbers, question, strict=True)
        ]
    return None


def write_sample(type_name: str, folder: Path) -> Path | None:
    """Write a data set of a built-in type into `folder`; None for a type that there is no sample of."""
    if type_name == "eval_report":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps({"metrics": {"accuracy": 0.5}}))
        return folder
    rows = _rows(type_name)
    if rows is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
