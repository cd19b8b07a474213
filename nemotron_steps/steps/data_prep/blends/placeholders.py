"""Rows of public blends that only point to a question of DAPO-Math-17k or Skywork-OR1-RL-Data, filled in:
`{"_hf_placeholder": {"row": n, "question_template": ...}, "dataset": ...}`. Published copies repeat 17 thousand
questions a hundred times; each is in memory once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.errors import ConfigError, DataError, show_line
from nemotron_steps.rows.lines import Row, parse_row
from nemotron_steps.steps.data_prep.blends.formats import lines_of, parts_of
from nemotron_steps.steps.data_prep.blends.sources import data_files

PLACEHOLDER = "_hf_placeholder"
_SPLITS = {"dapo": "train", "skywork": "math"}
"""Word in a row's `dataset` → split of the data set that it stands for."""


@dataclass
class PlaceholderFiller:
    """Fills rows, given where the questions are, and a folder with copies of hub data sets. One in each process."""

    sources: Mapping[str, str]
    mirror: str | None
    _entries: dict[str, list[tuple[str, str]]] = field(default_factory=dict, init=False)
    """Word of `_SPLITS` → question and answer, the latter as JSON, of each row."""

    def fill(self, row: Row, where: str) -> Row:
        """The row with question, answer and prompt in it."""
        pointer = row[PLACEHOLDER]
        if not isinstance(pointer, dict) or not isinstance(pointer.get("row"), int) or pointer["row"] < 0:
            raise _refused("the placeholder names no row", where, f"{PLACEHOLDER}.row", pointer)
        kind = next((each for each in _SPLITS if each in str(row.get("dataset", "")).lower()), None)
        if kind is None:
            raise _refused("the placeholder names an unknown data set", where, "dataset", row.get("dataset"))
        if kind not in self._entries:
            self._entries[kind] = self._read(kind)
        if pointer["row"] >= len(self._entries[kind]):
            raise _refused(f"the placeholder names no row of {kind}", where, f"{PLACEHOLDER}.row", pointer)
        entry = self._entries[kind][pointer["row"]]
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

    def _read(self, kind: str) -> list[tuple[str, str]]:
        source = self.sources[kind]
        key = f"placeholders.{kind}"
        distinct: dict[tuple[str, str], tuple[str, str]] = {}
        entries = []
        try:
            files = data_files(source, key=key, split=_SPLITS[kind], mirror=self.mirror)
            for part in (part for file in files for part in parts_of(file)):
                for number, line in lines_of(part):
                    if line.isspace():
                        continue
                    row, _ = parse_row(line, f"{part.file.place}:{number}")
                    model = row.get("reward_model")
                    answer = model.get("ground_truth") if isinstance(model, dict) else None
                    entry = (_question(row), json.dumps(answer))
                    entries.append(distinct.setdefault(entry, entry))
        except DataError as error:
            # Not a row's fault: no row with such a placeholder could be used.
            raise ConfigError(
                f"the blend has placeholders, and their source cannot be used: {error.what}",
                where=key,
                found=source if error.found is None else error.found,
                hints=(f"{key}=FOLDER_OR_FILE", *error.hints),
            ) from error
        return entries


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
