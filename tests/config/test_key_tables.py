"""What each key of a config or an env.toml takes, what it is where nobody says, whether it changes results, and which
other key it needs.

Written down in key_tables/, a file for each module with sections: a default or a limit that moves changes what files
mean that never named it.
"""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from nemotron_steps.config import mirrors, profiles, schema
from nemotron_steps.config.schema.base import OPERATIONAL, OnlyIf

FOLDER = Path(__file__).parent / "key_tables"
LIMITS = {
    "exclusiveMinimum": "> {}",
    "minimum": ">= {}",
    "exclusiveMaximum": "< {}",
    "maximum": "<= {}",
    "minLength": "{} letters or more",
    "maxLength": "{} letters at most",
    "minItems": "{} or more",
    "maxItems": "{} at most",
    "pattern": "like {}",
}
SCHEMAS = [import_module(f"{schema.__name__}.{each.name}") for each in pkgutil.iter_modules(schema.__path__)]


def rows(module: ModuleType) -> Iterator[str]:
    """One for each key of the sections that a module defines."""
    models = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, BaseModel)]
    for section in (each for each in models if each.__module__ == module.__name__):
        properties = section.model_json_schema().get("properties", {})
        for name in section.__annotations__.keys() & section.model_fields.keys():
            field = section.model_fields[name]
            default = "needed" if field.is_required() else written(field.get_default(call_default_factory=True))
            marks = ["operational"] if OPERATIONAL in field.metadata else []
            marks += [f"needs {each.text()}" for each in field.metadata if isinstance(each, OnlyIf)]
            yield "\t".join((f"{section.__name__}.{name}", takes(properties[name]), default, ", ".join(marks))).rstrip()


def takes(kind: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in kind:
        return str(kind["$ref"]).rpartition("/")[2]
    if "anyOf" in kind:
        return " or ".join(map(takes, kind["anyOf"]))
    if "enum" in kind or "const" in kind:
        return " | ".join(map(str, kind.get("enum", [kind.get("const")])))
    words = [str(kind.get("type", "anything")), *(say.format(kind[key]) for key, say in LIMITS.items() if key in kind)]
    inside = [kind["items"]] if "items" in kind else kind.get("prefixItems", [])
    inside += [each for each in [kind.get("additionalProperties")] if isinstance(each, dict)]
    return " ".join([*words, *(f"of ({takes(each)})" for each in inside)])


def written(value: Any) -> str:
    """As JSON; of a section, what is not its own default."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        value = {name: each for name, each in value if each != fields[name].get_default(call_default_factory=True)}
    return json.dumps(value, default=lambda each: each.model_dump() if isinstance(each, BaseModel) else str(each))


TABLES = {
    module.__name__.rpartition(".")[2]: table
    for module in (*SCHEMAS, mirrors, profiles)
    if (table := sorted(rows(module)))
}


@pytest.mark.parametrize("name", TABLES)
def test_every_key_is_as_its_table_says(name: str) -> None:
    file = FOLDER / f"{name}.tsv"
    if os.environ.get("UPDATE_TABLES"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(TABLES[name]) + "\n")
    assert file.read_text().splitlines() == TABLES[name], "UPDATE_TABLES=1 writes it anew"


def test_every_table_is_of_a_module() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(TABLES)
