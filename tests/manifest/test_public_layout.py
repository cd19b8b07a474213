"""A pack in the public Nemotron layout loads unchanged: one folder a step, types.toml at the root, free tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.manifest.index import build_index
from nemotron_steps.manifest.packs import PackSearch, open_pack
from nemotron_steps.manifest.registry import Registry
from tests.manifest.packs_on_disk import read_packs, write_files

FILES = {
    "types.toml": """# compatibility graph
[clean_jsonl]
description = "Filtered records"
is_a = ["chat_jsonl"]

[chat_jsonl]
description = "Records with messages"

[shards]
description = "Tokenized shards"

[weights_lora]
description = "Adapter weights"
convert_to = { weights_hf = "convert/fold" }

[weights_hf]
description = "Hugging Face folder"
convert_to = { weights_dist = "convert/to_dist" }

[weights_dist]
description = "Distributed checkpoint"
convert_to = { weights_hf = "convert/to_hf" }
""",
    "tune/adapter/step.toml": '''[step]
id = "tune/adapter"
name = "Adapter tuning"
category = "tune"
description = """\\
Tunes an adapter. Spans
several lines."""
tags = ["tune", "adapter"]

[[consumes]]
type = "chat_jsonl"
description = "Chats"
required = true

[[consumes]]
type = "weights_hf"
description = "Base model"
required = false

[[produces]]
type = "weights_lora"
description = "Adapter"

[[models]]
name = "some/model-7b"
description = "Small"
default = true
min_gpus = 2

[[parameters]]
name = "peft"
description = "adapter kind"
default = "lora"
choices = ["lora", "null"]

[[parameters]]
name = "quality"
default = { low = 0.3, high = 5 }

[[strategies]]
when = "memory is tight"
then = "lower the rank"
skill = "skills/adapter.txt"

[[errors]]
name = "oom"
recovery = "smaller batch"
skill = "skills/memory.txt"

[reference]
docs = "https://example.org"
skills = ["skills/adapter.txt"]

[house_rules]
owner = "team"
nested = { anything = [1, 2] }
''',
    "tune/adapter/config/default.yaml": "peft: lora\nrun:\n  env:\n    container: image\n",
    "tune/adapter/config/tiny.yaml": "peft: null\n",
    "tune/adapter/step.py": "raise RuntimeError('never imported')\n",
    "convert/fold/step.toml": """[step]
id = "convert/fold"
name = "Fold an adapter"
category = "convert"
[[consumes]]
type = "weights_lora"
[[consumes]]
type = "weights_hf"
[[produces]]
type = "weights_hf"
""",
    "convert/to_dist/step.toml": """[step]
id = "convert/to_dist"
category = "convert"
[[consumes]]
type = "weights_hf"
[[produces]]
type = "weights_dist"
[[parameters]]
name = "dtype"
""",
    "convert/to_hf/step.toml": """[step]
id = "convert/to_hf"
category = "convert"
[[consumes]]
type = "weights_dist"
[[produces]]
type = "weights_hf"
""",
    "bench/step.toml": """[step]
id = "bench"
category = "bench"
summary = "Makes a benchmark"
difficulty = "easy"
stack = "plain"
[[consumes]]
type = "undeclared_corpus"
[[produces]]
type = "undeclared_benchmark"
[[produces]]
type = "undeclared_translation"
required = false
""",
    "bench/pyproject.toml": "[project]\nname = 'x'\n",
    "bench/data/langpack.toml": "[pack]\nlanguage = 'en'\n",
    "patterns/notes.md": "# nothing\n",
}


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return read_packs(write_files(tmp_path / "public", FILES))


def test_every_step_loads_without_a_problem(registry: Registry) -> None:
    assert not registry.problems
    assert set(registry.steps) == {"tune/adapter", "convert/fold", "convert/to_dist", "convert/to_hf", "bench"}


def test_fields_and_free_tables_are_kept(registry: Registry) -> None:
    step = registry.step("tune/adapter")
    assert [(p.name, p.type, p.required) for p in step.consumes] == [
        ("chat_jsonl", "chat_jsonl", True),
        ("weights_hf", "weights_hf", False),
    ]
    assert step.step.description == "Tunes an adapter. Spans\nseveral lines."
    assert step.extra == {"house_rules": {"owner": "team", "nested": {"anything": [1, 2]}}}
    assert step.reference["skills"] == ["skills/adapter.txt"]
    assert step.parameters[0].allows("lora") and step.parameters[0].allows(None)
    assert not step.parameters[0].allows("full")
    assert step.parameters[1].default == {"low": 0.3, "high": 5}
    assert step.step.entry is None


def test_types_relate_as_declared(registry: Registry) -> None:
    assert registry.types.is_a("clean_jsonl", "chat_jsonl")
    assert not registry.types.is_a("chat_jsonl", "clean_jsonl")
    assert [hop.step_id for hop in registry.types.path("weights_dist", "weights_hf") or ()] == ["convert/to_hf"]
    # Folding needs the base model as well, so it is never inserted by itself.
    assert registry.types.path("weights_lora", "weights_hf") is None


def test_index_rows(tmp_path: Path) -> None:
    root = write_files(tmp_path / "public", FILES)
    index = build_index(PackSearch((open_pack(root, "public", "test"),)))
    assert [row.id for row in index.select(consumes="clean_jsonl")] == ["tune/adapter"]
    assert [row.id for row in index.select(produces="weights_hf")] == ["convert/fold", "convert/to_hf"]
    assert not any(row.runnable for row in index.steps)
    assert next(row for row in index.steps if row.id == "bench").description == "Makes a benchmark"
