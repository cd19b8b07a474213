"""Which keys change no result, and which other key a key needs.

Written down in key_tables.tsv: a mark that goes or comes makes runs take up what others made, or lets keys be ignored.
"""

import os
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

from nemotron_steps.config import schema
from nemotron_steps.config.schema.base import OPERATIONAL, OnlyIf

FILE = Path(__file__).with_name("key_tables.tsv")
SCHEMAS = [import_module(f"{schema.__name__}.{each.name}") for each in pkgutil.iter_modules(schema.__path__)]


def rows(module: ModuleType) -> Iterator[str]:
    """One for each marked key of the sections that a module defines."""
    models = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, BaseModel)]
    for section in (each for each in models if each.__module__ == module.__name__):
        for name in section.__annotations__.keys() & section.model_fields.keys():
            metadata = section.model_fields[name].metadata
            marks = ["operational"] if OPERATIONAL in metadata else []
            marks += [f"needs {each.text()}" for each in metadata if isinstance(each, OnlyIf)]
            if marks:
                yield f"{section.__name__}.{name}\t{', '.join(marks)}"


def test_every_marked_key_is_as_the_table_says() -> None:
    table = sorted(row for module in SCHEMAS for row in rows(module))
    if os.environ.get("UPDATE_TABLES"):
        FILE.write_text("\n".join(table) + "\n")
    assert FILE.read_text().splitlines() == table, "UPDATE_TABLES=1 writes it anew"
