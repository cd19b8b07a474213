"""Data that a user supplies and that is no artifact as it is: what it looks like, and what makes one of it.

Only the first bytes and the names of files are looked at. Not for artifacts of a recognised type that do not fit a
port: those are `reports`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ArtifactError
from nemotron_steps.manifest.registry import Registry

ROWS = {
    "rl_prompts": '{"prompt": "What is 1 + 1?", "answer": "2"}',
    "sft_chats": '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    "packed_chats": '{"input_ids": [5, 7, 2], "loss_mask": [0, 1, 0], "seq_start_id": [0]}',
    "preference_pairs": '{"prompt": "…", "chosen": "…", "rejected": "…"}',
}
"""What one row of a data set of each type looks like."""

FOREIGN = {"prompt_data": "rl_prompts", "chat_data": "sft_chats", "pair_data": "preference_pairs"}
"""Types of rows as others have them → what an import makes of them."""


def refusal(path: Path, ref: str, wanted: str, registry: Registry) -> ArtifactError:
    """The error for a path that holds no rows that a port of type `wanted` could take.

    Args:
        path: what is there.
        ref: what the user wrote.
    """
    kind, convert = _look(path)
    shape = next((ROWS[name] for name in registry.types.ancestors(wanted) if name in ROWS), None)
    return ArtifactError(
        f"'{ref}' is {kind}, not {wanted}",
        expected=f"JSON Lines: a file or folder of *.jsonl{f', rows like {shape}' if shape is not None else ''}",
        hints=(convert or f"steps types   # what {wanted} is",),
    )


def unknown_rows(ref: str, wanted: str, first: Mapping[str, Any]) -> ArtifactError:
    """The error for rows that no import reads: what the first has, and how the column of a prompt is named."""
    plain = {name: value for name, value in first.items() if re.fullmatch(r"\w[\w.-]*", name)}  # needs no quotes
    texts = [name for name, value in plain.items() if isinstance(value, str | list) and value]
    hints = [
        f"steps run data_prep/import_prompts --input dataset={shlex.quote(ref)} prompt_column={name}"
        "   # then --input prompts=data_prep/import_prompts/prompts"
        for name in texts[:2]
        if wanted == "rl_prompts"
    ]
    what = {"rl_prompts": "a prompt", "sft_chats": "a chat", "preference_pairs": "a pair of answers"}.get(
        wanted, "rows"
    )
    return ArtifactError(
        f"no column of '{ref}' is known to be {what}",
        expected=f"rows like {ROWS[wanted]}, or as TRL, verl, OpenAI or ShareGPT have them",
        found=f"fields {', '.join(sorted(first)) or 'none'}",
        hints=hints or (f"steps types   # what {wanted} is",),
    )


def holds_no_rows(path: Path) -> bool:
    """Whether every JSON Lines file of a path is empty."""
    files = [path] if path.is_file() else path.rglob("*.jsonl")
    return not any(file.is_file() and file.stat().st_size for file in files)


_READ_BY_STEP = "input_path=PATH   # in place of --input: a preparation reads tables by this key"
_COMPRESSED = {".gz": "gzip -dc", ".zst": "zstd -dc", ".bz2": "bzip2 -dc", ".xz": "xz -dc"}


def _look(path: Path) -> tuple[str, str | None]:
    """What a path looks like, and what to do to have its rows read (None where nothing can be done)."""
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        if not names or all(name.endswith(".jsonl") for name in names):
            return ("a folder of empty files" if names else "an empty folder"), None
        if any(name.endswith((".parquet", ".arrow", ".csv")) for name in names):
            return "a folder of tables", _READ_BY_STEP
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return f"a folder of {listed}", None
    with path.open("rb") as file:
        start = file.read(256).lstrip()
    out = f"{path.name.split('.')[0] or 'rows'}.jsonl"
    shown, name = shlex.quote(str(path)), path.name.lower()
    if not start:
        return "an empty file", None
    for suffix, unpack in _COMPRESSED.items():
        if name.endswith(suffix):
            return f"a compressed file ({suffix})", f"{unpack} {shown} > {shlex.quote(out)}"
    line = start.split(b"\n")[0]
    # A line that begins like an object is one where it is whole, or too long to have been read whole.
    if line.startswith(b"{") and (line.rstrip().endswith(b"}") or len(line) > 200):
        return "JSON Lines in a file whose name does not end in .jsonl", f"cp {shown} {shlex.quote(out)}"
    if start.startswith((b"PAR1", b"[")) or name.endswith((".parquet", ".csv", ".tsv")):
        return "a table", _READ_BY_STEP
    return f"a file of another kind ({path.suffix or 'no suffix'})", None
