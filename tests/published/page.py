"""docs/published_keys.md, made of the published tables and what becomes of each key."""

from functools import partial

from nemotron_steps.config.profiles import RunTable
from nemotron_steps.config.published import find, is_foreign
from nemotron_steps.config.schema.base import Section
from nemotron_steps.config.schema.data_prep import RlPrepConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.validation import has_key
from tests.published.tables import PREPARATIONS, TABLES, lines, published

HEAD = """# Published keys

Every key that the published Super3 and Nano3 RL configs and pages set, and what becomes of it here. A config file or an
override may use these names as they are.

- *same*: the key means the same here.
- *renamed*: it is taken as the key beside it, which it goes before.
- *always*: the value is always so, and saying it changes nothing; another is refused.
- *refused*: the key, or the published value, has no meaning here, for the reason beside it.

`tests/published/test_values.py` compares the values of our configs with the published ones, and has a reason for each
that differs.

| published key | | here |
|---|---|---|
"""


def schema_of(key: str) -> type[Section]:
    """The config that a key is for: of a GRPO step, or of the preparation of its data."""
    if has_key(RunTable, key):
        return RunTable
    return RlPrepConfig if any(key in lines(table) for table in PREPARATIONS) and "." not in key else RlConfig


def status(key: str) -> tuple[str, str]:
    """What becomes of a key, and the key here, the value or the reason."""
    found = find(key) if schema_of(key) is not RunTable else None
    if not is_foreign(key, partial(has_key, schema_of(key))):
        values = [f"`{theirs}` is `{ours}`" for theirs, ours in found[0].values.items()] if found is not None else []
        return "same", ", ".join(values) or (found[0].why if found is not None else "")
    assert found is not None, key
    row, parts = found
    if row.ours is not None:
        return "renamed", f"`{row.ours.format(*parts)}`" + (f", {row.why}" if row.why else "")
    if row.holds:
        said = " or ".join(f"`{_text(value)}`" for value in row.holds)
        fits = all(_is_reference(row.holds[0]) or value in row.holds for value in _values(key))
        return "always" if fits else "refused", f"{said}: {row.why}"
    return "refused", row.why


def page() -> str:
    """The whole text."""
    keys = sorted({key for table in TABLES for key in published(table)})
    rows = ("| " + " | ".join((f"`{key}`", *status(key))) + " |" for key in keys)
    return HEAD + "\n".join(rows) + "\n"


def _values(key: str) -> list[object]:
    """What the published configs say at a key."""
    return [values[key] for values in map(published, TABLES) if key in values]


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and value.startswith("=")


def _text(value: object) -> str:
    if _is_reference(value):
        return f"${{{str(value)[1:]}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
