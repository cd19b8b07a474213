"""What a user's rows look like at a glance: whether an import may read them (types `prompt_data`, `chat_data` and
`pair_data`), who speaks in prompts, and whether they say who grades them."""

from contextlib import suppress
from itertools import islice
from pathlib import Path

from nemotron_steps.artifacts.chat_templates import ROLES
from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import has_pair, prompt_layout, read_chat, read_prompt
from nemotron_steps.rows.lines import Row, read_rows

_TABLES = (".parquet", ".csv", ".tsv", ".json", ".jsonl.gz")
_LOOKED_AT = 64
"""Rows, or files."""
_HEADER_BYTES, _FOOTER_BYTES = 1 << 16, 1 << 24
TOOLS = "tools"


def looks_like(kind: str, path: Path) -> bool:
    """Whether a path holds rows that an import of `kind` may read: JSON Lines by their first row, a table, or a
    folder."""
    row = first_row(path)
    if row is not None and kind == "chat_data":
        with suppress(DataError):
            read_chat(row, "")
            return True
        return False
    if row is not None:
        return has_pair(row) if kind == "pair_data" else bool(prompt_layout(row)[1]) and not has_pair(row)
    if path.is_file():
        return path.name.lower().endswith(_TABLES) and path.stat().st_size > 0
    names = [file.name for file in path.rglob("*") if file.is_file()]
    return any(name in ("dataset_info.json", "dataset_dict.json") or name.lower().endswith(_TABLES) for name in names)


def first_row(path: Path) -> Row | None:
    """The first row of JSON Lines, a file or a folder; None where there is none."""
    files = [path] if path.suffix == ".jsonl" else sorted(path.rglob("*.jsonl")) if path.is_dir() else []
    return next((row for file in files for _, row in read_rows(file)), None)


def roles_in(path: Path) -> tuple[str, ...]:
    """Roles of the messages in the first rows of JSON Lines, as the policy will see them, and TOOLS where a row offers
    some. What is wrong with a row is told by whoever reads all of them."""
    file = path if path.is_file() else next(iter(sorted(path.rglob("*.jsonl"))), path)
    if file.suffix != ".jsonl":
        return ()
    found: set[str] = set()
    with suppress(DataError):
        for _, row in islice(read_rows(file), _LOOKED_AT):
            asked = read_prompt(row, str(file))
            found.update([message["role"] for message in asked.messages], [TOOLS] * bool(asked.tools))
    return tuple(role for role in (*ROLES, TOOLS) if role in found)


def names_no_agent(path: Path) -> bool:
    """Whether rows are seen to name no agent that grades them: JSON Lines by their first row, a table by its columns.

    Of a folder, whether that is so of each file. False where it cannot be told at a glance."""
    if path.is_dir():
        every = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size > 0)
        rows = [file for file in every if file.suffix == ".jsonl"]
        files = rows or [file for file in every if file.suffix in (".parquet", ".csv", ".tsv")]
        return bool(files) and all(names_no_agent(file) for file in files[:_LOOKED_AT])
    if path.suffix == ".jsonl":
        try:
            return any("agent_ref" not in row for _, row in islice(read_rows(path), 1))
        except DataError:
            return False
    if path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        return False
    with path.open("rb") as file:  # columns are named in plain text, in the first line or in the metadata at the end
        start = file.readline(_HEADER_BYTES)
        file.seek(max(0, path.stat().st_size - _FOOTER_BYTES))
        return b"agent_ref" not in start + file.read()
