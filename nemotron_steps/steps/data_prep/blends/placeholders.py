"""Rows of public blends that only point to a question of DAPO-Math-17k or Skywork-OR1-RL-Data, filled in:
`{"_hf_placeholder": {"row": n, "question_template": ...}, "dataset": ...}`.

The questions are put in a table on disk when the first placeholder is met.
"""

import errno
import fcntl
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import storage_errors
from nemotron_steps.errors import ConfigError, DataError, show_line
from nemotron_steps.rows.lines import Row, parse_row
from nemotron_steps.steps.data_prep.blends.formats import lines_of, parts_of
from nemotron_steps.steps.data_prep.blends.sources import data_files
from nemotron_steps.waiting import waiting

PLACEHOLDER = "_hf_placeholder"
_SPLITS = {"dapo": "train", "skywork": "math"}
"""Word in a row's `dataset` → split of the data set that it stands for."""


@dataclass
class PlaceholderFiller:
    """Fills rows. One in each process: it can be pickled as long as it filled none.

    Where the questions are, a folder with copies of hub data sets, and a folder for the tables.
    """

    sources: Mapping[str, str]
    mirror: str | None
    folder: str
    _tables: dict[str, sqlite3.Connection] = field(default_factory=dict, init=False)

    def fill(self, row: Row, where: str) -> Row:
        """The row with question, answer and prompt in it."""
        pointer = row[PLACEHOLDER]
        if not isinstance(pointer, dict) or not isinstance(pointer.get("row"), int) or pointer["row"] < 0:
            raise _refused("the placeholder names no row", where, f"{PLACEHOLDER}.row", pointer)
        kind = next((each for each in _SPLITS if each in str(row.get("dataset", "")).lower()), None)
        if kind is None:
            raise _refused("the placeholder names an unknown data set", where, "dataset", row.get("dataset"))
        found = self._table(kind).execute("SELECT question, answer FROM rows WHERE number = ?", (pointer["row"],))
        entry = found.fetchone()
        if entry is None:
            raise _refused(f"the placeholder names no row of {kind}", where, f"{PLACEHOLDER}.row", pointer)
        template = pointer.get("question_template")
        question = _dapo(entry[0], template) if kind == "dapo" else _skywork(entry[0], template)
        if question is None:
            raise _refused(
                "the placeholder's template cannot be used", where, f"{PLACEHOLDER}.question_template", template
            )
        answer = unwrapped(entry[1])
        if answer is None:
            raise _refused(f"the row of {kind} has no answer", where, f"{PLACEHOLDER}.row", entry[1])
        filled = {key: value for key, value in row.items() if key != PLACEHOLDER}
        params = row.get("responses_create_params")
        filled["responses_create_params"] = {
            **(params if isinstance(params, dict) else {}),
            "input": [{"role": "user", "content": question}],
        }
        return {**filled, "question": question, "expected_answer": answer}

    def _table(self, kind: str) -> sqlite3.Connection:
        if kind not in self._tables:
            path = Path(self.folder) / f"{kind}.sqlite"
            if not path.is_file():
                self._make_table(kind, path)
            self._tables[kind] = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
        return self._tables[kind]

    def _make_table(self, kind: str, path: Path) -> None:
        """One process makes it, the others wait; it is there as a whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock, storage_errors(path):
            with waiting(f"another process to make {path}"):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_file():
                return
            unfinished = path.with_suffix(".unfinished")
            unfinished.unlink(missing_ok=True)
            try:
                with closing(sqlite3.connect(unfinished)) as table:
                    # Whatever a kill leaves is thrown away.
                    table.execute("PRAGMA journal_mode = OFF")
                    table.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, question TEXT, answer TEXT)")
                    table.executemany("INSERT INTO rows VALUES (?, ?, ?)", self._questions(kind))
                    table.commit()
            except sqlite3.OperationalError as error:
                if "full" in str(error):  # in words what others say in an errno
                    raise OSError(errno.ENOSPC, str(error), str(path)) from error
                raise
            unfinished.replace(path)

    def _questions(self, kind: str) -> Iterator[tuple[int, str, str]]:
        source = self.sources[kind]
        key = f"placeholders.{kind}"
        try:
            files = data_files(source, key=key, split=_SPLITS[kind], mirror=self.mirror)
            number = 0
            for part in (part for file in files for part in parts_of(file)):
                for line_number, line in lines_of(part):
                    if line.isspace():
                        continue
                    row, _ = parse_row(line, f"{part.file.place}:{line_number}")
                    model = row.get("reward_model")
                    answer = model.get("ground_truth") if isinstance(model, dict) else None
                    yield number, _question(row), json.dumps(answer)
                    number += 1
        except DataError as error:
            # Not a row's fault: no row with such a placeholder could be used.
            raise ConfigError(
                f"the blend has placeholders, and their source cannot be used: {error.what}",
                where=key,
                expected="a copy of the data set, or its name on the hub",
                found=source if error.found is None else error.found,
                hints=(f"{key}=FOLDER_OR_FILE", *error.hints),
            ) from error


def unwrapped(stored: str) -> str | None:
    """The answer of an entry: a text, or what is in a JSON list with texts; None without one."""
    value = json.loads(stored)
    if isinstance(value, str) and value.lstrip().startswith(("[", '"')):
        try:
            value = json.loads(value)
        except ValueError:
            return value or None  # an interval: [0, 1)
    if isinstance(value, list):
        value = value[0] if value else None
    if value is None or isinstance(value, dict | list):
        return None
    return str(value) or None


def _question(row: Row) -> str:
    prompt = row.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    text = first.get("content") if isinstance(first, dict) else first
    if not isinstance(text, str):
        raise DataError(
            "a row of the source has no question",
            expected="prompt[0].content",
            found=str(prompt)[:60],
            hints=("placeholders.dapo=PATH placeholders.skywork=PATH   # copies in their published layout",),
        )
    return text


def _dapo(text: str, template: Any) -> str | None:
    """The first and the last block are instructions, and give way to the template's prefix and suffix."""
    blocks = text.split("\n\n")
    if len(blocks) > 2:
        text = "\n\n".join(blocks[1:-1])
    parts = template if isinstance(template, dict) else {}
    prefix, suffix = parts.get("prefix", ""), parts.get("suffix", "")
    if template is not None and not (parts and isinstance(prefix, str) and isinstance(suffix, str)):
        return None
    return f"{prefix}{text}{suffix}"


def _skywork(text: str, template: Any) -> str | None:
    if template is None:
        return text
    if not isinstance(template, str) or "{question}" not in template:
        return None
    return template.replace("{question}", text)


def _refused(what: str, where: str, field: str, found: Any) -> DataError:
    return DataError(what, where=f"{where} field {field}", found=json.dumps(found)[:100], hints=show_line(where))
