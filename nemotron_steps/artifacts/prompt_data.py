"""Whether a user's file or folder looks like prompts as other trainers have them (type `prompt_data`)."""

from __future__ import annotations

from pathlib import Path

from nemotron_steps.artifacts.rows import read_rows

_TABLES = (".parquet", ".csv", ".tsv", ".json", ".jsonl.gz")
_PROMPTS = frozenset({"prompt", "messages", "conversations", "question", "problem", "instruction", "query"})


def looks_like_prompts(path: Path) -> bool:
    """Whether a path holds rows that data_prep/import_prompts may know: JSON Lines with a prompt's column, or a table.

    What is in a table is looked at by that step.
    """
    lines = [path] if path.suffix == ".jsonl" else sorted(path.rglob("*.jsonl")) if path.is_dir() else []
    for file in lines:
        for _, row in read_rows(file):
            return not _PROMPTS.isdisjoint(row) and not {"chosen", "rejected"} <= row.keys()
    if path.is_file():
        return path.name.lower().endswith(_TABLES) and path.stat().st_size > 0
    names = [file.name for file in path.rglob("*") if file.is_file()]
    return any(name in ("dataset_info.json", "dataset_dict.json") or name.endswith(".parquet") for name in names)
