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
from nemotron_steps.resolver.advice import steps_between

ROWS = {
    "rl_prompts": '{"responses_create_params": {"input": [{"role": "user", "content": "…"}]}, "agent_ref": {"name": '
    '"AGENT"}, FIELDS OF ITS ENVIRONMENT}',
    "sft_chats": '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    "packed_chats": '{"input_ids": [5, 7, 2], "loss_mask": [0, 1, 0], "seq_start_id": [0]}',
    "preference_pairs": '{"prompt": "…", "chosen": "…", "rejected": "…"}',
}
"""What one row of a data set of each type looks like."""

_FROM_CSV = "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin{tab})]"
_FROM_LIST = "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]"
_FROM_PARQUET = (
    "import json, sys, pyarrow.parquet as pq; "
    "[print(json.dumps(row, default=str)) for row in pq.read_table(sys.argv[1]).to_pylist()]"
)
_FROM_SAVED = "import sys, datasets; datasets.load_from_disk(sys.argv[1]){split}.to_json(sys.argv[2])"


def refusal(path: Path, ref: str, wanted: str, registry: Registry) -> ArtifactError:
    """The error for a path that holds no rows that a port of type `wanted` could take.

    Args:
        path: what is there.
        ref: what the user wrote.
    """
    kind, convert = _look(path)
    shape = next((ROWS[name] for name in registry.types.ancestors(wanted) if name in ROWS), None)
    hints: list[str] = []
    if convert is not None:
        made = _jsonl_name(path)
        hints.append(convert)
        hints += [
            f"steps run {step} --input {port}={made}   # makes {wanted} of such rows"
            for step, port in steps_between(registry, "training_jsonl", wanted, limit=1)
        ]
    return ArtifactError(
        f"'{ref}' is {kind}, not {wanted}",
        expected=f"JSON Lines: a file or folder of *.jsonl{f', rows like {shape}' if shape is not None else ''}",
        hints=hints or (f"steps types   # what {wanted} is",),
    )


def unknown_prompts(ref: str, first: Mapping[str, Any]) -> ArtifactError:
    """The error for rows none of whose columns is known to be a prompt: what the first has, and how one is named."""
    texts = [name for name, value in first.items() if isinstance(value, str | list) and value and _plain(name)]
    hints = [
        f"steps run data_prep/import_prompts --input dataset={shlex.quote(ref)} prompt_column={name}"
        "   # then --input prompts=data_prep/import_prompts/prompts"
        for name in texts[:2]
    ]
    return ArtifactError(
        f"no column of '{ref}' is known to be a prompt",
        expected='rows like {"prompt": "What is 1 + 1?", "answer": "2"}: TRL\'s, verl\'s, OpenAI\'s or NeMo-Gym\'s',
        found=f"fields {', '.join(sorted(first)) or 'none'}",
        hints=hints or ("steps types   # what rl_prompts and prompt_data are",),
    )


def _plain(name: str) -> bool:
    """Whether a name can stand as the value of an override without quotes."""
    return re.fullmatch(r"\w[\w.-]*", name) is not None


def holds_no_rows(path: Path) -> bool:
    """Whether every JSON Lines file of a path is empty."""
    files = [path] if path.is_file() else path.rglob("*.jsonl")
    return not any(file.is_file() and file.stat().st_size for file in files)


_COMPRESSED = {".gz": "gzip -dc", ".zst": "zstd -dc", ".bz2": "bzip2 -dc", ".xz": "xz -dc"}


def _look(path: Path) -> tuple[str, str | None]:
    """What a path looks like, and a command that makes JSON Lines of it (None where there is none)."""
    out = _jsonl_name(path)
    if path.is_dir():
        return _look_into(path, out)
    with path.open("rb") as file:
        start = file.read(256)
    shown, name = shlex.quote(str(path)), path.name.lower()
    if not start.strip():
        return "an empty file", None
    if start.startswith(b"PAR1") or name.endswith(".parquet"):
        return "a Parquet file", _from_parquet(shown, out)
    for suffix, unpack in _COMPRESSED.items():
        if name.endswith(suffix):
            return f"a compressed file ({suffix})", f"{unpack} {shown} > {out}"
    if start.lstrip().startswith(b"{") and _is_object(start.lstrip().split(b"\n")[0]):
        return "JSON Lines in a file whose name does not end in .jsonl", f"cp {shown} {out}"
    if start.lstrip().startswith(b"["):
        return "a JSON list", f"python -c {shlex.quote(_FROM_LIST)} < {shown} > {out}"
    if name.endswith((".csv", ".tsv")):
        tab = ", delimiter='\\t'" if name.endswith(".tsv") else ""
        program = shlex.quote(_FROM_CSV.format(tab=tab))
        return f"a {'TSV' if tab else 'CSV'} file", f"python -c {program} < {shown} > {out}"
    return f"a file of another kind ({path.suffix or 'no suffix'})", None


def _is_object(line: bytes) -> bool:
    """Whether a line that begins like an object may be one: it is whole, or too long to have been read whole."""
    return line.rstrip().endswith(b"}") or len(line) > 200


def _look_into(path: Path, out: str) -> tuple[str, str | None]:
    shown = shlex.quote(str(path))
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    if not names:
        return "an empty folder", None
    if all(name.endswith(".jsonl") for name in names):
        return "a folder of empty files", None
    if "dataset_dict.json" in names:
        program = _FROM_SAVED.format(split="[sys.argv[3]]")
        convert = _with_package("datasets", program, f"{shown} {out} train")
        return "a data set that `datasets` saved, with splits", convert
    if "dataset_info.json" in names and any(name.endswith(".arrow") for name in names):
        program = _FROM_SAVED.format(split="")
        return "a data set that `datasets` saved", _with_package("datasets", program, f"{shown} {out}")
    if any(name.endswith(".parquet") for name in names):
        return "a folder of Parquet files", _from_parquet(shown, out)
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"a folder of {listed}", None


def _from_parquet(shown: str, out: str) -> str:
    return _with_package("pyarrow", _FROM_PARQUET, f"{shown} > {out}")


def _with_package(package: str, program: str, arguments: str) -> str:
    return f"pip install {package} && python -c {shlex.quote(program)} {arguments}"


def _jsonl_name(path: Path) -> str:
    """A file of the working directory for the JSON Lines made of `path`."""
    stem = path.name.split(".")[0] or "rows"
    return shlex.quote(f"{stem}.jsonl")
