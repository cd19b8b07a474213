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


def _samples(n: int) -> dict[str, dict[str, Any]]:
    """Type → its n-th row."""
    question, answer = f"What is {n} + {n}?", f"It is {2 * n}."
    return {
        "training_jsonl": {"text": f"{question} {answer}"},
        "sft_chats": {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
        "packed_chats": {"input_ids": [n, 2, 3, n, 4], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]},
        "preference_pairs": {"prompt": question, "chosen": answer, "rejected": f"It is {2 * n + 1}."},
        "rl_prompts": {
            "responses_create_params": {"input": [{"role": "user", "content": question}]},
            "question": question,
            "expected_answer": str(2 * n),
            "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
        },
    }


def write_sample(type_name: str, folder: Path) -> Path | None:
    """Write a data set of a built-in type into `folder`; None for a type that there is no sample of."""
    texts: dict[str, str] = {}
    if type_name == "eval_report":
        texts["report.json"] = json.dumps({"metrics": {"accuracy": 0.5}})
    elif type_name in _samples(1):
        rows = "".join(json.dumps(_samples(n)[type_name]) + "\n" for n in range(1, ROWS + 1))
        texts = {"train.jsonl": rows, "validation.jsonl": rows}
    else:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
